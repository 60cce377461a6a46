"""One piece of work at a time beside the training: a thread that writes checkpoints."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from vit_tpu.training.arrays_file import AbandonedError

NICENESS = 19  # the writer has time; the threads that compute and feed the devices have not
Job = Callable[[Callable[[], bool]], None]


class Background:
    """Runs one job at a time on a thread; what goes wrong in it is raised by the next call from outside.

    A job gets a function that says whether to give up, and asks it often.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._abandoned = threading.Event()

    def submit(self, job: Job) -> None:
        """Starts a job; waits for the former first, if it is not finished."""
        self.wait()
        self._job = job
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Raises what a finished job left; returns at once."""
        if not self.busy():
            self.wait()

    def wait(self) -> None:
        """Returns when no job runs; raises what went wrong in the last one, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_over(self) -> Job | None:
        """Makes a running job give up, waits for that and returns it, for example to run it at full speed.

        What it wrote until then does not count. None: there was none, or it has just finished.
        """
        self._abandoned.set()
        try:
            self.wait()
        finally:
            self._abandoned.clear()
        return self._job

    def _run(self, job: Job) -> None:
        if sys.platform == "linux":  # there a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            job(self._abandoned.is_set)
            self._job = None
        except AbandonedError:
            pass
        except BaseException as error:
            self._job, self._error = None, error
