"""Stopping on a signal: at the next boundary, said, and at once when asked twice."""

import os
import signal
import types

import pytest

from vit_tpu.training.stopping import EvaluationStoppedError, StopOnRequest


def stopper(doing="training", **more):
    stop, lines = StopOnRequest(steps_per_execution=16), []
    stop.say, stop.doing = lines.append, doing
    stop.set_model(types.SimpleNamespace(stop_training=False))
    for name, value in more.items():
        setattr(stop, name, value)
    return stop, lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_at_the_next_boundary_and_says_how_long_that_takes(number):
    stop, lines = stopper(execution_seconds=0.5)
    with stop.on_signals():
        os.kill(os.getpid(), number)
        assert stop.requested and not stop.model.stop_training
        stop.on_train_batch_end(15)
    assert stop.model.stop_training and stop.seconds_since() < 5
    assert lines == [
        f"{number.name}: saves at the end of this execution (one execution of 16 step(s), about 0.5 s), and exits with "
        "75; once more stops at once"
    ]


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        ("starting", "before training begins"),
        ("compiling", "as soon as the first execution, which compiles, has ended"),
        ("evaluating", "leaves the evaluation"),
        ("saving", "once the checkpoint now being written is whole"),
    ],
)
def test_what_is_said_fits_what_the_run_is_at(doing, words):
    stop, lines = stopper(doing)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert words in lines[0]


def test_second_signal_acts_as_without_us():
    stop, _ = stopper()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_evaluation_is_left_at_its_next_batch():
    stop, _ = stopper()
    stop.on_test_batch_end(0)
    stop.requested = True
    with pytest.raises(EvaluationStoppedError):
        stop.on_test_batch_end(1)


def test_first_execution_compiles_and_does_not_count_for_the_bound():
    stop, _ = stopper()
    stop.on_train_begin()
    assert stop.doing == "compiling"
    stop.on_train_batch_begin(0)
    stop.on_train_batch_end(15)
    assert stop.doing == "training" and stop.bound() == "one execution of 16 step(s)"
    stop.on_train_batch_begin(16)
    stop.on_train_batch_end(31)
    assert "about" in stop.bound()
