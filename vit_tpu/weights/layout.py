"""The canonical form of a ViT's weights, and rules that name and shape them as a file does.

Canonical: the paths of `ViT.parameters()` with one entry per block ("blocks/0/norm1/scale", also for scan models),
float32, position embeddings of patches only. A format is a table of rules between these paths and its
own names, read both ways.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vit_tpu.errors import UserError
from vit_tpu.weights.files import Archive
from vit_tpu.weights.tensors import Tensor, joined

Canonical = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of a file and what it is here.

    Attributes:
      file: its name, "{i}" standing for the block.
      ours: the canonical path; several when the file fuses them along axis 0.
      kind: how the two arrays are related, one of `KINDS`.
    """

    file: str
    ours: tuple[str, ...]
    kind: str = "same"


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a file's array becomes ours and back, given the number of heads."""

    shape: Callable[[Shape, int], Shape]
    array: Callable[[np.ndarray, Shape], np.ndarray]
    file_shape: Callable[[Shape], Shape]
    file_array: Callable[[np.ndarray, Shape], np.ndarray]


def _transposed(x: np.ndarray, shape: Shape) -> np.ndarray:
    return x.T.reshape(shape)


def _reshaped(x: np.ndarray, shape: Shape) -> np.ndarray:
    return x.reshape(shape)


