"""The Keras callbacks that `train` itself uses: log, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.models import guard
from vit_tpu.training import display, state


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
    """

    def __init__(self, every: int, start: int = 0):
        super().__init__()
        self._supports_tf_logs = True  # no copy from the device unless we read something
        self.every, self.start, self.step, self.acted = every, start, start, start

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
    ):
        super().__init__(every, start)
        self.workdir = pathlib.Path(workdir)
        self.batch_size, self.total_steps, self.progress = batch_size, total_steps, progress
        self.examples_per_epoch = examples_per_epoch
        self.clock = Clock()
        self.sums: dict[str, tuple[float, float]] = {}
        self.timed_from = (start, 0.0)
        self.rates: list[tuple[int, float]] = []
        self.latest: dict[str, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.lines = open(self.workdir / "metrics.jsonl", "a")  # noqa: SIM115
        self.writers = {
            name: tf.summary.create_file_writer(str(self.workdir / "logs" / name)) for name in ("train", "validation")
        }

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

    def window(self) -> dict[str, Any]:
        """Returns the means of loss and shares of hits since the last call, without disturbing Keras' own running
        means."""
        means: dict[str, Any] = {}
        for metric in self.model.metrics:
            if hasattr(metric, "hits"):
                top, bottom = metric.hits, metric.examples
            elif isinstance(metric, keras.metrics.Mean):
                top, bottom = metric.total, metric.count
            else:
                continue
            now = (float(top.numpy()), float(bottom.numpy()))
            last = self.sums.get(metric.name, (0.0, 0.0))
            last = last if now[1] >= last[1] else (0.0, 0.0)  # somebody reset the metric in between
            self.sums[metric.name] = now
            if now[1] > last[1]:
                means[metric.name] = (now[0] - last[0]) / (now[1] - last[1])
        return means

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """Records the result of an evaluation."""
        self.sums = {}  # evaluating has reset the metrics
        self.write({"step": step, "validation": dict(values)}, "validation", values, step)
        if self.progress is not None:
            self.progress.say(f"step {step:,}  validation  {display.figures(values)}")

    def write(self, record: Mapping[str, Any], writer: str, scalars: Mapping[str, Any], step: int) -> None:
        self.lines.write(json.dumps(record) + "\n")
        self.lines.flush()
        with self.writers[writer].as_default(step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
        self.writers[writer].flush()

    def images_per_second(self) -> float | None:
        """Returns the rate over the run, the execution that compiled left out."""
        steps, seconds = sum(s for s, _ in self.rates), sum(t for _, t in self.rates)
        return steps * self.batch_size / seconds if seconds else None

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.lines.close()


class Evaluator(StepCallback):
    """Evaluates every so many steps and at the end, and keeps the result.

    Args:
      data: batches (images, labels, weights) of known length.
      every: steps.
      logger: told the results.
      averaged: whether to evaluate the moving average of the weights.
      check: called after each evaluation, for example to raise on unreadable files.
      skip: once a stop is requested no evaluation is begun.
    """

    def __init__(
        self,
        data: tf.data.Dataset,
        every: int,
        logger: Logger,
        *,
        start: int = 0,
        averaged: bool = False,
        check: Callable[[], None] | None = None,
        skip: StopOnRequest | None = None,
    ):
        super().__init__(every, start)
        self.data, self.logger, self.averaged, self.check, self.skip = data, logger, averaged, check, skip
        self.result: dict[str, Any] = {}
        self.best: dict[str, Any] = {}

    def on_steps(self, step: int, logs: Any) -> None:
        if self.skip is not None and self.skip.requested:
            return
        with self.logger.clock.pause():
            scope = self.model.averaged_weights() if self.averaged else contextlib.nullcontext()
            with scope:
                values = self.model.evaluate(self.data, verbose=0, return_dict=True)
            if self.check is not None:
                self.check()
            self.model.reset_metrics()
            self.result = {name: float(value) for name, value in values.items()}
            self.result["count"] = int(self.result["count"])
            if not self.best or self.result.get("accuracy", 0.0) > self.best.get("accuracy", 0.0):
                self.best = {"step": step, **self.result}
            self.logger.validation(step, self.result)


class Checkpointer(StepCallback):
    """Saves the whole training state every so many steps.

    Args:
      folder: the run's `checkpoints`.
      every: steps.
      extra: plain values for the manifest.
      keep: newest checkpoints to leave.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int,
        *,
        start: int = 0,
        extra: Mapping[str, Any] | None = None,
        keep: int = 2,
        clock: Clock | None = None,
    ):
        super().__init__(every, start)
        self.folder, self.extra, self.keep = folder, dict(extra or {}), keep
        self.clock = clock or Clock()

    def on_steps(self, step: int, logs: Any) -> None:
        guard.check(self.model)  # a state gone wrong must not replace a good one
        with self.clock.pause():
            state.save(self.model, self.folder, step, self.extra, self.keep)


class StopOnRequest(keras.callbacks.Callback):
    """Ends `fit` at the next execution boundary once a stop is requested, for example by a signal."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self.requested = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.requested:
            self.model.stop_training = True

    @contextlib.contextmanager
    def on_signals(self, say: Callable[[str], None]) -> Iterator[None]:
        """Inside the block SIGINT and SIGTERM request a stop; a second one acts as without us."""
        before: dict[int, Any] = {}

        def handle(number: int, frame: Any) -> None:
            self.requested = True
            say(f"{signal.Signals(number).name}: saving at the end of this execution; once more stops at once")
            for other, handler in before.items():
                signal.signal(other, handler)

        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def callbacks(
    workdir: str | os.PathLike[str], *, batch_size: int, every: int = 50, checkpoint_every: int | None = None
) -> list[keras.callbacks.Callback]:
    """Returns callbacks for `model.fit` in a notebook: metrics.jsonl, TensorBoard and checkpoints under `workdir`.

    Args:
      workdir: the run's folder; made if missing.
      batch_size: examples a step, for images/s.
      every: steps between log lines.
      checkpoint_every: steps between checkpoints; None saves at the end of `fit` only.
    """
    logger = Logger(workdir, every, batch_size=batch_size)
    folder = pathlib.Path(workdir) / "checkpoints"
    return [guard.StepGuard(), logger, Checkpointer(folder, checkpoint_every or 2**62, clock=logger.clock)]
