"""How one variable is updated: the groups, flattened to what an optimizer looks up and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.optim import decay


@dataclasses.dataclass(frozen=True)
class Rule:
    """The settings of one variable.

    Attributes:
      path: its parameter path (or variable name).
      shape: of the variable.
      decay: "none", "body" or "head".
      trust: scaled by the trust ratio (LAMB).
      lr_scale: factor on the learning rate, or one for each slice of a stacked variable.
      stacked: slices along axis 0 are variables of their own.
    """

    path: str
    shape: tuple[int, ...]
    decay: str = "body"
    trust: bool = True
    lr_scale: float | tuple[float, ...] = 1.0
    stacked: bool = False

    @property
    def frozen(self) -> bool:
        return decay.is_frozen(self.lr_scale)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of what counts as one variable."""
        return self.shape[1:] if self.stacked else self.shape

    def lr_scale_tensor(self) -> tf.Tensor:
        """The factor, float32, in a shape that multiplies the variable."""
        scale = tf.constant(self.lr_scale, tf.float32)
        if isinstance(self.lr_scale, tuple):
            return tf.reshape(scale, [-1] + [1] * (len(self.shape) - 1))
        return scale

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums over a variable, or over each slice, keeping a shape that multiplies it."""
        axes = list(range(1 if self.stacked else 0, len(self.shape)))
        return tf.reduce_sum(tensor, axes, keepdims=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        config = dataclasses.asdict(self)
        config["shape"] = list(self.shape)
        if isinstance(self.lr_scale, tuple):
            config["lr_scale"] = list(self.lr_scale)
        return config

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Rule:
        values = dict(config)
        values["shape"] = tuple(int(size) for size in values["shape"])
        if isinstance(values["lr_scale"], (list, tuple)):
            values["lr_scale"] = tuple(float(scale) for scale in values["lr_scale"])
        return cls(**values)


def from_groups(groups: Sequence[decay.Group], exclusions: dict[str, list[str] | None]) -> list[tuple[Rule, Any]]:
    """Returns (rule, variable) in the model's order; an optimizer's own exclusions win.

    Raises:
      UserError: when an exclusion matches no path.
    """
    members = [(group, parameter) for group in groups for parameter in group.parameters]
    places = [place for group in groups for place in group.positions]
    if len(places) == len(members):
        members = [member for _, member in sorted(zip(places, members), key=lambda pair: pair[0])]
    undecayed, unscaled = _excluded([p.path for _, p in members], exclusions)
    found = []
    for group, parameter in members:
        kind, trust = group.decay, group.trust
        if undecayed is not None:
            kind = "none" if parameter.path in undecayed else decay.decay_class(parameter)
        if unscaled is not None:
            trust = parameter.path not in unscaled
        shape = tuple(int(size) for size in parameter.variable.shape)
        rule = Rule(parameter.path, shape, kind, trust, group.lr_scale, parameter.stacked)
        found.append((rule, parameter.variable))
    return found


def from_variables(
    variables: Sequence[Any], saved: Sequence[Rule], exclusions: dict[str, list[str] | None]
) -> list[Rule]:
    """Returns rules for variables that no model described.

    With saved rules (a reloaded optimizer) they are matched by order and shape; without, every
    variable decays by the body's value and is trust-scaled, unless excluded by name.

    Raises:
      UserError: when the saved rules are of other variables, or an exclusion matches nothing.
    """
    shapes = [tuple(int(size) for size in variable.shape) for variable in variables]
    if saved:
        for candidates in (saved, [rule for rule in saved if not rule.frozen]):
            if [rule.shape for rule in candidates] == shapes:
                return list(candidates)
        raise UserError(
            f"The optimizer was saved with {len(saved)} variables in groups, but is given "
            f"{len(shapes)} variables of other shapes: assign the new model's groups first."
        )
    names = _unique([variable.name.split(":")[0] for variable in variables])
    undecayed, unscaled = (chosen or set() for chosen in _excluded(names, exclusions))
    return [
        Rule(
            name,
            shape,
            "none" if name in undecayed else "body",
            name not in unscaled,
        )
        for name, shape in zip(names, shapes)
    ]


def same_path(rule: Rule, saved: dict[str, Rule]) -> Rule:
    """Returns a saved rule's settings for the same path and shape, else the rule itself."""
    old = saved.get(rule.path)
    return old if old is not None and old.shape == rule.shape else rule


def _excluded(paths: Sequence[str], exclusions: dict[str, list[str] | None]) -> tuple[set[str] | None, set[str] | None]:
    chosen = []
    for what in ("weight_decay", "layer_adaptation"):
        patterns = exclusions[what]
        where = f"exclude_from_{what}"
        chosen.append(None if patterns is None else decay.select(patterns, paths, where))
    return chosen[0], chosen[1]


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique
