"""Decides, before anything changes, which tensor of a file goes where in a model, and what does not."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.errors import UserError, nearest
from vit_tpu.weights import layout, resample
from vit_tpu.weights.layout import Canonical
from vit_tpu.weights.source import Source, settle
from vit_tpu.weights.tensors import Tensor, made

# What a file may state beside its tensors, and how a mismatch is put right.
_STATED = ("num_heads", "gelu", "epsilon", "norm_position")
_SHAPES = ("width", "depth", "mlp_dim", "num_heads", "channels")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for one canonical tensor: a variable, or one block's slice of a stacked one."""

    variable: Any
    index: int | None
    shape: tuple[int, ...]

    def assign(self, value: np.ndarray) -> None:
        if self.index is None:
            self.variable.assign(value)
            return
        # In place: variable[i].assign would first copy the whole stack, since its slice shares the buffer.
        for copy in getattr(self.variable, "values", (self.variable,)):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=copy.handle,
                begin=[self.index],
                end=[self.index + 1],
                strides=[1],
                value=tf.constant(value),
                shrink_axis_mask=1,
            )

    def read(self) -> np.ndarray:
        if self.index is None:
            return self.variable.numpy()
        return getattr(self.variable, "values", (self.variable,))[0][self.index].numpy()


@dataclasses.dataclass
class Plan:
    """What will be assigned, and what the report says about it."""

    values: list[tuple[str, Slot, Tensor]] = dataclasses.field(default_factory=list)
    loaded: list[str] = dataclasses.field(default_factory=list)
    resized: dict[str, str] = dataclasses.field(default_factory=dict)
    new: dict[str, str] = dataclasses.field(default_factory=dict)
    unused: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def slots_of(model: Any) -> dict[str, Slot]:
    """Returns the model's places by canonical path: stacked variables give one for each block."""
    slots: dict[str, Slot] = {}
    for parameter in model.parameters():
        variable, shape = parameter.variable, tuple(parameter.variable.shape)
        if not parameter.stacked:
            slots[parameter.path] = Slot(variable, None, shape)
            continue
        rest = parameter.path.removeprefix("blocks/")
        slots |= {f"blocks/{i}/{rest}": Slot(variable, i, shape[1:]) for i in range(shape[0])}
    return slots


def settings_of(model: Any) -> dict[str, Any]:
    """Returns the arguments that build the model's like, sizes spelt out."""
    settings = dict(model.settings)
    shape = dataclasses.asdict(model.variant)
    return {
        **settings,
        **shape,
        "image_size": list(model.image_size),
        "norm_position": settings.get("norm_position", "before"),
    }


def allowed(names: Iterable[str], allow: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in allow)


def plan(
    model: Any,
    source: Source,
    path: str,
    allow: Sequence[str] = (),
    resize: str = "auto",
    source_grid: tuple[int, int] | None = None,
) -> Plan:
    """Matches a file with a model.

    Raises:
      UserError: anything is left over on either side, or has another shape, unless `allow` names it.
    """
    settings, slots = settings_of(model), slots_of(model)
    out = Plan()
    canonical, grid = settle(source, source_grid, model.num_patches)
    _adapt_tokens(canonical, slots, out)
    _drop_neutral(canonical, slots, model, out)
    kernel = source.format.resize if resize == "auto" else resize
    resample.check_kernel(kernel)
    _resize(canonical, model, grid, kernel, slots, out)
    wrong = _contradictions(source, settings, allow)
    wrong += _match(canonical, slots, source, settings, allow, out)
    if not any(name in canonical for name in out.loaded):
        raise UserError(
            f"{path} ({source.format.name}) has nothing in common with the model: {_sides(canonical, slots)}"
        )
    if wrong:
        raise UserError(f"{path} ({source.format.name}) does not fit the model: {'; '.join(wrong)}")
    return out


def _contradictions(source: Source, settings: dict[str, Any], allow: Sequence[str]) -> list[str]:
    wrong = []
    for name in _STATED:
        if name in source.facts and source.facts[name] != settings[name] and not allowed([name], allow):
            stated = source.facts[name]
            wrong.append(
                f"the file has {name}={stated!r}, the model {settings[name]!r}: build it with {name}={stated!r}, "
                f'or allow=["{name}"]'
            )
    pools = (source.facts.get("pool"), settings["pool"])
    if (
        set(pools) == {"tok", "gap"}
        and source.facts["pool"] == "gap"
        and "cls" in source.canonical
        and not allowed(["pool"], allow)
    ):
        wrong.append("the file pools by the mean and has a class token that no pooling reads: build the model with "
                     f'pool="gap", registers={source.facts.get("registers")}, or allow=["pool"]')  # fmt: skip
    sizes = [
        f"{n} {source.facts[n]}, not {settings[n]}"
        for n in _SHAPES
        if n in source.facts and source.facts[n] != settings[n]
    ]
    if sizes and not wrong:
        wrong.append("the file has " + ", ".join(sizes))
    return wrong


