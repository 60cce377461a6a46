"""Writes what a run does: metrics.jsonl, TensorBoard scalars, the progress line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError
from vit_tpu.models import guard
from vit_tpu.training import display, storage


class Clock:
    """Seconds spent training: compilation, evaluation and saving are not counted."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.paused = 0.0

    def start(self) -> None:
        if self.started is None:
            self.started = time.perf_counter()

    def seconds(self) -> float:
        return 0.0 if self.started is None else time.perf_counter() - self.started - self.paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            if self.started is not None:
                self.paused += time.perf_counter() - before


class StepCallback(keras.callbacks.Callback):
    """A callback that acts every so many training steps, whatever `steps_per_execution` and the epochs are.

    Args:
      every: steps between two calls of `on_steps`; it is called at the end of the execution that reaches them.
      start: steps taken before this `fit`.

    Attributes:
      follows: whether each `fit` begins at the step that the model has reached, whoever trained it until then.
    """

    follows = False

    def __init__(self, every: int, start: int = 0):
        super().__init__()
        self._supports_tf_logs = True  # no copy from the device unless we read something
        self.every = every
        self.rewind(start)

    def rewind(self, step: int) -> None:
        """The next `fit` begins after `step` training steps."""
        self.start, self.step, self.acted = step, step, step

    def on_train_begin(self, logs: Any = None) -> None:
        if self.follows:
            self.rewind(self.model.counters.values()["steps"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.before_epoch = self.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step = self.before_epoch + batch + 1
        if self.step // self.every > self.acted // self.every and not self._nearly_done():
            self.act(logs)

    def _nearly_done(self) -> bool:
        """Whether the end, which acts anyway, is less than half an interval away."""
        steps = (self.params or {}).get("steps")
        left = self.start + steps * self.params["epochs"] - self.step if steps else self.every
        return left < self.every / 2

    def on_train_end(self, logs: Any = None) -> None:
        if self.acted < self.step:
            self.act(logs)

    def act(self, logs: Any) -> None:
        self.acted = self.step
        self.on_steps(self.step, logs)

    def on_steps(self, step: int, logs: Any) -> None:
        raise NotImplementedError


class Logger(StepCallback):
    """Writes metrics.jsonl and TensorBoard scalars and shows progress; loss and accuracy are means since the last line.

    Args:
      workdir: the run's folder.
      every: steps between lines; one line waits for the device once.
      total_steps: of the whole run, for the ETA; None if unknown.
      batch_size: examples a step.
      start: steps taken before.
      progress: where to show it, or None.
      examples_per_epoch: for the epoch column.
      metrics: what `state` gave to the checkpoint that the run continues from.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        every: int,
        *,
        batch_size: int,
        total_steps: int | None = None,
        start: int = 0,
        progress: display.Progress | None = None,
        examples_per_epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ):
        super().__init__(every, start)
        self.workdir = os.fspath(workdir)
        self.batch_size, self.total_steps, self.progress = batch_size, total_steps, progress
        self.examples_per_epoch = examples_per_epoch
        self.clock = Clock()
        self.sums: dict[str, tuple[float, float]] = {}
        self.timed_from = (start, 0.0)
        self.rates: list[tuple[int, float]] = []
        self.latest: dict[str, Any] = {}
        self.writers: dict[str, Any] = {}
        self.load(metrics or {})

    @property
    def lines(self) -> str:
        return storage.join(self.workdir, "metrics.jsonl")

    def load(self, metrics: Mapping[str, Any]) -> None:
        """Goes on with the figures that `state` returned."""
        self.latest = dict(metrics.get("train", {}))
        # The model's own sums start at zero: what was summed before is owed to the first line.
        self.sums = {name: (-top, -bottom) for name, (top, bottom) in metrics.get("window", {}).items()}

    def state(self) -> dict[str, Any]:
        """Returns the last line's figures and the sums since then, as plain values."""
        return {"train": self.latest, "window": self.since_last()}

    def rewind(self, step: int) -> None:
        super().rewind(step)
        if hasattr(self, "clock"):  # not yet at the beginning
            self.timed_from = (step, self.clock.seconds())

    def forget_after(self, step: int) -> int:
        """Drops the lines of steps that a killed run took beyond its last checkpoint, which will be taken again.

        Returns:
          How many lines went.
        """
        if not storage.exists(self.lines):
            return 0
        kept, all_lines = [], storage.read_text(self.lines).splitlines()
        for line in all_lines:
            with contextlib.suppress(ValueError):  # the last line may be half of one
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        if kept != all_lines:
            storage.write_text(self.lines, "".join(line + "\n" for line in kept))
        return len(all_lines) - len(kept)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self.open()

    def open(self) -> None:
        """Makes the folder and the TensorBoard writers, once."""
        storage.make_folder(self.workdir)
        for name in ("train", "validation"):
            if name not in self.writers:
                self.writers[name] = tf.summary.create_file_writer(storage.join(self.workdir, "logs", name))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.clock.started is None:  # the first execution holds the compilation
            if logs is not None:
                float(logs["step_loss"])
            self.clock.start()
            self.timed_from = (self.before_epoch + batch + 1, 0.0)
        super().on_train_batch_end(batch, logs)

    def on_steps(self, step: int, logs: Any) -> None:
        values = self.window()
        if logs and "grad_norm" in logs:
            values["grad_norm"] = float(logs["grad_norm"])
        values["learning_rate"] = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
        scale = getattr(self.model.optimizer, "loss_scale", None)
        if scale is not None:
            values["loss_scale"] = float(scale)
        counters = self.model.counters.values()
        guard.check(self.model)
        seconds, (from_step, from_seconds) = self.clock.seconds(), self.timed_from
        rate = None
        if step > from_step and seconds > from_seconds:
            rate = (step - from_step) * self.batch_size / (seconds - from_seconds)
            self.rates.append((step - from_step, seconds - from_seconds))
        self.timed_from = (step, seconds)
        values["images_per_second"] = rate
        values = {name: value for name, value in values.items() if value is not None}
        self.latest = values
        record = {"step": step, "seconds": round(seconds, 3), **values, "skipped_updates": counters["skipped"]}
        if self.examples_per_epoch:
            record["epoch"] = round(step * self.batch_size / self.examples_per_epoch, 4)
        self.write(record, "train", {**values, "skipped_updates": counters["skipped"]}, step)
        if self.progress is not None and self.total_steps:
            self.progress.update(step, values, (self.total_steps - step) * self.batch_size / rate if rate else 0.0)

    def _totals(self) -> dict[str, tuple[float, float]]:
        """Returns the model's running sums: metric -> (weighted sum, weight)."""
        totals = {}
        for metric in self.model.metrics:
            if hasattr(metric, "hits"):
                totals[metric.name] = (float(metric.hits.numpy()), float(metric.examples.numpy()))
            elif isinstance(metric, keras.metrics.Mean):
                totals[metric.name] = (float(metric.total.numpy()), float(metric.count.numpy()))
        return totals

    def since_last(self) -> dict[str, tuple[float, float]]:
        """Returns the sums since the last line, without disturbing Keras' own running means."""
        found = {}
        for name, now in self._totals().items():
            last = self.sums.get(name, (0.0, 0.0))
            last = last if now[1] >= last[1] else (0.0, 0.0)  # somebody reset the metric in between
            found[name] = (now[0] - last[0], now[1] - last[1])
        return found

    def window(self) -> dict[str, Any]:
        """Returns the means of loss and shares of hits since the last call."""
        sums = self.since_last()
        self.sums = self._totals()
        return {name: top / bottom for name, (top, bottom) in sums.items() if bottom > 0}

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The block may use and reset the model's metrics; the sums since the last line are not lost by it."""
        pending = self.since_last()
        try:
            yield
        finally:
            self.model.reset_metrics()
            self.sums = {name: (-top, -bottom) for name, (top, bottom) in pending.items()}

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """Records the result of an evaluation."""
        self.write({"step": step, "validation": dict(values)}, "validation", values, step)
        if self.progress is not None:
            self.progress.say(f"step {step:,}  validation  {display.figures(values)}")

    def write(self, record: Mapping[str, Any], writer: str, scalars: Mapping[str, Any], step: int) -> None:
        try:
            storage.append_text(self.lines, json.dumps(record) + "\n")
            with self.writers[writer].as_default(step):
                for name, value in scalars.items():
                    tf.summary.scalar(name, value)
            self.writers[writer].flush()
        except storage.FAILURES as error:
            raise UserError(
                f"the log of step {step} cannot be written to {self.workdir} ({storage.reason(error)}): free space and "
                "run the same command again; the checkpoints are whole"
            ) from None

    def images_per_second(self) -> float | None:
        """Returns the rate over the run, the execution that compiled left out."""
        steps, seconds = sum(s for s, _ in self.rates), sum(t for _, t in self.rates)
        return steps * self.batch_size / seconds if seconds else None

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
