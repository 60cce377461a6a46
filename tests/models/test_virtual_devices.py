"""The same training on 1 and on 4 virtual devices, in a process of its own (two devices: test_step_replicas.py)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "replicas_script.py"


@pytest.fixture(scope="module")
def four():
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "4"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "LAMB", "Adafactor"])
def test_four_devices_give_the_weights_of_one_with_an_uneven_last_batch(four, optimizer):
    assert four["differences"][optimizer] < 1e-6


def test_evaluation_of_10001_examples_on_four_devices_is_exact(four):
    assert four["evaluation"]["count"] == 10_001
    assert four["evaluation"]["accuracy"] == four["accuracy"]
