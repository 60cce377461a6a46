"""A run that really runs out of memory says so in one message, ends with 1 and keeps its checkpoint."""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def test_out_of_memory_is_told_with_what_to_change_and_the_checkpoint_stays(tmp_path):
    root = HERE.parents[1]
    result = subprocess.run(
        [sys.executable, str(HERE / "limited_run.py"), str(tmp_path / "run")], cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 1, (result.stdout[-1500:], result.stderr[-1500:])
    told = result.stderr[result.stderr.index("failed: ") :]
    assert "Traceback" not in result.stderr and told.startswith("failed: out of memory on the host\n")
    assert "asked: 512.0 MiB for float32[1024, 2, 256, 256] in " in told and "/attention" in told
    assert "blocks/0/attention: attention weights float32[1024, 2, 256, 256]" in told
    lines = [line.strip() for line in told.splitlines()]
    order = [line.split("=")[0] for line in lines if "saves" in line]
    assert order[:2] == ["precision", "training.accumulation_steps"]
    assert lines[-1] == "the checkpoint of step 2 is whole: the run continues from it"
    assert (tmp_path / "run" / "checkpoints" / "00000002").is_dir()
