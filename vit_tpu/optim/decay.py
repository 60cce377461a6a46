"""Which parameters decay, which get a trust ratio, and at what share of the learning rate.

Groups are resolved once, from what the model says about its own parameters (kind, part of the
model, depth), never from variable names: renaming a layer changes nothing here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any

from vit_tpu.errors import UserError, nearest
from vit_tpu.optim.arguments import patterns_list

KINDS = ("kernel", "bias", "norm", "posemb", "token", "scale")
DECAYS = ("none", "body", "head")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One trainable variable as its model describes it.

    Attributes:
      path: readable name joined by "/", for example "blocks/0/mlp/dense1/kernel".
      variable: the `tf.Variable` (anything with a `shape` is enough for `resolve` and `table`).
      kind: one of `KINDS`.
      part: "body" or "head".
      depth: 0 = stem, 1..L = block, L+1 = final norm, pooling head and classifier.
      stacked: axis 0 of the variable stacks the model's blocks 1..L; every slice along it is then
        treated as a variable of its own.
      split: axis of attention heads or hidden units, which the model axis of a mesh divides, or None.
    """

    path: str
    variable: Any
    kind: str = "kernel"
    part: str = "body"
    depth: int = 1
    stacked: bool = False
    split: int | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are updated alike.

    Attributes:
      name: what the table prints.
      decay: "none", "body" (the optimizer's `weight_decay`) or "head" (`head_weight_decay`).
      trust: LAMB scales their update by the trust ratio.
      lr_scale: factor on the learning rate; 0 = frozen. A tuple holds one factor for each slice
        of stacked parameters.
      parameters: the members, in the model's order.
      positions: each member's place in `model.parameters()`; () = the groups follow each other.
    """

    name: str
    decay: str
    trust: bool
    lr_scale: float | tuple[float, ...]
    parameters: tuple[Parameter, ...]
    positions: tuple[int, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(parameter.path for parameter in self.parameters)

    @property
    def size(self) -> int:
        """Number of parameters (scalars) in the group."""
        return sum(math.prod(parameter.variable.shape) for parameter in self.parameters)

    @property
    def frozen(self) -> bool:
        return is_frozen(self.lr_scale)


def is_frozen(lr_scale: float | tuple[float, ...]) -> bool:
    """True when a learning-rate factor (or every slice's) is zero."""
    return not any(lr_scale) if isinstance(lr_scale, tuple) else lr_scale == 0


def matches(pattern: str, path: str) -> bool:
    """Whether a glob names a parameter path.

    A pattern with "/" is compared with the whole path, or with its beginning up to a "/"
    ("blocks/0" names all of block 0). A pattern without "/" is compared with each whole component:
    "bias" names ".../query/bias", never "unbiased/kernel". Case matters.
    """
    if "/" in pattern:
        return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}/*")
    return any(fnmatch.fnmatchcase(part, pattern) for part in path.split("/"))


def select(patterns: Iterable[str], paths: Sequence[str], where: str) -> set[str]:
    """Returns the paths that any of the globs names.

    Raises:
      UserError: for a pattern that names nothing, with the nearest path.
    """
    chosen: set[str] = set()
    for pattern in patterns_list(patterns, where) or ():
        found = {path for path in paths if matches(pattern, path)}
        if not found:
            words = [*paths, *{word for path in paths for word in path.split("/")}]
            raise UserError(
                f'{where}: the pattern "{pattern}" matches no parameter{nearest(pattern, words)}; '
                "patterns are globs over parameter paths."
            )
        chosen |= found
    return chosen


def resolve(
    parameters: Sequence[Parameter],
    *,
    freeze: Iterable[str] = (),
    layer_decay: float | None = None,
    exclude_from_weight_decay: Iterable[str] | None = None,
    exclude_from_layer_adaptation: Iterable[str] | None = None,
) -> list[Group]:
    """Sorts a model's parameters into groups that are updated alike.

    By default kernels decay (the classifier's by the head's value, all others by the body's, as
    the paper does); biases, normalisation and layer scales, position embeddings and tokens do not.
    With LAMB the body's kernels are scaled by their trust ratio and nothing else is: the
    classifier starts at zero, from where a trust ratio would hardly let it grow.

    Args:
      parameters: `model.parameters()`.
      freeze: globs over paths, or "body" / "head" for a whole part: never updated, no slots.
      layer_decay: d in (0, 1]: the learning rate of depth k is multiplied by d ** (top - k), where
        top is the greatest depth, so the head has 1 and the stem d ** (L + 1).
      exclude_from_weight_decay: globs; None keeps the default above, [] excludes nothing.
      exclude_from_layer_adaptation: the same for the trust ratio. The two are independent.

    Returns:
      Groups in the order in which their first member appears.

    Raises:
      UserError: for a pattern that matches nothing (with the nearest path), a repeated path, an
        unknown kind or a layer decay outside (0, 1].
    """
    parameters = list(parameters)
    paths = [parameter.path for parameter in parameters]
    if len(set(paths)) != len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise UserError(f"Parameter paths must be unique; repeated: {', '.join(twice)}.")
    for parameter in parameters:
        if parameter.kind not in KINDS:
            hint = nearest(parameter.kind, KINDS)
            raise UserError(f'{parameter.path}: unknown kind "{parameter.kind}"{hint}.')
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise UserError(f"layer_decay is {layer_decay}: give a number in (0, 1], or None for none.")
    frozen = _frozen_paths(parameters, freeze)
    undecayed, unscaled = (
        None if patterns is None else select(patterns, paths, where)
        for patterns, where in (
            (exclude_from_weight_decay, "exclude_from_weight_decay"),
            (exclude_from_layer_adaptation, "exclude_from_layer_adaptation"),
        )
    )
    top = max((parameter.depth for parameter in parameters), default=0)
    for parameter in parameters:  # a stacked model's last block is as deep as its stack
        if parameter.stacked:
            top = max(top, int(parameter.variable.shape[0]))
    members: dict[tuple, list[int]] = {}
    for position, parameter in enumerate(parameters):
        kernel, path = parameter.kind == "kernel", parameter.path
        decays = kernel if undecayed is None else path not in undecayed
        # A classifier that starts at zero would have its own tiny length for a rate: it could hardly leave zero.
        trust = (kernel and parameter.part != "head") if unscaled is None else path not in unscaled
        decay = decay_class(parameter) if decays else "none"
        scale = 0.0 if path in frozen else _lr_scale(parameter, layer_decay, top)
        members.setdefault((decay, trust, scale), []).append(position)
    groups = []
    for (decay, trust, scale), positions in members.items():
        group = tuple(parameters[position] for position in positions)
        name = _name(decay, scale, group)
        groups.append(Group(name, decay, trust, scale, group, tuple(positions)))
    return groups


def decay_class(parameter: Parameter) -> str:
    """Which decay value a decayed parameter takes: "head" for the classifier's kernel alone."""
    return "head" if parameter.kind == "kernel" and parameter.part == "head" else "body"


def _frozen_paths(parameters: Sequence[Parameter], freeze: Iterable[str]) -> set[str]:
    chosen: set[str] = set()
    for pattern in patterns_list(freeze, "freeze") or ():
        part = {p.path for p in parameters if p.part == pattern}
        chosen |= part or select([pattern], [p.path for p in parameters], "freeze")
    if parameters and len(chosen) == len(parameters):
        raise UserError("freeze names every parameter: leave something to train.")
    return chosen


def _lr_scale(parameter: Parameter, layer_decay: float | None, top: int) -> float | tuple[float, ...]:
    if layer_decay is None or layer_decay == 1:
        return 1.0
    if parameter.stacked:
        blocks = int(parameter.variable.shape[0])
        return tuple(float(layer_decay) ** (top - block) for block in range(1, blocks + 1))
    return float(layer_decay) ** (top - parameter.depth)


def _name(decay: str, scale: float | tuple[float, ...], group: Sequence[Parameter]) -> str:
    kinds = list(dict.fromkeys(parameter.kind for parameter in group))
    name = f"{decay} kernels" if kinds == ["kernel"] and decay != "none" else ", ".join(kinds)
    if is_frozen(scale):
        return f"{name} (frozen)"
    if scale != 1:
        depths = sorted({parameter.depth for parameter in group})
        name += " (stacked)" if isinstance(scale, tuple) else f" (depth {depths[0]})"
    return name


def table(
    groups: Sequence[Group],
    *,
    weight_decay: float | None = None,
    head_weight_decay: float | None = None,
    trust_ratio: bool = True,
) -> str:
    """Returns the groups as a text table whose totals are the model's variables and parameters.

    Args:
      groups: from `resolve`.
      weight_decay, head_weight_decay: the optimizer's values, printed in place of "body", "head".
      trust_ratio: the optimizer has trust ratios (LAMB); False prints "-" for all.
    """
    head = weight_decay if head_weight_decay is None else head_weight_decay
    values = {"none": "0", "body": weight_decay, "head": head}
    rows = [("group", "variables", "parameters", "weight decay", "trust ratio", "lr scale")]
    for group in groups:
        value = values[group.decay]
        rows.append(
            (
                group.name,
                str(len(group.parameters)),
                f"{group.size:,}",
                group.decay if value is None else f"{float(value):g}",
                ("yes" if group.trust else "no") if trust_ratio else "-",
                _scale_text(group.lr_scale),
            )
        )
    variables = sum(len(group.parameters) for group in groups)
    rows.append(("total", str(variables), f"{sum(g.size for g in groups):,}", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def _scale_text(scale: float | tuple[float, ...]) -> str:
    if isinstance(scale, tuple):
        return f"{min(scale):.4g}..{max(scale):.4g}"
    return f"{scale:.4g}"
