"""Recognises what an open file is and brings it into canonical form."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np

from vit_tpu.errors import UserError, nearest
from vit_tpu.weights import big_vision, huggingface, layout, resample, timm, vision_transformer
from vit_tpu.weights.files import Archive
from vit_tpu.weights.layout import Canonical, Format
from vit_tpu.weights.tensors import FLOATS, Tensor, made

OWN = Format(
    name="keras",
    rules=(),
    marks=(r"^blocks/(\d+/)?norm1/scale$",),
    prefixes=lambda cls, registers: (0,),
    resize="bilinear",
)
# The older layout first: what marks big_vision is in its files too.
FORMATS = (OWN, vision_transformer.FORMAT, big_vision.FORMAT, timm.FORMAT, *huggingface.FORMATS)
SOURCES = ("auto", "big_vision", "vision_transformer", "timm", "huggingface", "keras")
CONTAINERS = ("params/", "opt/target/", "target/")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file in canonical form.

    Attributes:
      format: what it is.
      why: the name and reason, for people.
      canonical: tensors by our paths; "posemb" may still hold rows of tokens in front.
      unknown: the file's names that no rule knows.
      ignored: the file's names that have no part in a forward pass.
      facts: arguments of ViT that the file states.
      filled: path -> why a tensor that the file lacks is put in without changing the function.
    """

    format: Format
    why: str
    canonical: Canonical
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]
    facts: dict[str, Any]
    filled: dict[str, str]


def read(archive: Archive, source: str = "auto", heads: int | None = None) -> Source:
    """Names everything in an open file.

    Args:
      archive: from `files.opened`.
      source: "auto" or the family.
      heads: of the model, for files whose matrices do not show it.

    Raises:
      UserError: unknown family, or a file that is not of it.
    """
    if source not in SOURCES:
        raise UserError(f'source="{source}"{nearest(source, SOURCES)} is not one of {", ".join(SOURCES)}')
    tensors, outside, container = _container(archive.tensors)
    format_, strip = _recognised(tensors, archive, source)
    names = {name.removeprefix(strip): tensor for name, tensor in tensors.items()}
    why = f"{format_.name} ({_reason(names, format_)}{f', below {container}' if container else ''})"
    ignored = [name for name in names if any(re.search(p, name) for p in format_.ignored)]
    names = {name: tensor for name, tensor in names.items() if name not in ignored}
    settings = _own_settings(archive)
    heads = settings.get("num_heads") or _heads_of(archive, format_) or heads
    if format_ is OWN:
        canonical, unknown = _own(names)
    else:
        if format_ in (big_vision.FORMAT, vision_transformer.FORMAT):
            names = big_vision.unstacked(names)
        canonical, unknown = layout.to_canonical(names, format_.rules, heads)
    for tensor in canonical.values():
        if tensor.dtype not in FLOATS:
            raise UserError(f"{archive.path}: {tensor.name} is {tensor.dtype}, not floating-point numbers")
    canonical = huggingface.narrowed(canonical) if format_ is huggingface.DINOV2 else canonical
    shown_heads = None if format_ in (OWN, big_vision.FORMAT, vision_transformer.FORMAT) else heads
    facts = layout.describe(canonical, shown_heads) | format_.facts(archive, canonical) | settings
    filled = _without_bias(canonical)
    return Source(format_, why, canonical, tuple(unknown), (*ignored, *outside), facts, filled)


def settle(
    source: Source, grid: tuple[int, int] | None, patches: int | None = None
) -> tuple[Canonical, tuple[int, int] | None]:
    """Adds the position table's rows for tokens to those tokens, so that it holds patches only.

    Args:
      source: from `read`.
      grid: of the file's patches, if the caller knows it.
      patches: a number of patches to try when no square fits.

    Returns:
      The tensors, and the grid of the position table (None if there is none).
    """
    canonical = dict(source.canonical)
    table = canonical.get("posemb")
    if table is None:
        return canonical, None
    if len(table.shape) != 3 or table.shape[0] != 1:
        raise UserError(f"{table.name} has shape {list(table.shape)}; position embeddings are [1, N, D]")
    grid = grid or _stated_grid(source.facts)
    registers = canonical["registers"].shape[1] if "registers" in canonical else 0
    candidates = source.format.prefixes("cls" in canonical, registers)
    try:
        front = resample.prefix_rows(table.shape[1], candidates, grid[0] * grid[1] if grid else None)
    except UserError:
        if grid or patches is None:
            raise
        front = resample.prefix_rows(table.shape[1], candidates, patches)
    count = table.shape[1] - front
    if front:
        _fold(canonical, table, front)
        canonical["posemb"] = table.mapped((1, count, table.shape[2]), lambda x: x[:, front:])
    side = int(round(count**0.5))
    if grid is None and side * side == count:
        grid = (side, side)
    return canonical, grid


