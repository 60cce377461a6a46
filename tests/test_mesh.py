"""What a mesh may be: read from text, checked against heads, hidden units, batches and cores."""

import pytest

from vit_tpu import config as configs
from vit_tpu import mesh
from vit_tpu.errors import UserError


def test_axes_are_read_in_any_order_and_default_to_one():
    assert mesh.parse("model=2, data=4", "full") == mesh.Mesh(4, 2, "full")
    assert mesh.parse("data=8").cores == 8 and mesh.parse("model=2").cores == 2
    assert mesh.parse(None) is None and mesh.parse(" ") is None


@pytest.mark.parametrize(
    "text, shard, words",
    [
        ("date=8", "none", 'axis "date" \\(did you mean "data"'),
        ("data=8,data=2", "none", "gives data twice"),
        ("data=0", "none", 'data="0" is not a whole number above 0'),
        ("8", "none", "none of data and model"),
        (None, "state", "add mesh=data=N"),
    ],
)
def test_wrong_mesh_says_what_would_be_right(text, shard, words):
    with pytest.raises(UserError, match=words):
        mesh.parse(text, shard)


def test_heads_and_hidden_units_have_to_divide_over_the_model_axis():
    mesh.check_model(mesh.Mesh(1, 4), num_heads=16, mlp_dim=4096)
    with pytest.raises(
        UserError, match="model.num_heads 6 does not divide into 4 parts: use model=2 or model=3 or model=6, or"
    ):
        mesh.check_model(mesh.Mesh(1, 4), num_heads=6, mlp_dim=1536)
    with pytest.raises(
        UserError, match="model.mlp_dim 100 does not divide into 8 parts: use model=1 or model=2 or model=4, or"
    ):
        mesh.check_model(mesh.Mesh(1, 8), num_heads=8, mlp_dim=100)


def test_config_with_heads_that_do_not_divide_is_refused_before_anything_loads():
    with pytest.raises(UserError, match="num_heads 12"):
        configs.validate(configs.from_dict({"model": {"variant": "B/16"}, "training": {"steps": 1}, "mesh": "model=8"}))
    with pytest.raises(UserError, match='shard is "al"; choose one of none, state, full'):
        configs.validate(configs.from_dict({"training": {"steps": 1}, "mesh": "data=8", "shard": "al"}))


def test_batch_has_to_divide_over_the_data_axis_and_its_micro_batches():
    mesh.check_batch(mesh.Mesh(8), 64)
    with pytest.raises(UserError, match="batch_size 60 does not divide into 8 parts: use 56 or 64"):
        mesh.check_batch(mesh.Mesh(8), 60)
    with pytest.raises(UserError, match="8 parts of 4 micro-batches: use 32 or 64"):
        mesh.check_batch(mesh.Mesh(8), 48, accumulation_steps=4)
    with pytest.raises(UserError, match="use 8$"):
        mesh.check_batch(mesh.Mesh(8), 4)


def test_cores_have_to_be_data_times_model():
    mesh.check_cores(mesh.Mesh(4, 2), 8)
    with pytest.raises(UserError, match="has 4 cores, not 8: use data=8,model=1 or data=4,model=2 or data=2,model=4"):
        mesh.check_cores(mesh.Mesh(4), 8)


def test_copies_alone_are_no_divided_program():
    assert not mesh.parse("data=8").partitioned
    assert not mesh.parse("data=1", "full").partitioned
    assert mesh.parse("data=8", "state").partitioned and mesh.parse("data=4,model=2").partitioned
