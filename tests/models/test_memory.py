"""Rematerialisation and scan really lower the memory of a compiled gradient step."""

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hlo")
    result = subprocess.run(
        [sys.executable, str(HERE / "temp_bytes.py"), str(folder)],
        cwd=HERE.parents[1], env={"PYTHONPATH": str(HERE.parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.slow
def test_remat_and_scan_lower_the_memory_of_the_compiled_step(sizes):
    assert sizes["block"] < 0.5 * sizes["none"]
    assert sizes["scan"] < 0.5 * sizes["none"]


@pytest.mark.slow
def test_without_the_barrier_the_compiler_merges_the_recomputation_away(sizes):
    assert sizes["no_barrier"] > 0.9 * sizes["none"]
