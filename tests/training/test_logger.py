"""metrics.jsonl across interruptions, evaluations and jumps of the clock."""

import json
import time

import pytest
from state_model import images, model

from vit_tpu.training.logger import Clock, Logger


@pytest.fixture(scope="module")
def trained():
    made = model()
    made.fit(*images(), batch_size=6, epochs=2, verbose=0)
    return made


def logger(made, folder, **more):
    made_ = Logger(folder, 2, batch_size=6, **more)
    made_.set_model(made)
    made_.set_params({"steps": 100, "epochs": 1})
    return made_


def test_lines_beyond_the_checkpoint_and_half_lines_are_dropped(tmp_path):
    log = Logger(tmp_path, 2, batch_size=6)
    log.forget_after(4)  # no file yet
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (2, 4, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "lo')
    log.forget_after(4)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]


def test_sums_since_the_last_line_survive_a_stop(trained, tmp_path):
    first = logger(trained, tmp_path)
    expected = first.window()
    assert expected.keys() == {"loss", "accuracy"}
    first.sums = {}
    saved = json.loads(json.dumps(first.state()))
    trained.reset_metrics()  # as a new process begins
    second = logger(trained, tmp_path, metrics=saved)
    assert second.window() == pytest.approx(expected)
    trained.fit(*images(), batch_size=6, verbose=0)


def test_evaluation_does_not_cost_the_sums_since_the_last_line(trained, tmp_path):
    log = logger(trained, tmp_path)
    expected = {name: top / bottom for name, (top, bottom) in log.since_last().items()}
    with log.aside():
        trained.reset_metrics()
        trained.evaluate(*images(), batch_size=6, verbose=0)
    assert log.window() == pytest.approx(expected)


def test_jump_of_the_wall_clock_changes_no_duration(monkeypatch):
    clock = Clock()
    clock.start()
    monkeypatch.setattr(time, "time", lambda: -1e9)
    with clock.pause():
        monkeypatch.setattr(time, "time", lambda: 4e9)
    assert 0 <= clock.seconds() < 5


def test_lines_are_json_for_every_reader_whatever_the_numbers(trained, tmp_path):
    """A float16 gradient that overflows is no error, but neither NaN nor Infinity is JSON."""

    def refused(name):
        raise AssertionError(name)

    log = logger(trained, tmp_path)
    log.open()
    log.write({"step": 2, "grad_norm": float("inf"), "validation": {"loss": float("nan")}}, "train", {}, 2)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refused) == {"step": 2, "grad_norm": None, "validation": {"loss": None}}


def test_several_fits_do_not_make_tensorflow_suspect_a_leak(trained, tmp_path, caplog):
    for _ in range(6):
        log = logger(trained, tmp_path)
        log.on_train_begin()
        assert log.since_last().keys() == {"loss", "accuracy"}
    assert "retracing" not in caplog.text
