"""A run waits for the device at its log lines, evaluations and checkpoints, and nowhere else."""

import sys

import pytest
import tensorflow as tf
import tf_keras as keras
from state_model import images, model
from tensorflow.python.framework import ops
from tiny_run import config

from vit_tpu.models.guard import StepGuard
from vit_tpu.training import logger
from vit_tpu.training.run import run


class Fetches:
    """Counts by training step how often a value is fetched from a tensor, which waits for the device."""

    def __init__(self, patch):
        self.at, self.steps, self.last = 0, {}, {}
        fetch = ops._EagerTensorBase._numpy
        count = logger.StepCallback.on_train_batch_end

        def counted(tensor):
            caller = sys._getframe(3).f_code.co_filename
            if caller.endswith(
                "data_adapter.py"
            ):  # the number of steps per execution, which lies on the host: see below
                return fetch(tensor)
            self.steps[self.at] = self.steps.get(self.at, 0) + 1
            return fetch(tensor)

        def moved(callback, batch, logs=None):
            self.at = callback.before_epoch + batch + 1
            return count(callback, batch, logs)

        patch.setattr(ops._EagerTensorBase, "_numpy", counted)
        patch.setattr(logger.StepCallback, "on_train_batch_end", moved)


@pytest.fixture
def fetches(monkeypatch):
    return Fetches(monkeypatch)


def test_run_fetches_at_the_log_interval_alone(fetches, tmp_path):
    run(
        config(
            training__board="watch", training__steps=48, steps_per_execution=2, log_every=12, evaluate_every=48,
            keep_best=False,
        ),
        tmp_path / "run",
    )  # fmt: skip
    # Before the first execution, at its end (compiled: the clock starts) and at the lines.
    assert set(fetches.steps) == {0, 2, 12, 24, 36, 48}
    # All figures in one fetch, the time that was waited, TensorBoard's own switch, which lies on the host, the weights'
    # movement, the attention logits.
    assert max(fetches.steps[step] for step in (12, 24, 36)) <= 5, fetches.steps


class Looks(keras.callbacks.Callback):
    """What a run must not do: looks at every loss."""

    def __init__(self):
        super().__init__()
        self._supports_tf_logs = True

    def on_train_batch_end(self, batch, logs=None):
        float(logs["step_loss"])


class Numbers(keras.callbacks.Callback):
    """Does not say that it takes tensors, so Keras fetches all logs for it at every execution."""

    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize("wrong, steps", [(None, {0, 8}), (Looks, {0, 2, 4, 6, 8}), (Numbers, {0, 2, 4, 6, 8})])
def test_a_callback_that_fetches_too_often_would_be_seen(fetches, tmp_path, wrong, steps):
    """The counting itself: without this the test above could pass by counting nothing."""
    watchers = [StepGuard(every=2**62), logger.Logger(tmp_path, 8, batch_size=6), *([wrong()] if wrong else [])]
    data = tf.data.Dataset.from_tensors(tuple(part[:6] for part in images())).repeat()
    model(steps_per_execution=2, run_eagerly=False).fit(data, steps_per_epoch=8, verbose=0, callbacks=watchers)
    assert set(fetches.steps) == steps


def test_what_keras_reads_before_every_execution_lies_on_the_host():
    with tf.device("/device:CPU:1"):  # as a GPU would be chosen
        made = model(steps_per_execution=4, run_eagerly=False)
    assert made._steps_per_execution.device.endswith("CPU:0") and made.waiting.total.device.endswith("CPU:0")
    assert made.counters.steps.device.endswith("CPU:1")
