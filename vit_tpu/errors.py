"""The one exception for what a user can put right, and help to find the right name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input: the message is one sentence that says what, where and what to do.

    Commands print it as a single line and exit with code 2.
    """


class OutOfMemoryError(RuntimeError):
    """There is not enough memory: the message says what was asked, what there is and what to change.

    Commands print it and exit with code 1.
    """


class WorkerError(RuntimeError):
    """The run is over because of another worker.

    Attributes:
      code: exit code: 75 if that worker vanished (the same commands go on), else its own, 1 or 2.
    """

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns ' (did you mean "x"?)' for the candidate most like `name`, or an empty string."""
    names = [str(candidate) for candidate in candidates]
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    return f' (did you mean "{lowered[found[0]]}"?)' if found else ""
