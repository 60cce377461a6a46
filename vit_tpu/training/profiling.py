"""A profiler window in training steps, whatever `steps_per_execution` is: planned, or asked of a running job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.training import storage, traces
from vit_tpu.training.logger import Clock, StepCallback

REQUEST = "profile.request"  # file in a run's folder; holds a number of steps, or nothing
STEPS = 20  # of a capture that does not say
LARGEST = 2**27  # bytes of a trace that is looked into after the capture: a second or two
POLL_SECONDS = 1.0


class Request:
    """A capture that somebody asks for while a run is going on.

    Attributes:
      steps: how many, or None while nobody asks.
    """

    def __init__(self) -> None:
        self.steps: int | None = None

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """Inside the block SIGUSR1 asks for a capture, unless somebody else handles it already."""
        free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) in (
            signal.SIG_DFL,
            signal.SIG_IGN,
        )

        def handle(number: int, frame: Any) -> None:
            self.steps = STEPS

        before = signal.signal(signal.SIGUSR1, handle) if free else None
        try:
            yield
        finally:
            if free:
                signal.signal(signal.SIGUSR1, before)


class Profiler(StepCallback):
    """Records the executions that hold a window of steps into `<workdir>/logs`, and checks that the trace holds them.

    Comes first in the list of callbacks, so that neither logging nor an evaluation after the window is in the trace.
    Every execution is marked as a step of the trace. Keras marks them, too, but around its callbacks: the mark of the
    execution in which a trace begins or ends is lost with it, so those two are marked here. (Keras' own TensorBoard
    callback counts executions, not steps, and records nothing, without a word, when the window lies beyond them.)

    Args:
      workdir: the run's folder.
      window: first and last step, or None for captures on demand alone.
      steps_per_execution: a window is widened to whole executions.
      start: steps taken before this `fit`.
      total_steps: of the run.
      say: where to print.
      clock: paused while a trace is written.
      request: what a signal asks for.

    Raises:
      UserError: the window is empty or ends beyond the run.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        window: tuple[int, int] | None,
        *,
        steps_per_execution: int,
        start: int,
        total_steps: int,
        say: Callable[[str], None] = print,
        clock: Clock | None = None,
        request: Request | None = None,
    ):
        super().__init__(2**62, start)
        self.workdir, self.logs = os.fspath(workdir), storage.join(workdir, "logs")
        self.each, self.total_steps, self.say, self.clock = steps_per_execution, total_steps, say, clock
        self.window: tuple[int, int] | None = None
        self.planned: tuple[int, int] | None = None  # what waits for a capture on demand to end
        self.request = request or Request()
        self.running, self.mark = False, contextlib.ExitStack()
        self.first, self.begun, self.before = 0, 0, set[str]()
        self.polled, self.written, self.ignored = -1e9, -1e9, ""
        if window is not None:
            self._plan(*window)

    def _plan(self, first: int, last: int) -> None:
        if first > last:
            raise UserError(f"profile={first},{last} is empty: give the first and the last step, such as 10,20")
        if first < 1 or last > self.total_steps:
            raise UserError(
                f"profile={first},{last} is outside this run's steps 1 to {self.total_steps:,}: choose a window inside"
            )
        if last <= self.start:  # the same command continues a run
            self.say(f"profile: steps {first} to {last} were taken before step {self.start:,}: not recorded again")
            return
        self.window = self.whole(max(first, self.start + 1), last)
        if self.window != (first, last):
            self.say(
                f"profile: steps {first} to {last} are recorded as {self.window[0]} to {self.window[1]}, whole "
                f"executions of {self.each}" + (f" from step {self.start + 1:,} on" if self.start else "")
            )

    def whole(self, first: int, last: int) -> tuple[int, int]:
        """Returns the window widened to whole executions of this `fit`."""
        before = (first - self.start - 1) // self.each * self.each
        after = -(-(last - self.start) // self.each) * self.each
        return self.start + before + 1, min(self.start + after, self.total_steps)

    def rewind(self, step: int) -> None:
        super().rewind(step)
        if getattr(self, "running", False):  # the steps in it are taken back
            self.mark.close()
            self._stop(self.first)
        if getattr(self, "window", None) is not None:  # executions begin elsewhere now
            first, last = self.window  # type: ignore[misc]
            self.window = self.whole(max(first, step + 1), last) if last > step else None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = self.before_epoch + batch + 1
        if not self.running:
            self._look_for_request()
            if self.request.steps is not None:
                self._answer(step, self.request.steps)
        if self.window is None or step < self.window[0]:
            return
        if not self.running:
            self._start(step, batch)
        if self.running and (step == self.first or step + self.each > self.window[1]):
            self.mark.enter_context(tf.profiler.experimental.Trace(traces.MARK, step_num=batch, _r=1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        if not self.running:
            return
        done = self.window is None or self.step >= self.window[1]
        if done and logs is not None:
            float(logs["step_loss"])  # the device has to finish before the trace does
        self.mark.close()
        if done:
            self._stop(self.step)

    def on_train_end(self, logs: Any = None) -> None:
        if self.running:  # the run was stopped inside the window
            self.mark.close()
            self._stop(self.step)

    def on_steps(self, step: int, logs: Any) -> None:
        """Nothing at intervals."""

    def _answer(self, step: int, steps: int) -> None:
        """Makes a request the next window; one that is planned for later stays planned."""
        self.request.steps = None
        first, last = self.whole(step, min(step - 1 + steps, self.total_steps))
        if self.window is not None and self.window[0] <= last:
            self.say(
                f"profile: steps {self.window[0]:,} to {self.window[1]:,} are recorded anyway: nothing else until then"
            )
            return
        self.planned, self.window = self.window, (first, last)
        self.say(f"profile: recording steps {first:,} to {last:,}")

    def _look_for_request(self) -> None:
        """Reads and removes the file that asks for a capture; looks once a second at most."""
        now = time.monotonic()
        if now - self.polled < (POLL_SECONDS if storage.is_local(self.workdir) else 30 * POLL_SECONDS):
            return
        self.polled, path = now, storage.join(self.workdir, REQUEST)
        try:
            if not storage.exists(path):
                self.ignored = ""
                return
            text = storage.read_text(path).strip()[:40]
            storage.remove(path)
            left = storage.exists(path)
        except (*storage.FAILURES, UnicodeDecodeError):
            return
        if left:  # it would ask again and again
            if not self.ignored:
                self.say(f"profile: {path} cannot be removed: it counts once")
            if self.ignored == (text or " "):
                return
            self.ignored = text or " "
        if text and not (text.isdecimal() and int(text)):
            self.say(f'profile: {path} holds "{text}": write a number of steps, or nothing for {STEPS}')
            return
        self.request.steps = int(text) if text else STEPS

    def _aside(self) -> contextlib.AbstractContextManager:
        return self.clock.pause() if self.clock is not None else contextlib.nullcontext()

    def _start(self, step: int, batch: int) -> None:
        self.model.counters.steps.numpy()  # what the device still has to do is not of this window
        self.before, self.first, self.begun = self._traces(), step, batch
        try:
            with self._aside():
                tf.profiler.experimental.start(self.logs)
            self.running = True
        except (*storage.FAILURES, RuntimeError) as error:  # another session, of TensorBoard's capture button perhaps
            self.window, self.planned = self.planned, None
            self.say(f"profile: NOT recorded, the profiler does not start ({storage.reason(error)})")

    def _traces(self) -> set[str]:
        root = storage.join(self.logs, "plugins", "profile")
        return {
            storage.join(root, time_, name)
            for time_ in storage.names(root)
            for name in storage.names(storage.join(root, time_))
            if name.endswith(".xplane.pb")
        }

    def _stop(self, last: int) -> None:
        with self._aside():
            # A trace lies in a folder named after the second, and would replace one of the same second.
            time.sleep(max(self.written + 1.1 - time.monotonic(), 0.0))
            try:
                tf.profiler.experimental.stop()
                self.written = time.monotonic()
            except (*storage.FAILURES, RuntimeError) as error:
                self.say(f"profile: NOT recorded, the profiler does not stop ({storage.reason(error)})")
                return
            finally:
                self.running, self.window, self.planned = False, self.planned, None
            self.say(self._report(last))

    def _report(self, last: int) -> str:
        """Looks into the new trace, and says what it holds and how to see it."""
        new = sorted(self._traces() - self.before)
        if not new:
            return f"profile: NOT recorded, the profiler wrote no trace under {self.logs}/plugins/profile"
        asked = list(range(self.begun, self.begun + last - self.first + 1, self.each))
        if storage.size(new[0]) > LARGEST:
            told = f"steps {self.first:,} to {last:,}, too large to look into"
        else:
            try:
                found = traces.finish(new[0])
            except Exception as error:  # no run ends for its profile
                return f"profile: {new[0]} cannot be read ({storage.reason(error)}): record it again"
            missing = [self.first + number - self.begun for number in asked if number not in found]
            told = f"steps {self.first:,} to {last:,} in {len(asked)} execution(s) of {self.each}"
            if missing:
                told += f", but the trace does NOT hold those from step {', '.join(map(str, missing))} on"
        return (
            f"profile: {told}: {new[0]}\n  tensorboard --logdir {self.logs}  (tab Profile)\n"
            f"  python -m vit_tpu.doctor --profile={self.workdir}  (the main things, without a browser)"
        )
