"""Plans of divided steps: the compiler takes them, a core's bytes are its pieces, wrong cores are refused at once."""

import importlib.util

import pytest

from vit_tpu import config as configs
from vit_tpu import plan as command
from vit_tpu.diagnose import memory
from vit_tpu.errors import UserError
from vit_tpu.tpu import compiler, planner, report

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='the TPU compiler is not installed: pip install "vit_tpu[plan]"'
)
TINY = {
    "model": {"variant": "Ti/4", "image_size": 32, "depth": 2, "width": 256, "mlp_dim": 512, "num_heads": 2,
              "pool": "gap", "num_classes": 100, "scan": True},
    "data": {"source": "synthetic", "classes": 100},
    "optimizer": {"name": "adamw"},
    "training": {"steps": 100, "batch_size": 64, "ema": 0.999},
    "precision": "mixed_bfloat16",
}  # fmt: skip


def config(mesh, shard):
    return configs.validate(configs.from_dict({**TINY, "mesh": mesh, "shard": shard}))


@needs_libtpu
def test_a_core_holds_its_pieces_and_brings_weights_together_where_they_are_used(tmp_path):
    found = planner.make_plan(config("data=4,model=2", "full"), "v3", cache=tmp_path)
    assert found.fits and found.cores == 8 and found.batch_per_core == 8
    parts = found.memory.parts
    # To the byte what the layouts say of every array, as the estimate without a compiler has it.
    estimate = memory.breakdown(found.config, 100, 3).parts
    assert parts["parameters"] == estimate["weights"] < 4 * found.parameters / 5
    assert parts["optimizer"] == estimate["optimizer state"] and parts["ema"] == estimate["EMA"]
    assert parts["batch"] == estimate["batch"] + 4 * 16  # the examples' weights
    [kept] = tmp_path.glob("*.memory.json")
    text = compiler._read(kept).optimized
    assert "num_partitions=8" in text and "all-gather(" in text and "all-reduce(" in text
    # Heads stay in their parts: no all-to-all, and no weight is brought together over the model axis ({0,1}, ...).
    assert "all-to-all(" not in text
    assert "[depth, data, model]" in found.layout and found.layout in str(found)
    assert "mesh data=4,model=2, shard full" in str(found)


def test_mesh_and_cores_have_to_agree():
    with pytest.raises(UserError, match="mesh data=4,model=1 has 4 cores, not 8"):
        planner.make_plan(config("data=4", "state"), "v3", cores=8)
    with pytest.raises(UserError, match="16 cores asked for: plans are for one v3:2x2 slice, which has 8"):
        planner.make_plan(config("data=16", "state"), "v3")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--data_parallel=4", "--cores=8"], "use --data_parallel=8, or --mesh=data=4,model=2"),
        (["--data_parallel=8", "--mesh=data=8"], "--data_parallel is the data axis of --mesh"),
        (["--data_parallel=0"], "--data_parallel=0 is not a positive whole number"),
        (["--mesh=data=8,modle=2"], 'axis "modle" (did you mean "model"'),
        (["--shard=full"], "add mesh=data=N"),
        (["--model=S/16", "--mesh=data=2,model=4"], "num_heads 6 does not divide into 4 parts"),
    ],
)
def test_wrong_flags_are_answered_at_once(arguments, words, capsys):
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_data_parallel_alone_says_how_many_cores():
    assert command._cores(None, 8, []) == 8 and command._cores(8, 8, []) == 8 and command._cores(4, None, []) == 4


def test_gradients_are_known_by_their_pieces():
    argument = {"role": "parameters", "shape": [256, 512], "pieces": [[256, 256], [64, 256]], "name": "w"}
    assert report._pieces(argument) == [[256, 512], [256, 256], [64, 256]]
