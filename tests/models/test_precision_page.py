"""docs/precision.md is true: its session runs, and its constructed cases are what benchmarks/islands.py computes."""

import doctest
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "precision.md"


def rows(text):
    """Returns first cell -> other cells of every row of every Markdown table."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {first: others for first, *others in cells}


def test_the_session_gives_what_the_page_shows():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


def test_the_made_inputs_give_the_figures_of_the_page():
    command = [sys.executable, str(ROOT / "benchmarks" / "islands.py"), "--only", "made"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert run.returncode == 0, run.stderr[-2000:]
    page, computed = rows(PAGE.read_text()), rows(run.stdout)
    assert len(computed) == 8  # head, line, six cases
    for what, figures in computed.items():
        assert what in page or set(what) == {"-"}, what
        if figures[0] == "float32" or set(what) == {"-"}:
            continue
        exact, *half = map(float, figures)
        _, *shown = map(float, page[what])
        assert half == pytest.approx(shown, rel=0.3, nan_ok=True), what
        # Machines round float32 in orders of their own; it is right by far more than half precision.
        error = (lambda value: abs(value - 1)) if "is right" in what else abs
        assert error(exact) < 1e-4, what
        assert not error(half[0]) < 1e-3 or not error(half[1]) < 1e-3, what
