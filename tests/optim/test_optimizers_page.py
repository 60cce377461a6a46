"""docs/optimizers.md is true: its sessions run, and its table is what state_bytes says."""

import doctest
import pathlib
import re

import numpy as np
import pytest
from test_build import VARIANTS, vit_shapes

from vit_tpu.optim import state_bytes

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_the_sessions_give_what_the_page_shows():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0


def test_the_worked_step_is_the_formula():
    w, u, rate, decay = np.array([3.0, 4.0]), np.ones(2), 0.1, 0.1
    decoupled = w - rate * (np.linalg.norm(w) / np.linalg.norm(u) * u + decay * w)
    x = u + decay * w
    paper = w - rate * np.linalg.norm(w) / np.linalg.norm(x) * x
    text = PAGE.read_text()
    for values in (decoupled, paper):
        assert str([round(value, 4) for value in values.tolist()]) in text


def test_bytes_of_the_state_of_the_largest_model():
    rows = re.findall(r"^\| (`.*?) \| (.*?)\| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for names, options, size, share in rows:
        shapes = vit_shapes(*VARIANTS["G/14"], scan="stacked" in names)
        arguments = eval(f"dict({options.strip().strip('`')})")
        for name in re.findall(r"`(\w+)`", names):
            found = state_bytes(name, shapes, **arguments)
            assert found["total"] / 2**30 == pytest.approx(float(size), abs=0.005)
            assert found["total"] / found["parameters"] == pytest.approx(float(share), abs=5e-5)
            assert f"{found['parameters'] / 2**30:.2f}" == "7.19"