def _match(
    canonical: Canonical,
    slots: dict[str, Slot],
    source: Source,
    settings: dict[str, Any],
    allow: Sequence[str],
    out: Plan,
) -> list[str]:
    """Fills `out` and returns what is wrong."""
    missing, shapes = [], []
    for path, slot in slots.items():
        tensor = canonical.get(path)
        if tensor is not None and tensor.shape == slot.shape:
            out.values.append((path, slot, tensor))
            if path in source.filled:
                out.new[path] = source.filled[path]
            else:
                out.loaded.append(path)
        elif allowed([path] + ([tensor.name] if tensor else []), allow):
            _start(path, slot, settings, out)
            if tensor is not None:
                out.unused.append(tensor.name)
        elif tensor is None:
            missing.append(path)
        else:
            shapes.append(f"{path} {list(tensor.shape)} for {list(slot.shape)}")
    unknown = [name for name in source.unknown if not allowed([name], allow)]
    left = [(path, t) for path, t in canonical.items() if path not in slots and path not in source.filled]
    unmatched = [(path, t) for path, t in left if not allowed([path, t.name], allow)]
    out.unused += [t.name for _, t in left] + list(source.unknown)
    unused = [t.name for _, t in unmatched] + unknown
    wrong = []
    if missing:
        wrong.append(f"missing in the file: {_with_nearest(missing, unused)}")
    if unused:
        wrong.append(f"not in the model: {_with_nearest(unused, missing)}")
    if shapes:
        wrong.append(f"other shapes: {layout.shown(shapes)}")
    if wrong:
        paths = missing + [path for path, _ in unmatched] + [shape.split()[0] for shape in shapes] + unknown
        wrong.append(f"to go on without them: allow={layout.allow_patterns(paths)}")
    return wrong


def _start(path: str, slot: Slot, settings: dict[str, Any], out: Plan) -> None:
    """A place the file does not fill: a fresh head, neutral layer scale, anything else as the model has it."""
    if path.startswith("head/"):
        start = 0.0 if path.endswith("kernel") else float(settings["head_bias_init"])
        why = f"{start:g}: a fresh head" if start else "0: a fresh head"
    elif path.endswith(("/scale1", "/scale2")):
        start, why = 1.0, "1: the file has no layer scale"
    else:
        out.new[path] = "the model's own start"
        return
    out.new[path] = why
    out.values.append((path, slot, made(path, slot.shape, lambda: np.full(slot.shape, start, np.float32))))


def _adapt_tokens(canonical: Canonical, slots: dict[str, Slot], out: Plan) -> None:
    """A class token is a register where no pooling reads it."""
    if "cls" not in canonical or "cls" in slots or "registers" not in slots:
        return
    parts = [canonical["cls"]] + ([canonical["registers"]] if "registers" in canonical else [])
    count = sum(part.shape[1] for part in parts)
    if count != slots["registers"].shape[1]:
        return
    shape = (1, count, parts[0].shape[2])
    canonical["registers"] = made(parts[0].name, shape, lambda: np.concatenate([p.read() for p in parts], 1))
    del canonical["cls"]
    out.notes.append("the class token, which this pooling does not read, became the first register")


def _drop_neutral(canonical: Canonical, slots: dict[str, Slot], model: Any, out: Plan) -> None:
    """Leaves out what the model has in fixed form: layer scales of 1, the sincos2d table."""
    scales = [p for p in canonical if p.endswith(("/scale1", "/scale2")) and p not in slots]
    ones = [path for path in scales if np.all(canonical[path].read() == 1.0)]
    for path in ones:
        del canonical[path]
    if ones:
        out.notes.append(f"{len(ones)} layer scales of 1, which change nothing, were left out")
    fixed, table = model.positions.fixed, canonical.get("posemb")
    if fixed is not None and table is not None and table.shape == fixed.shape:
        difference = np.abs(table.read() - fixed).max()
        if difference < 1e-5:
            del canonical["posemb"]
            out.notes.append("the file's position table is the fixed sincos2d one")


def _resize(
    canonical: Canonical, model: Any, grid: tuple[int, int] | None, kernel: str, slots: dict[str, Slot], out: Plan
) -> None:
    table, embedding, new = canonical.get("posemb"), canonical.get("embedding/kernel"), model.positions.grid
    if table is not None and "posemb" in slots and grid != new:
        count = table.shape[1]
        if grid is None and count != new[0] * new[1]:
            raise UserError(f"{table.name} holds {count} positions, no square: give source_grid=(rows, columns)")
        if grid is not None:
            old = grid
            canonical["posemb"] = table.mapped(
                (1, new[0] * new[1], table.shape[2]), lambda x: resample.posemb(x, old, new, kernel)
            )
            out.resized["posemb"] = f"{old[0]}x{old[1]} to {new[0]}x{new[1]}, {kernel}"
    size = model.variant.patch_size
    if embedding is not None and len(embedding.shape) == 4 and embedding.shape[:2] != (size, size):
        shape = (size, size, *embedding.shape[2:])
        canonical["embedding/kernel"] = embedding.mapped(shape, lambda x: resample.patch_kernel(x, size))
        out.resized["embedding/kernel"] = f"patch {embedding.shape[0]} to {size}, pseudo-inverse"


def _with_nearest(names: list[str], candidates: list[str]) -> str:
    return layout.shown([name + nearest(name, candidates) if candidates else name for name in names])


def _sides(canonical: Canonical, slots: dict[str, Slot]) -> str:
    return f"the file has {layout.shown(canonical, 4)}; the model has {layout.shown(slots, 4)}"


def apply(plan_: Plan) -> None:
    """Assigns tensor by tensor; at most one is in memory beside the model."""
    for _, slot, tensor in plan_.values:
        slot.assign(tensor.read())
