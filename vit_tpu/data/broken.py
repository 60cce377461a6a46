"""The list of records that could not be read, and the budget after which a run must stop."""

from __future__ import annotations

import threading

from absl import logging

from vit_tpu.errors import UserError


class BrokenRecords:
    """Collects the ids of unreadable records; more than `budget` different ones are an error.

    Attributes:
      budget: how many records may be skipped.
      reasons: {id: why it could not be read}, in the order found.
      failure: the error once the budget is exceeded, else None. An exception raised inside tf.data
        reaches the caller as a TensorFlow error; `check` raises the readable one instead.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.reasons: dict[str, str] = {}
        self.failure: UserError | None = None
        self._lock = threading.Lock()  # tf.data calls from several threads

    def add(self, record: str, reason: str) -> None:
        """Notes one record; the same one may come again (a later epoch) and counts once.

        Raises:
          UserError: listing all records found so far, once there are more than the budget.
        """
        with self._lock:
            if record not in self.reasons:
                self.reasons[record] = reason
                logging.warning("Skipped %s: %s.", record, reason)
            if len(self.reasons) > self.budget:
                self.failure = UserError(
                    f"{len(self.reasons)} unreadable records, {self.budget} allowed: {self._listed()}: "
                    "repair or remove them (data.max_broken allows some in training, evaluation none)"
                )
                raise self.failure

    def stop(self) -> None:
        """Raises the UserError for a batch without one readable record, however large the budget."""
        with self._lock:
            self.failure = UserError(
                f"no record of a batch could be read: {self._listed()}: repair or remove them, or use a larger batch"
            )
            raise self.failure

    def _listed(self) -> str:
        more = f"; and {len(self.reasons) - 20} more" if len(self.reasons) > 20 else ""
        return "; ".join(f"{key} ({why})" for key, why in list(self.reasons.items())[:20]) + more

    def report(self) -> str:
        """Returns one line that names the skipped records (the first twenty) and why, or an empty text."""
        with self._lock:
            if not self.reasons:
                return ""
            return f"{len(self.reasons)} unreadable records were skipped: {self._listed()}"

    def check(self) -> None:
        """Raises the UserError if the budget was exceeded."""
        if self.failure is not None:
            raise self.failure
