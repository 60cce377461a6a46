"""A profiler window in training steps, whatever `steps_per_execution` is."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError


class ProfileWindow(keras.callbacks.Callback):
    """Records the executions that hold the steps START to STOP into `logs`, and checks that the trace is there.

    Keras marks every execution as a step of the trace. (Its own TensorBoard callback counts executions, not steps,
    and records nothing, without a word, when the window lies beyond them.)

    Args:
      logs: TensorBoard folder; the trace goes to logs/plugins/profile.
      window: first and last step.
      steps_per_execution: the window is widened to whole executions.
      start: steps taken before this `fit`.
      total_steps: of the run.
      say: where to print.

    Raises:
      UserError: the window lies outside the steps that this `fit` will take.
    """

    def __init__(
        self,
        logs: str | os.PathLike[str],
        window: tuple[int, int],
        *,
        steps_per_execution: int,
        start: int,
        total_steps: int,
        say: Callable[[str], None] = print,
    ):
        super().__init__()
        self._supports_tf_logs = True
        first, last = window
        if first <= start or last > total_steps:
            raise UserError(f"profile={first},{last} is outside this run's steps {start + 1} to {total_steps}")
        each = steps_per_execution
        self.first = start + (first - start - 1) // each * each + 1
        self.last = min(start + -(-(last - start) // each) * each, total_steps)
        self.folder, self.start, self.say, self.running = pathlib.Path(logs), start, say, False
        if (self.first, self.last) != (first, last):
            say(
                f"profile: steps {first} to {last} are recorded as {self.first} to {self.last}, whole "
                f"executions of {each}"
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.start + batch + 1 == self.first:
            tf.profiler.experimental.start(str(self.folder))
            self.running = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.running and self.start + batch + 1 >= self.last:
            float(logs["step_loss"])  # the device has to finish before the trace does
            self._stop()

    def on_train_end(self, logs: Any = None) -> None:
        if self.running:
            self._stop()

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        self.running = False
        traces = list(self.folder.glob("plugins/profile/*/*.xplane.pb"))
        if not traces:
            raise RuntimeError(f"the profiler wrote no trace under {self.folder}/plugins/profile")
        self.say(f"profile: {max(traces, key=os.path.getmtime)}\n  tensorboard --logdir {self.folder}  (tab Profile)")
