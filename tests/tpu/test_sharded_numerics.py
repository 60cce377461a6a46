"""The real training step divided over 4 and 8 devices, run there, against the step on one device: the same numbers.

One process runs all cases, on virtual CPU devices, since TensorFlow itself can only run what is not divided.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason='its CPU client runs the programs: pip install "vit_tpu[test]"'
)


def config(optimizer, pool, *, scan=False, **training):
    # Adam divides a gradient by its own size, and so the rounding of one that is nearly zero: changing the images by
    # one part in 2^24 moves LAMB's weights by 5e-4 of their largest, on one device. This epsilon makes that 5e-6.
    epsilon = {} if optimizer == "adafactor" else {"epsilon": 1e-3}
    return {
        "model": {"variant": "Ti/4", "image_size": 8, "depth": 2 if scan else 1, "width": 128, "mlp_dim": 64,
                  "num_heads": 4, "pool": pool, "num_classes": 8, "scan": scan},
        "data": {"source": "synthetic", "classes": 8},
        "optimizer": {"name": optimizer, "learning_rate": 0.01, "weight_decay": 0.1, "momentum_dtype": "float32",
                      **epsilon},
        "schedule": {"name": "constant"},
        "loss_scale": {"mode": "fixed", "initial": 1024.0},
        "training": {"steps": 100, "batch_size": 16, "grad_clip_norm": 0.5, **training},
    }  # fmt: skip


LAMB = config("lamb", "map", ema=0.9, accumulation_steps=2)
ADAFACTOR = config("adafactor", "gap", ema=0.9)
ADAMW = config("adamw", "gap", scan=True, accumulation_steps=2)
CASES = {
    "lamb_state_over_8": (LAMB, "data=8", "state", False),
    "lamb_full_over_4x2_as_for_a_tpu": (LAMB, "data=4,model=2", "full", True),
    "adafactor_full_over_4": (ADAFACTOR, "data=4", "full", False),
    "adafactor_state_over_2x4_as_for_a_tpu": (ADAFACTOR, "data=2,model=4", "state", True),
    "adamw_scan_full_over_2x2_as_for_a_tpu": (ADAMW, "data=2,model=2", "full", True),
}


@pytest.fixture(scope="module")
def results():
    cases = [dict(zip(("config", "mesh", "shard", "tpu"), case)) for case in CASES.values()]
    script = pathlib.Path(__file__).with_name("partitioned.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases)], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, map(json.loads, done.stdout.strip().splitlines()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_divided_step_gives_the_numbers_of_the_whole_one(results, name):
    found = results[name]
    assert found["compared"] > 50
    assert found["still"][1] > 1e-4, found["still"]  # everything that is compared has moved,
    assert found["idle"] < 1e-29  # but for the keys' biases and their moments, whose gradient is exactly zero
    assert found["worst"][0][1] < 2e-5, found["worst"]


@pytest.mark.parametrize("name", CASES)
def test_everything_large_is_divided_as_asked(results, name):
    values, mesh, shard, _ = CASES[name]
    sizes = dict(part.split("=") for part in mesh.split(","))
    data, model = int(sizes["data"]), int(sizes.get("model", 1))
    parts = results[name]["parts"]
    block = "blocks" if values["model"]["scan"] else "blocks/0"
    kernels = {f"{block}/mlp/dense1/kernel": model, f"{block}/attention/query/kernel": model, "embedding/kernel": 1}
    for kernel, split in kernels.items():
        assert parts[kernel] == split * (data if shard == "full" else 1)
        assert parts[f"momentum/{kernel}"] == split * data
        if values["training"].get("ema"):
            assert parts[f"ema/{kernel}"] == split * data
    assert parts["images"] == data


def test_factored_moments_are_divided_where_they_have_the_axis(results):
    parts = results["adafactor_full_over_4"]["parts"]
    # [128, 64]: the larger axis, 128, is divided; the mean over it (row) is whole, the mean over the other (col) not.
    assert parts["second_moment_row/blocks/0/mlp/dense1/kernel"] == 1
    assert parts["second_moment_col/blocks/0/mlp/dense1/kernel"] == 4
