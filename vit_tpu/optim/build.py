"""Optimizers by name, and what their state costs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError, nearest
from vit_tpu.optim.adafactor import Adafactor
from vit_tpu.optim.adamw import AdamW
from vit_tpu.optim.base import GroupedOptimizer
from vit_tpu.optim.lamb import LAMB
from vit_tpu.optim.rules import Rule
from vit_tpu.optim.sgd import SGD

OPTIMIZERS: dict[str, type[GroupedOptimizer]] = {
    "lamb": LAMB,
    "adafactor": Adafactor,
    "adamw": AdamW,
    "sgd": SGD,
}


def build(name: str, learning_rate: Any, **options: Any) -> GroupedOptimizer:
    """Returns an optimizer by name.

    Args:
      name: "lamb", "adafactor", "adamw" or "sgd", in any case.
      learning_rate: float or schedule.
      **options: of that optimizer's constructor.

    Raises:
      UserError: for an unknown name or option, with the nearest one.
    """
    kind = _kind(name)
    allowed = [option for option in options_of(name) if option != "learning_rate"]
    for option in options:
        if option not in allowed:
            raise UserError(
                f'The optimizer "{name.lower()}" has no option "{option}"'
                f"{nearest(option, allowed)}; it has {', '.join(sorted(allowed))}."
            )
    return kind(learning_rate, **options)


def options_of(name: str) -> list[str]:
    """Returns the names of the options that `build(name, ...)` accepts."""
    names: list[str] = []
    for owner in (_kind(name), GroupedOptimizer):
        names += [
            parameter.name
            for parameter in inspect.signature(owner).parameters.values()
            if parameter.kind != inspect.Parameter.VAR_KEYWORD
        ]
    return list(dict.fromkeys(names))


def state_bytes(
    optimizer: str | GroupedOptimizer, shapes: Iterable[Any] | Mapping[str, Any], **options: Any
) -> dict[str, int]:
    """Returns the bytes of an optimizer's state for given variables, without allocating any.

    Args:
      optimizer: a name (with **options, as in `build`) or an optimizer.
      shapes: a shape for each trainable variable (or path -> shape), or `Parameter`s.
      **options: of the optimizer, when it is given by name.

    Returns:
      `parameters`: bytes of the float32 variables themselves; `momentum`, `second_moment`;
      `counters`: step counters and placeholders as optax keeps them; `total`: their sum, equal to
      the byte to big_vision's optimizer state, so that it can be compared with the paper's figures;
      `allocated`: what this package allocates (moments and one int64 counter).
    """
    built = build(optimizer, 0.0, **options) if isinstance(optimizer, str) else optimizer
    found = {"parameters": 0, "momentum": 0, "second_moment": 0, "counters": 0}
    for rule in _rules(shapes):
        found["parameters"] += 4 * math.prod(rule.shape)
        specs = built._slot_specs(rule)
        for slot, (shape, dtype) in specs.items():
            kind = "momentum" if slot == "momentum" else "second_moment"
            found[kind] += math.prod(shape) * tf.as_dtype(dtype).size
        if isinstance(built, Adafactor):
            # optax keeps a one-element placeholder for each of v_row, v_col, v that is not used.
            found["counters"] += 4 if "second_moment_row" in specs else 8
    if isinstance(built, Adafactor):
        found["counters"] += 4 + (4 if built.beta_1 else 0)
    elif not isinstance(built, SGD):
        found["counters"] += 4
    moments = found["momentum"] + found["second_moment"]
    return {**found, "total": moments + found["counters"], "allocated": moments + 8}


def _kind(name: str) -> type[GroupedOptimizer]:
    kind = OPTIMIZERS.get(str(name).lower())
    if kind is None:
        raise UserError(
            f'Unknown optimizer "{name}"{nearest(str(name), OPTIMIZERS)}; there are {", ".join(OPTIMIZERS)}.'
        )
    return kind


def _rules(shapes: Iterable[Any] | Mapping[str, Any]) -> list[Rule]:
    items: Sequence[Any] = list(shapes.values()) if isinstance(shapes, Mapping) else list(shapes)
    rules = []
    for item in items:
        shape = item.variable.shape if hasattr(item, "variable") else item
        stacked = bool(getattr(item, "stacked", False))
        rules.append(Rule("", tuple(int(size) for size in shape), stacked=stacked))
    return rules
