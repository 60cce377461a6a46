"""Writes what a run does: metrics.jsonl, TensorBoard scalars, the progress line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu import plain
from vit_tpu.errors import UserError
from vit_tpu.models import guard
from vit_tpu.training import display, events, storage
from vit_tpu.training.gauges import Gauge


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
      peak: FLOP/s that model FLOPs are compared with, or None for no MFU.
      gauges: further numbers for each line.
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
        peak: float | None = None,
        gauges: Sequence[Gauge] = (),
    ):
        super().__init__(every, start)
        self.workdir = os.fspath(workdir)
        self.batch_size, self.total_steps, self.progress = batch_size, total_steps, progress
        self.examples_per_epoch, self.peak, self.gauges = examples_per_epoch, peak, list(gauges)
        self.clock = Clock()
        self.sums: dict[str, tuple[float, float]] = {}
        self.timed_from = (start, 0.0, 0.0)
        self.reader: events.Reader | None = None
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
            self.timed_from = (step, self.clock.seconds(), self._waited())

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
        self.reader = None  # the optimizer may be another one, or have another schedule
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
                self._read(logs)
            for gauge in self.gauges:
                getattr(gauge, "prepare", lambda: None)()
            self.clock.start()
            self.timed_from = (self.before_epoch + batch + 1, 0.0, self._waited())
        super().on_train_batch_end(batch, logs)

    def _waited(self) -> float:
        waiting = getattr(getattr(self, "model", None), "waiting", None)
        return 0.0 if waiting is None else waiting.seconds()

    def on_steps(self, step: int, logs: Any) -> None:
        read = self._read(logs)
        values = self.window(read)
        for name in ("grad_norm", "learning_rate", "loss_scale"):
            if name in read:
                values[name] = read[name]
        guard.judge(self.model, {name: int(read[name]) for name in guard.COUNTED})
        values |= self._speed(step)
        for gauge in self.gauges:
            values |= gauge(step)
        self.latest = values
        seconds, skipped = self.timed_from[1], int(read["skipped"])
        record = {"step": step, "seconds": round(seconds, 3), **values, "skipped_updates": skipped}
        if self.examples_per_epoch:
            record["epoch"] = round(step * self.batch_size / self.examples_per_epoch, 4)
        self.write(record, "train", {**values, "skipped_updates": skipped}, step)
        if self.progress is not None and self.total_steps:
            rate = values.get("images_per_second")
            self.progress.update(step, values, (self.total_steps - step) * self.batch_size / rate if rate else 0.0)

    def _speed(self, step: int) -> dict[str, float]:
        """Returns images/s since the last line, what a step's time went to, and the share of the peak."""
        from_step, from_seconds, from_waited = self.timed_from
        seconds, waited = self.clock.seconds(), self._waited()
        steps, spent = step - from_step, seconds - from_seconds
        self.timed_from = (step, seconds, waited)
        if steps <= 0 or spent <= 0:
            return {}
        rate = steps * self.batch_size / spent
        self.rates.append((steps, spent))
        whole, wait = 1e3 * spent / steps, 1e3 * (waited - from_waited) / steps
        values = {"images_per_second": rate, "time/step_ms": whole}
        if getattr(getattr(self.model, "waiting", None), "measures", False):
            values |= {"time/input_wait_ms": min(wait, whole), "time/device_ms": max(whole - wait, 0.0)}
        if self.peak and hasattr(self.model, "flops"):
            values["mfu"] = 3 * self.model.flops() * rate / self.peak  # the backward pass takes twice the forward one
        return values

    def _read(self, logs: Any = None) -> dict[str, float]:
        """Returns the model's running sums, counters and settings, fetched from the device at once."""
        if self.reader is None or self.reader.model is not self.model:
            self.reader = events.Reader(self.model)
        return self.reader(logs)

    def _totals(self, read: Mapping[str, float] | None = None) -> dict[str, tuple[float, float]]:
        """Returns the model's running sums: metric -> (weighted sum, weight)."""
        read = self._read() if read is None else read
        return {name.split(":")[0]: (value, read[f"{name.split(':')[0]}:weight"])
                for name, value in read.items() if name.endswith(":sum")}  # fmt: skip

    def since_last(self, read: Mapping[str, float] | None = None) -> dict[str, tuple[float, float]]:
        """Returns the sums since the last line, without disturbing Keras' own running means."""
        found = {}
        for name, now in self._totals(read).items():
            last = self.sums.get(name, (0.0, 0.0))
            last = last if now[1] >= last[1] else (0.0, 0.0)  # somebody reset the metric in between
            found[name] = (now[0] - last[0], now[1] - last[1])
        return found

    def window(self, read: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Returns the means of loss and shares of hits since the last call."""
        read = self._read() if read is None else read
        sums = self.since_last(read)
        self.sums = self._totals(read)
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
        curves = {name: value for name, value in values.items() if name != "count"}  # the same number every time
        self.write({"step": step, "validation": dict(values)}, "validation", curves, step)
        # Once more beside the hyper-parameters, for TensorBoard's table of runs.
        events.write_scalars(self.writers["train"], {f"validation/{name}": v for name, v in curves.items()}, step)
        if self.progress is not None:
            self.progress.say(f"step {step:,}  validation  {display.figures(values)}")

    def write(self, record: Mapping[str, Any], writer: str, scalars: Mapping[str, Any], step: int) -> None:
        try:
            storage.append_text(self.lines, json.dumps(plain.finite(record)) + "\n")
            events.write_scalars(self.writers[writer], scalars, step)
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
