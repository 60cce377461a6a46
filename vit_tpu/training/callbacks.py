"""The Keras callbacks that `train` itself uses: evaluate and save, beside the logger and the stop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.models import guard
from vit_tpu.training import checkpoints, gauges, state, storage
from vit_tpu.training.background import Background
from vit_tpu.training.checkpoints import Keep
from vit_tpu.training.logger import Clock, Logger, StepCallback
from vit_tpu.training.stopping import EvaluationStoppedError, StopOnRequest


class Evaluator(StepCallback):
    """Evaluates every so many steps and at the end, and keeps the result.

    Args:
      data: batches (images, labels, weights).
      steps: how many; None if the data knows.
      every: steps.
      logger: told the results.
      averaged: whether to evaluate the moving average of the weights.
      check: called after each evaluation, for example to raise on unreadable files.
      stop: once it is requested no evaluation is begun, and one that runs is left.
      metrics: what `state` gave to the checkpoint that the run continues from.
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
        stop: StopOnRequest | None = None,
        metrics: Mapping[str, Any] | None = None,
        steps: int | None = None,
    ):
        super().__init__(every, start)
        self.steps = steps
        self.data, self.logger, self.averaged, self.check, self.stop = data, logger, averaged, check, stop
        self.result: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self.evaluated = start
        self.load(metrics or {}, start)

    def load(self, metrics: Mapping[str, Any], step: int) -> None:
        """Goes on with the figures that `state` returned, at `step`."""
        self.result, self.best = dict(metrics.get("validation", {})), dict(metrics.get("best", {}))
        self.evaluated = int(metrics.get("evaluated", step))

    def state(self) -> dict[str, Any]:
        """Returns the last and the best result and the step of the last evaluation, as plain values."""
        return {"validation": self.result, "best": self.best, "evaluated": self.evaluated}

    def on_train_begin(self, logs: Any = None) -> None:
        if self.start // self.every > self.evaluated // self.every:  # the stop came before this one was done
            self.on_steps(self.start, logs)

    def on_steps(self, step: int, logs: Any) -> None:
        if self.stop is not None:
            self.stop.agree()  # workers that evaluate wait for nobody: not one may begin alone
            if self.stop.requested:
                return
        try:
            with self.logger.clock.pause(), self.logger.aside():
                values = self._evaluate()
        except EvaluationStoppedError:
            return
        self.result = {name: float(value) for name, value in values.items()}
        self.result["count"] = int(self.result["count"])
        self.evaluated = step
        if not self.best or self.result.get("accuracy", 0.0) > self.best.get("accuracy", 0.0):
            self.best = {"step": step, **self.result}
        self.logger.validation(step, self.result)

    def _evaluate(self) -> dict[str, Any]:
        at = contextlib.nullcontext() if self.stop is None else self.stop.at("evaluating")
        with at, self.model.averaged_weights() if self.averaged else contextlib.nullcontext():
            watchers = [] if self.stop is None else [self.stop]
            values = self.model.evaluate(self.data, steps=self.steps, verbose=0, return_dict=True, callbacks=watchers)
        if self.check is not None:
            self.check()
        return values


class Checkpointer(StepCallback):
    """Saves the whole training state every so many steps, in the background, and at the end.

    The state is taken at an execution boundary and written while training goes on; the next save waits for the one
    before. An error of the writer is raised at the next boundary.

    Args:
      folder: the run's `checkpoints`.
      every: steps.
      extra: plain values for the manifest, or a function of the step that returns them.
      keep: which checkpoints stay.
      clock: paused while training waits for the saving.
      evaluator: whose best result is saved at its step, if `keep` says so.
      weights: folder for weights alone beside each checkpoint, or None.
      averaged: whether those are the moving average.
      owned: called before a checkpoint is written; raises to stop.
      stop: told what the run is at.
      writes: False on a worker that only takes part in what saving asks of all of them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int,
        *,
        start: int = 0,
        extra: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        keep: Keep = Keep(best=False),  # noqa: B008  (frozen)
        clock: Clock | None = None,
        evaluator: Evaluator | None = None,
        weights: str | None = None,
        averaged: bool = False,
        owned: Callable[[], None] | None = None,
        stop: StopOnRequest | None = None,
        writes: bool = True,
    ):
        super().__init__(every, start)
        self.writes = writes
        self.folder, self.extra, self.keep = os.fspath(folder), extra or {}, keep
        self.clock, self.evaluator = clock or Clock(), evaluator
        self.weights, self.averaged, self.owned, self.stop = weights, averaged, owned, stop
        self.writer = Background()
        self.writing: int | None = None
        self.foreign: set[int] = set()

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        # What lies beyond our step was passed over as damaged, or is of another past: it must not push ours out.
        self.foreign = {step for step in checkpoints.steps(self.folder) if step > self.step}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.writer.poll()
        super().on_train_batch_end(batch, logs)
        if self._best() == self.step and self.acted < self.step:
            self.act(logs)

    def _best(self) -> int | None:
        return self.evaluator.best.get("step") if self.evaluator is not None and self.keep.best else None

    def on_steps(self, step: int, logs: Any) -> None:
        guard.check(self.model)  # a state gone wrong must not replace a good one
        with self.clock.pause(), contextlib.nullcontext() if self.stop is None else self.stop.at("saving"):
            self.writer.wait()  # before the state is copied: two copies are the most there ever are
            self.writing = step
            self.writer.submit(self._job(step))

    def on_train_end(self, logs: Any = None) -> None:
        with self.clock.pause(), contextlib.nullcontext() if self.stop is None else self.stop.at("saving"):
            # Whoever sent a signal may not wait long: no low priority now, and nothing that the last state replaces.
            step, job = self.writing, self.writer.take_over()
            if job is not None and step in (self.step, self._best()):
                job(checkpoints.never)
            if self.acted < self.step:
                guard.check(self.model)
                self.acted = self.step
                self.save_now(self.step)

    def save_now(self, step: int) -> str:
        """Saves the state as it is now as that of `step`, and waits for it; returns the checkpoint's folder."""
        self.writer.wait()
        self._job(step)(checkpoints.never)
        return checkpoints.folder_of(self.folder, step)

    def _job(self, step: int) -> Callable[[Callable[[], bool]], None]:
        extra = dict(self.extra(step) if callable(self.extra) else self.extra)
        if not self.writes:
            return lambda abandoned: None
        arrays, header = state.snapshot(self.model), state.settings_of(self.model)
        best = self._best()

        def job(abandoned: Callable[[], bool]) -> None:
            if self.owned is not None:
                self.owned()
            checkpoints.write(self.folder, step, arrays, extra, abandoned, header)
            self.foreign.discard(step)
            if self.weights is not None:
                checkpoints.write_weights(self.weights, step, arrays, self.averaged, header, abandoned)
            arrays.clear()  # the copy of the state goes now, not with the thread
            for gone in checkpoints.prune(self.folder, self.keep, step, best, self.foreign):
                if self.weights is not None:
                    storage.remove(storage.join(self.weights, os.path.basename(gone)))

        return job


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
    logger = Logger(workdir, every, batch_size=batch_size, gauges=[gauges.Memory()])
    folder = storage.join(workdir, "checkpoints")
    saver = Checkpointer(folder, checkpoint_every or 2**62, clock=logger.clock)
    logger.follows = saver.follows = True  # cells run twice: the steps go on
    return [guard.StepGuard(every=2**62), logger, saver]  # the logger looks for what the guard would