KINDS: dict[str, Kind] = {
    "same": Kind(lambda s, h: s, _reshaped, lambda s: s, _reshaped),
    "row": Kind(lambda s, h: (1, *s), _reshaped, lambda s: s[1:], _reshaped),
    "conv": Kind(  # OIHW <-> HWIO
        lambda s, h: (s[2], s[3], s[1], s[0]), lambda x, s: x.transpose(2, 3, 1, 0),
        lambda s: (s[3], s[2], s[0], s[1]), lambda x, s: x.transpose(3, 2, 0, 1),
    ),
    "linear": Kind(lambda s, h: (s[1], s[0]), _transposed, lambda s: (s[1], s[0]), _transposed),
    "heads": Kind(  # [H h, D] <-> [D, H, h]
        lambda s, h: (s[1], h, s[0] // h), _transposed,
        lambda s: (s[1] * s[2], s[0]), lambda x, s: x.reshape(x.shape[0], -1).T,
    ),
    "heads_bias": Kind(lambda s, h: (h, s[0] // h), _reshaped, lambda s: (s[0] * s[1],), _reshaped),
    "heads_out": Kind(  # [D, H h] <-> [H, h, D]
        lambda s, h: (h, s[1] // h, s[0]), _transposed,
        lambda s: (s[2], s[0] * s[1]), lambda x, s: x.reshape(-1, x.shape[-1]).T,
    ),
}  # fmt: skip
_RANKS = {"conv": 4, "linear": 2, "row": 2, "heads": 2, "heads_bias": 1, "heads_out": 2}


@dataclasses.dataclass(frozen=True)
class Format:
    """A family of weight files.

    Attributes:
      name: what `source=` and `format=` say, or a finer name of which that is the start.
      rules: its names.
      marks: regular expressions; a file is of this family if one of them finds a name.
      prefixes: (class token?, registers) -> how many rows of its position table may belong to tokens.
      resize: the kernel it resizes position embeddings with.
      ignored: regular expressions of tensors that have no part in a forward pass.
      facts: what else an open file says, as arguments of ViT.
      strip: prefixes of names that make no difference.
    """

    name: str
    rules: tuple[Rule, ...]
    marks: tuple[str, ...]
    prefixes: Callable[[bool, int], tuple[int, ...]]
    resize: str
    facts: Callable[[Archive, Canonical], dict[str, Any]] = lambda archive, canonical: {}
    ignored: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()


def pairs(file: str, ours: str, names: Mapping[str, str], kind: str = "same") -> list[Rule]:
    """Returns a rule for every (file name, our name) below two prefixes."""
    return [Rule(file + theirs, (ours + mine,), kind) for theirs, mine in names.items()]


def norm_rules(file: str, ours: str) -> list[Rule]:
    """PyTorch's LayerNorm."""
    return pairs(file, ours, {".weight": "/scale", ".bias": "/bias"})


def linear_rules(file: str, ours: str, kind: str = "linear") -> list[Rule]:
    """PyTorch's Linear; kind "heads" for a projection to heads, "heads_out" for the one back."""
    bias = "heads_bias" if kind == "heads" else "same"
    return [Rule(f"{file}.weight", (f"{ours}/kernel",), kind), Rule(f"{file}.bias", (f"{ours}/bias",), bias)]


def fused_rules(file: str, ours: str, names: tuple[str, ...], joint: str = ".") -> list[Rule]:
    """Projections to heads, stacked along axis 0 of one matrix and one bias."""
    kernels = tuple(f"{ours}/{name}/kernel" for name in names)
    biases = tuple(f"{ours}/{name}/bias" for name in names)
    return [Rule(f"{file}{joint}weight", kernels, "heads"), Rule(f"{file}{joint}bias", biases, "heads_bias")]


def to_canonical(
    tensors: Mapping[str, Tensor], rules: Iterable[Rule], heads: int | None
) -> tuple[Canonical, list[str]]:
    """Names and shapes a file's tensors as ours.

    Args:
      tensors: by the file's names.
      rules: of the format.
      heads: number of heads, for formats whose matrices do not show it.

    Returns:
      The canonical tensors, and the names that no rule knows.

    Raises:
      UserError: a tensor of the wrong rank, two tensors for one place, or heads that do not divide.
    """
    exact = {rule.file: rule for rule in rules if "{i}" not in rule.file}
    patterns = [(_pattern(rule.file), rule) for rule in rules if "{i}" in rule.file]
    found: Canonical = {}
    unknown = []
    for name, tensor in tensors.items():
        index, rule = None, exact.get(name)
        if rule is None:
            matches = ((pattern.fullmatch(name), rule) for pattern, rule in patterns)
            match, rule = next(((m, r) for m, r in matches if m), (None, None))
            index = match.group(1) if match else None
        if rule is None:
            unknown.append(name)
            continue
        for path, part in zip(rule.ours, _parts(tensor, len(rule.ours))):
            path = path if index is None else path.replace("{i}", str(int(index)))
            if path in found:
                raise UserError(
                    f"the file holds both {found[path].name} and {tensor.name}, which are one tensor ({path}) here"
                )
            found[path] = _converted(part, rule.kind, heads)
    return found, unknown


def to_file(canonical: Canonical, rules: Iterable[Rule], format_: str) -> dict[str, Tensor]:
    """Names and shapes canonical tensors as a file's.

    Raises:
      UserError: the format has no place for some of them.
    """
    depth = depth_of(canonical)
    used: set[str] = set()
    out: dict[str, Tensor] = {}
    for rule in rules:
        for index in range(depth) if "{i}" in rule.file else [None]:
            names = [path if index is None else path.replace("{i}", str(index)) for path in rule.ours]
            if any(name in used or name not in canonical for name in names):
                continue
            used.update(names)
            file = rule.file if index is None else rule.file.replace("{i}", str(index))
            parts = [_unconverted(canonical[name], rule.kind, file) for name in names]
            out[file] = parts[0] if len(parts) == 1 else joined(file, parts)
    left = [path for path in canonical if path not in used]
    if left:
        raise UserError(
            f"format {format_} has no place for {shown(left)}: choose another format, or leave them out with "
            f"allow={allow_patterns(left)}"
        )
    return out


def depth_of(canonical: Iterable[str]) -> int:
    indices = [int(path.split("/")[1]) for path in canonical if re.match(r"blocks/\d+/", path)]
    return max(indices) + 1 if indices else 0


def shown(names: Iterable[str], most: int = 6) -> str:
    """Returns a list that stays readable."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def allow_patterns(paths: Iterable[str]) -> list[str]:
    """Returns the shortest globs that name these paths: "head/*" for "head/kernel" and "head/bias"."""
    tops = [path.split("/")[0] + ("/*" if "/" in path else "") for path in paths]
    return list(dict.fromkeys(tops))


def describe(canonical: Canonical, heads: int | None = None) -> dict[str, Any]:
    """Returns what the tensors themselves say about the model, as arguments of ViT."""

    def axis(path: str, index: int, rank: int) -> int | None:
        """One size of a tensor; None if it is missing or of another rank, which is for the matching to report."""
        shape = canonical[path].shape if path in canonical else ()
        return shape[index] if len(shape) == rank else None

    sizes = {
        "patch_size": axis("embedding/kernel", 0, 4),
        "channels": axis("embedding/kernel", 2, 4),
        "width": axis("embedding/kernel", 3, 4),
        "mlp_dim": axis("blocks/0/mlp/dense1/kernel", 1, 2),
        "num_heads": None if heads is not None else axis("blocks/0/attention/query/kernel", 1, 3),
    }
    facts: dict[str, Any] = {"depth": depth_of(canonical)}
    facts |= {name: size for name, size in sizes.items() if size is not None}
    facts["pool"] = "map" if "map/probe" in canonical else "tok" if "cls" in canonical else "gap"
    facts["posemb"] = "learn" if "posemb" in canonical else "sincos2d"
    facts["registers"] = axis("registers", 1, 3) or 0
    facts["layer_scale"] = 1.0 if "blocks/0/scale1" in canonical else None
    facts["representation_size"] = axis("pre_logits/kernel", 1, 2)
    facts["num_classes"] = axis("head/kernel", 1, 2) or 0
    return facts


def _pattern(template: str) -> re.Pattern[str]:
    head, tail = template.split("{i}")
    return re.compile(re.escape(head) + r"(\d+)" + re.escape(tail))


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    if count == 1:
        return [tensor]
    if not tensor.shape or tensor.shape[0] % count:
        raise UserError(f"{tensor.name} of shape {list(tensor.shape)} does not split into {count} equal parts")
    size = tensor.shape[0] // count
    return [tensor.part(k * size, (k + 1) * size) for k in range(count)]


def _converted(tensor: Tensor, kind: str, heads: int | None) -> Tensor:
    if kind == "same":
        return tensor
    if len(tensor.shape) != _RANKS[kind]:
        raise UserError(f"{tensor.name} has shape {list(tensor.shape)}; {_RANKS[kind]} axes are expected")
    if kind.startswith("heads"):
        size = tensor.shape[1] if kind == "heads_out" else tensor.shape[0]
        if heads is None:
            raise UserError(f"the file does not say into how many heads {tensor.name} splits: give num_heads")
        if heads < 1 or size % heads:
            raise UserError(f"{tensor.name} of {size} channels does not divide into num_heads={heads}")
    shape = KINDS[kind].shape(tensor.shape, heads or 1)
    return tensor.mapped(shape, lambda x: KINDS[kind].array(x, shape))


def _unconverted(tensor: Tensor, kind: str, name: str) -> Tensor:
    shape = KINDS[kind].file_shape(tensor.shape)
    converted = tensor.mapped(shape, lambda x: KINDS[kind].file_array(x, shape))
    return dataclasses.replace(converted, name=name)
