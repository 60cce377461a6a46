"""A run that is killed three times, in a process of its own: see benchmarks/kill_test.py."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "kill_test.py"


@pytest.mark.slow
def test_killed_run_ends_with_the_same_bits_and_every_example_once_an_epoch(tmp_path):
    out = tmp_path / "kills.json"
    # Two seconds of training on a quiet machine: three kills come in time almost always, and fewer are no failure.
    command = [sys.executable, str(SCRIPT), "--kills=3", "--steps=150", "--ema", "--loss_scale", f"--json={out}"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(out.read_text())
    assert result["equal"] and result["once_an_epoch"] and result["kills"] >= 1
    assert set(result["codes"]) <= {0, -9}
