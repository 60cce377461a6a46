"""Ends a run early without losing anything: on a signal, at the next execution boundary."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tf_keras as keras

from vit_tpu.training.hosts import Team


class EvaluationStoppedError(Exception):
    """A stop was requested while evaluating: the figures so far are of some of the examples and are dropped."""


class StopOnRequest(keras.callbacks.Callback):
    """Ends `fit` at the next execution boundary, and an evaluation at its next one, once a stop is requested.

    Args:
      steps_per_execution: of the run, for what is said.

    Attributes:
      requested: whether a stop was.
      doing: what the run is at: "starting", "compiling", "training", "evaluating" or "saving".
      asked: whether this process was asked to; with several workers all stop where they have agreed to.
      say: where to print a line.
    """

    def __init__(self, steps_per_execution: int = 1, team: Team | None = None) -> None:
        super().__init__()
        self.team = team if team is not None and team.size > 1 else None
        self.asked, self.boundaries = False, 0
        self._supports_tf_logs = True
        self.requested = False
        self.requested_at: float | None = None
        self.doing = "starting"
        self.say: Callable[[str], None] = functools.partial(print, flush=True)
        self.steps_per_execution = steps_per_execution
        self.last_end: float | None = None
        self.execution_seconds: float | None = None
        self._handle: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.doing, self.last_end = "compiling", None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.last_end = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.doing == "training" and self.last_end is not None:  # not the first, which compiles
            self.execution_seconds = time.perf_counter() - self.last_end
        self.doing = "training"
        self.agree()
        if self.requested:
            self.model.stop_training = True

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.agree()
        if self.requested:
            raise EvaluationStoppedError

    def agree(self) -> None:
        """With several workers, at a place that all come to alike: requests the stop if it is where all stop."""
        if self.team is None:
            return
        self.team.check()
        self.boundaries += 1
        if self.team.reached(self.boundaries, self.asked) and not self.requested:
            self.requested, self.requested_at = True, self.requested_at or time.perf_counter()

    @contextlib.contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Inside the block the run is at `doing`."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    def bound(self) -> str:
        """Returns the longest wait between a signal and the saving, in words."""
        steps = f"one execution of {self.steps_per_execution:,} step(s)"
        if self.execution_seconds is None:
            return steps
        return f"{steps}, about {self.execution_seconds:.2g} s"

    def seconds_since(self) -> float | None:
        """Returns the seconds since the stop was requested."""
        return None if self.requested_at is None else time.perf_counter() - self.requested_at

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Inside the block SIGINT and SIGTERM request a stop; a second one acts as without us."""
        before: dict[int, Any] = {}

        def handle(number: int, frame: Any) -> None:
            self.asked, self.requested_at = True, time.perf_counter()
            self.requested = self.team is None
            for other, handler in before.items():
                signal.signal(other, handler)
            with contextlib.suppress(RuntimeError):  # the signal came while a line was being printed
                self.say(f"{signal.Signals(number).name}: {self._plan()}, and exits with 75; once more stops at once")

        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
            self._handle = handle
        try:
            yield
        finally:
            self._handle = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def keep_signals(self) -> None:
        """Takes the signals again inside `on_signals`: TensorFlow's cluster sets a handler that drops SIGTERM."""
        if self._handle is not None and not self.asked:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._handle)

    def _plan(self) -> str:
        if self.team is not None:
            return f"stops with all other workers after the next execution or the one after it ({self.bound()}), saves"
        return {
            "starting": "stops before training begins, nothing is lost",
            "compiling": "saves as soon as the first execution, which compiles, has ended",
            "training": f"saves at the end of this execution ({self.bound()})",
            "evaluating": "leaves the evaluation at its next batches, saves",
            "saving": "saves the state once the checkpoint now being written is whole",
        }[self.doing]
