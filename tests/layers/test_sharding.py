"""Which axis of what is divided, and that nothing at all happens without a mesh."""

import tensorflow as tf

from vit_tpu.layers import sharding
from vit_tpu.mesh import Mesh
from vit_tpu.models.vit import ViT

FULL = Mesh(4, 2, "full", smallest=1)


def annotations(function, *args):
    """The sharding operations in a traced function, in order."""
    graph = tf.function(function, autograph=False).get_concrete_function(*args).graph
    return [op for op in graph.get_operations() if op.type == "XlaSharding"]


def tiles(op):
    from tensorflow.compiler.xla import xla_data_pb2

    proto = xla_data_pb2.OpSharding()
    proto.ParseFromString(op.get_attr("sharding"))
    return list(proto.tile_assignment_dimensions), list(proto.tile_assignment_devices), proto


def test_without_a_mesh_everything_is_what_it_was():
    x, variable = tf.ones([8, 4]), tf.Variable(tf.ones([4]))
    assert sharding.constrain(x, ("data",)) is x and sharding.batch(x) is x
    assert sharding.read(variable, None) is variable and sharding.gather(variable, None, tf.bfloat16) is variable
    model = ViT("Ti/4", image_size=8, depth=1, width=32, mlp_dim=64, num_heads=2, num_classes=3)
    assert not annotations(lambda images: model(images), tf.TensorSpec([4, 8, 8, 3]))


def test_devices_of_the_model_axis_follow_each_other():
    with sharding.over(Mesh(4, 2)):
        [op] = annotations(lambda x: sharding.constrain(x, ("data", None, "model")), tf.TensorSpec([8, 3, 6]))
        shape, devices, _ = tiles(op)
        assert shape == [4, 1, 2] and devices == [0, 1, 2, 3, 4, 5, 6, 7]
        [op] = annotations(lambda x: sharding.constrain(x, ("model",)), tf.TensorSpec([8, 3]))
        shape, devices, proto = tiles(op)
        # Parts 0, 2, 4, 6 hold the same half, and so do the others.
        assert shape == [2, 1, 4] and devices == [0, 2, 4, 6, 1, 3, 5, 7] and proto.replicate_on_last_tile_dim


def test_what_no_axis_names_is_whole():
    with sharding.over(Mesh(4, 1)):
        [op] = annotations(lambda x: sharding.constrain(x, ("model",)), tf.TensorSpec([8]))
        assert tiles(op)[2].type == 0  # REPLICATED


def test_state_takes_the_largest_axis_that_divides_and_is_free():
    # [width, heads, h] with the heads on the model axis
    assert sharding.state_spec([64, 4, 16], 1, FULL) == ("data", "model", None)
    assert sharding.state_spec([64, 128], 1, FULL) == ("data", "model")
    assert sharding.state_spec([6, 30], None, FULL) == (None, None)  # neither divides by 4
    assert sharding.state_spec([6, 30, 4], None, FULL) == (None, None, "data")


def test_axis_of_stacked_blocks_stays_whole():
    assert sharding.state_spec([48, 8, 16], 2, FULL, stacked=True) == (None, "data", "model")


def test_weights_lie_divided_only_if_they_are_to():
    assert sharding.stored_spec([64, 128], 1, FULL) == ("data", "model")
    for shard in ("none", "state"):
        assert sharding.stored_spec([64, 128], 1, Mesh(4, 2, shard, smallest=1)) == (None, "model")
    assert sharding.state_spec([64, 128], 1, Mesh(4, 2, "none", smallest=1)) == (None, "model")


def test_small_weights_stay_whole():
    mesh = Mesh(4, 1, "full")
    assert sharding.state_spec([1024], None, mesh) == (None,)
    assert sharding.state_spec([1024, 1024], None, mesh) == ("data", None)
    assert sharding.state_spec([48, 1024], None, mesh, stacked=True) == (None, None)  # small block by block


def test_every_kind_of_weight_names_its_heads_and_hidden_units():
    for scan in (False, True):
        model = ViT(
            "Ti/4", image_size=8, depth=2, width=32, mlp_dim=64, num_heads=2, num_classes=3, pool="map", scan=scan
        )
        found = {p.path: p for p in model.parameters()}
        start, offset = ("blocks", 1) if scan else ("blocks/0", 0)
        expected = {
            "attention/query/kernel": 1, "attention/key/bias": 0, "attention/out/kernel": 0, "attention/out/bias": None,
            "mlp/dense1/kernel": 1, "mlp/dense2/kernel": 0, "norm1/scale": None,
        }  # fmt: skip
        for path, split in expected.items():
            assert found[f"{start}/{path}"].split == (None if split is None else split + offset), path
        assert found["map/attention/value/kernel"].split == 1 and found["map/mlp/dense1/bias"].split == 0
        assert found["head/kernel"].split is None and found["embedding/kernel"].split is None
        for p in model.parameters():
            if p.split is not None:  # two parts of every such axis
                assert p.variable.shape[p.split] % 2 == 0


def test_gradient_of_a_gathered_weight_lies_where_its_state_lies():
    weight = tf.Variable(tf.ones([8, 4]))

    def gradient():
        with tf.GradientTape() as tape:
            value = sharding.gather(sharding.read(weight, 1), 1, tf.bfloat16)
            loss = tf.reduce_sum(tf.cast(value, tf.float32) ** 2)
        return tape.gradient(loss, weight)

    with sharding.over(FULL):
        ops = [tiles(op)[0] for op in annotations(gradient)]
    # read: divided; gather: cast where it lies, whole over the data axis; then the gradient, twice divided
    assert ops == [[4, 2], [4, 2], [1, 2, 4], [4, 2], [4, 2]]


def test_table_says_what_a_core_holds():
    model = ViT("Ti/4", image_size=8, depth=1, width=32, mlp_dim=64, num_heads=2, num_classes=3, pool="gap")
    model.compile("adamw", mesh=FULL, ema=0.9)
    text = sharding.table(model.groups, model.inner_optimizer, True, FULL)
    assert "[data, model]" in text and "[data, model, -]" in text and "whole" in text
    layouts = sharding.layouts(model.trained, FULL)
    pieces = sum(
        4 * int(tf.reduce_prod(sharding.piece(p.variable.shape, layouts[p.path].stored, FULL))) for p in model.trained
    )
    whole = 4 * sum(int(tf.reduce_prod(p.variable.shape)) for p in model.trained)
    together = text.splitlines()[-1].split()
    assert together[1:] == [f"{pieces / 2**20:,.2f}", "MiB", f"{3 * pieces / 2**20:,.2f}", "MiB"]
    assert pieces < whole / 4


def test_table_names_no_axis_that_has_one_core():
    model = ViT("Ti/4", image_size=8, depth=1, width=32, mlp_dim=64, num_heads=2, num_classes=3, pool="gap")
    mesh = Mesh(4, 1, "state", smallest=1)
    model.compile("adamw", mesh=mesh)
    text = sharding.table(model.groups, model.inner_optimizer, False, mesh)
    assert "model" not in text and "[data, -]" in text and "[data, -, -]" in text