def _fold(canonical: Canonical, table: Tensor, front: int) -> None:
    at = 0
    for name in ("cls", "registers"):
        if name in canonical and at < front:
            token, start = canonical[name], at
            stop = start + token.shape[1]
            canonical[name] = token.mapped(token.shape, _adding(table, start, stop))
            at = stop
    if at == 0:
        raise UserError(f"{table.name} has {front} rows for tokens that the file does not hold")


def _adding(table: Tensor, start: int, stop: int) -> Any:
    return lambda token: token + table.read()[:, start:stop]


def _stated_grid(facts: dict[str, Any]) -> tuple[int, int] | None:
    if "image_size" not in facts or "patch_size" not in facts:
        return None
    height, width = facts["image_size"]
    return height // facts["patch_size"], width // facts["patch_size"]


def _container(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str], str]:
    """Takes the parameters out of a training checkpoint; the rest (optimizer state, step) is nothing to load."""
    for prefix in CONTAINERS:
        inside = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        if inside:
            return inside, [name for name in tensors if not name.startswith(prefix)], prefix
    return tensors, [], ""


def _recognised(tensors: dict[str, Tensor], archive: Archive, source: str) -> tuple[Format, str]:
    wanted = [f for f in FORMATS if source == "auto" or f.name.split("/")[0] == source]
    for format_ in wanted:
        for strip in ("", *format_.strip):
            names = [name.removeprefix(strip) for name in tensors if name.startswith(strip)]
            if _mark(names, format_):
                return format_, strip
    for format_ in wanted:  # the same names further down
        for name in tensors:
            for mark in format_.marks:
                match = re.search(mark.removeprefix("^"), name)
                if match and name[: match.start()].endswith(("/", ".")):
                    below = name[: match.start()].rstrip("/.")
                    raise UserError(
                        f'{archive.path} holds {format_.name} weights below "{below}": write {archive.path}:{below}'
                    )
    what = "no known family" if source == "auto" else source
    raise UserError(
        f"{archive.path} is of {what}: its names start with {layout.shown(sorted(tensors), 4)}; "
        f"known are {', '.join(f.name for f in wanted)}"
    )


def _mark(names: list[str], format_: Format) -> str | None:
    return next((name for name in names if any(re.search(mark, name) for mark in format_.marks)), None)


def _reason(names: dict[str, Tensor], format_: Format) -> str:
    return f'it holds "{_mark(list(names), format_)}"'


def _heads_of(archive: Archive, format_: Format) -> int | None:
    return format_.facts(archive, {}).get("num_heads")


def _own_settings(archive: Archive) -> dict[str, Any]:
    """What vit_tpu wrote into the file about the model, as arguments of ViT."""
    try:
        return dict(json.loads(archive.metadata.get("vit_tpu", "{}"))["settings"])
    except (ValueError, KeyError, TypeError):
        return {}


def _own(tensors: dict[str, Tensor]) -> tuple[Canonical, list[str]]:
    canonical: Canonical = {}
    for name, tensor in tensors.items():
        match = re.match(r"blocks/(?!\d+/)(.*)", name)
        if match and tensor.shape:
            canonical |= {f"blocks/{i}/{match.group(1)}": tensor.row(i) for i in range(tensor.shape[0])}
        else:
            canonical[name] = tensor
    return canonical, []


def _without_bias(canonical: Canonical) -> dict[str, str]:
    """Fills in zeros where a file has kernels but, in no block, their biases (qkv_bias=False): the same function."""
    filled = {}
    groups = [("blocks/", name) for name in ("query", "key", "value", "out")] + [
        ("map/", n) for n in ("query", "key", "value")
    ]
    for start, name in groups:
        kernels = [p for p in canonical if p.startswith(start) and p.endswith(f"attention/{name}/kernel")]
        biases = [p.removesuffix("kernel") + "bias" for p in kernels]
        if any(bias in canonical for bias in biases):
            continue
        for kernel, bias in zip(kernels, biases):
            shape = canonical[kernel].shape[-1:] if name == "out" else canonical[kernel].shape[1:]
            canonical[bias] = made(bias, shape, _zeros(shape))
            filled[bias] = "0: the file has no such bias"
    return filled


def _zeros(shape: tuple[int, ...]) -> Any:
    return lambda: np.zeros(shape, np.float32)
