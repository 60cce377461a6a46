"""A loss that is not finite: stop with the last good state, or go back and pass over the data."""

import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tiny_run import config

from vit_tpu import devices, run
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.training import build, checkpoints, failure, inputs, schedule, state

ORIGINAL = inputs.train_data
SETTINGS = {"training__checkpoint_every": 4, "evaluate_every": 12, "training__on_nonfinite": "rollback"}


def poisoned(bad, started):
    """Returns train_data whose batches number `bad` (in the stream) hold NaN."""

    def data(settings, source, start, broken, *hosts):
        started.append(start)

        def poison(index, batch):
            factor = tf.where(tf.reduce_any(tf.equal(index + start, bad)), float("nan"), 1.0)
            return (batch[0] * factor, *batch[1:])

        return ORIGINAL(settings, source, start, broken, *hosts).enumerate().map(lambda i, batch: poison(i, batch))

    return data


def arrays(workdir):
    return {name: array for name, array, _ in checkpoints.read(*state.newest(workdir / "checkpoints"))}


def test_rollback_goes_on_from_the_checkpoint_with_the_data_after_the_bad_batch(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(inputs, "train_data", poisoned([6], started))
    settings = config(**SETTINGS)
    summary = run(settings, tmp_path / "run")
    assert summary.status == "done" and summary.steps == 12 and summary.rollbacks == 1
    assert started == [0, 6, 7]  # batch number 6, step 7, is bad, read again and kept: back to step 4, on with batch 7
    said = capsys.readouterr().out
    assert (
        "step 7 is not finite: back to the checkpoint of step 4, and the data of steps 5 to 7 are passed over" in said
    )
    assert json.loads((tmp_path / "run/summary.json").read_text())["rollbacks"] == 1
    manifest = state.newest(tmp_path / "run/checkpoints")[1]
    assert manifest["rollbacks"] == 1 and manifest["position"]["examples"] == (7 + 8) * 32
    # By hand: four steps, then eight more on batches 7 to 14.
    source, here = inputs.open_source(settings, "train"), devices.choose("cpu")
    plan = schedule.plan(settings, source.num_examples)
    keras.utils.set_random_seed(0)
    model = build.build_model(settings, here, 10, 1, plan)
    model.fit(ORIGINAL(settings, source, 0, BrokenRecords(0)), epochs=1, steps_per_epoch=4, verbose=0)
    model.fit(ORIGINAL(settings, source, 7, BrokenRecords(0)), epochs=1, steps_per_epoch=8, verbose=0)
    expected, got = state.snapshot(model), arrays(tmp_path / "run")
    assert not [name for name, (array, _) in expected.items() if not np.array_equal(array, got[name])]


def test_rollbacks_are_bounded_and_the_last_good_state_stays(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(inputs, "train_data", poisoned(list(range(6, 99)), started))
    with pytest.raises(NonFiniteError, match="max_rollbacks=2 are used up"):
        run(config(**SETTINGS, training__max_rollbacks=2), tmp_path / "run")
    assert started == [0, 6, 7, 7, 8, 8]  # after each return the first batch is bad again, and is read again
    assert "the weights after step 4 are in" in capsys.readouterr().out
    found = state.newest(tmp_path / "run/checkpoints")
    assert found[1]["step"] == 4 and found[1]["rollbacks"] == 2
    assert all(np.isfinite(a).all() for a in arrays(tmp_path / "run").values() if a.dtype.kind == "f")


def test_without_a_checkpoint_the_latched_state_goes_on_after_the_bad_batch(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(inputs, "train_data", poisoned([2], started))
    summary = run(config(evaluate_every=12, training__on_nonfinite="rollback"), tmp_path / "run")
    assert summary.steps == 12 and summary.rollbacks == 1 and started == [0, 2, 3]
    said = capsys.readouterr().out
    assert "its batch is in" in said and "--replay" not in said  # the weights from before it are not kept
    assert "the data of step 3 is passed over" in said


@pytest.mark.parametrize(
    "part, words",
    [
        ((failure.numerics, "walk"), "step 3: not taken again here (MemoryError: no room); its batch is in "),
        ((failure, "look"), "step 3: it could not be looked at or kept (MemoryError: no room)"),
    ],
)
def test_stop_says_that_there_is_a_way_on_and_saves_even_if_the_step_cannot_be_kept(
    tmp_path, monkeypatch, capsys, part, words
):
    def no_room(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(*part, no_room)
    monkeypatch.setattr(inputs, "train_data", poisoned([2], []))
    with pytest.raises(NonFiniteError, match="step 3 is not finite.*--on_nonfinite=rollback goes back"):
        run(config(), tmp_path / "run")
    assert state.newest(tmp_path / "run/checkpoints")[1]["step"] == 2
    assert words in capsys.readouterr().out
