"""Checks of constructor arguments, each with one sentence for what is wrong."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from vit_tpu.errors import UserError, nearest

_IGNORED = ("ema_momentum", "ema_overwrite_frequency", "jit_compile", "is_legacy_optimizer")
_REFUSED = {
    "clipnorm": "clip once, by global norm: model.compile(grad_clip_norm=...)",
    "clipvalue": "clip once, by global norm: model.compile(grad_clip_norm=...)",
    "use_ema": "average the weights with model.compile(ema=...)",
}


def refuse(owner: str, arguments: dict[str, Any], known: Iterable[str]) -> None:
    """Raises UserError for Keras arguments that have a better place here, and for unknown ones.

    Args:
      owner: class name, for the message.
      arguments: left-over keyword arguments.
      known: the names that exist, to suggest one of.
    """
    for key, value in arguments.items():
        if key in _REFUSED and value:
            raise UserError(f"{owner} takes no {key}: {_REFUSED[key]}.")
        if key not in _REFUSED and key not in _IGNORED:
            raise UserError(f'{owner} has no argument "{key}"{nearest(key, known)}.')


def check_number(**values: Any) -> None:
    """Raises UserError for what is neither a number nor (by the caller's check) a schedule."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise UserError(
                f"{name} is of {kind}: give a number or a tf_keras LearningRateSchedule such as "
                "vit_tpu.optim.schedules.Cosine (schedules of Keras 3, package keras, do not fit)."
            )


def check_not_negative(**values: float | None) -> None:
    """Raises UserError for a negative or non-finite number; None passes."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} is {value}: give a number that is not negative.")


def check_unit(**rates: float) -> None:
    """Raises UserError for a decay rate outside [0, 1)."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise UserError(f"{name} is {rate}: give a number in [0, 1).")


def check_above_zero(**values: float | None) -> None:
    """Raises UserError for a limit that is not above 0; None passes."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UserError(f"{name} is {value}: give a number above 0, or None for none.")


def patterns_list(patterns: Any, name: str) -> list[str] | None:
    """Returns patterns as a list (None stays None); a bare string is a UserError."""
    if isinstance(patterns, str):
        raise UserError(f'{name} is the text "{patterns}": give a list of patterns, [{patterns!r}].')
    return None if patterns is None else list(patterns)


def whole(value: Any, name: str) -> int:
    """Returns a count as an int; raises UserError unless it is a whole number >= 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or int(value) != value or value < 0:
        raise UserError(f"{name} is {value!r}: give a whole number that is not negative.")
    return int(value)
