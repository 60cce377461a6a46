"""Annotations that tell XLA how arrays lie on a mesh of cores. Without a mesh every function here is the identity.

A program is written for the whole batch and the whole model; XLA's partitioner turns it into one for each core and adds
the exchange between them. Annotations change where numbers are computed, never which: a wrong one costs time only.

A spec names a mesh axis, or None, for each axis of an array: ("data", None, "model"). Three specs of a weight matter:

- used: split over the model axis alone, as the layers compute with it;
- state: split over the data axis as well, where each core updates its share;
- stored: `state` if weights are sharded too (shard="full"), else `used`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as _gradient_of_annotations  # noqa: F401  registers it
from tensorflow.python.compiler.xla.experimental import xla_sharding

from vit_tpu.mesh import AXES, Mesh

Spec = tuple[str | None, ...]
_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("vit_tpu_mesh", default=None)
_PLACE: contextvars.ContextVar[Spec | None] = contextvars.ContextVar("vit_tpu_place", default=None)


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[None]:
    """Inside, what is traced is annotated for `mesh`."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def current() -> Mesh | None:
    return _MESH.get()


@contextlib.contextmanager
def placed(spec: Spec | None) -> Iterator[None]:
    """Inside, a variable is made that lies as `spec` says; see `tpu.divided`."""
    token = _PLACE.set(spec)
    try:
        yield
    finally:
        _PLACE.reset(token)


def placement() -> Spec | None:
    return _PLACE.get()


def constrain(x: Any, spec: Sequence[str | None]) -> Any:
    """Returns `x`, which is to lie on the mesh as `spec` says; the axes beyond those named are whole.

    Args:
      x: a tensor; a variable is read.
      spec: a mesh axis or None for each of the first axes of `x`.
    """
    mesh = _MESH.get()
    if mesh is None or mesh.cores == 1:
        return x
    x = tf.convert_to_tensor(x)
    names = (*spec, *[None] * (len(x.shape) - len(spec)))
    return annotation(names, mesh).apply_to_tensor(x, use_sharding_op=True)


def annotation(spec: Spec, mesh: Mesh) -> xla_sharding.Sharding:
    """Returns XLA's own words for a spec."""
    devices = np.arange(mesh.cores).reshape(mesh.data, mesh.model)
    split = [-1 if name is None or getattr(mesh, name) == 1 else AXES.index(name) for name in spec]
    if all(axis < 0 for axis in split):
        return xla_sharding.Sharding.replicate()
    return xla_sharding.mesh_split_sharding(devices, split)


def batch(x: Any) -> Any:
    """Returns an activation whose first axis is the batch."""
    return constrain(x, ("data",))


def used_spec(shape: Sequence[int], split: int | None) -> Spec:
    """How the layers use a weight: split over the model axis along axis `split`."""
    return tuple("model" if axis == split else None for axis in range(len(shape)))


def state_spec(shape: Sequence[int], split: int | None, mesh: Mesh, stacked: bool = False) -> Spec:
    """How a weight's state lies: as it is used, and its largest axis that divides over the data axis.

    Args:
      shape: of the weight.
      split: its axis of heads or hidden units, or None.
      mesh: where.
      stacked: whether axis 0 counts blocks; then it stays whole, since blocks are taken from it one by one.
    """
    spec = list(used_spec(shape, split))
    first = 1 if stacked else 0
    able = [axis for axis in range(first, len(shape)) if axis != split and shape[axis] % mesh.data == 0]
    if mesh.shard != "none" and able and math.prod(shape[first:]) >= mesh.smallest:
        spec[max(able, key=lambda axis: shape[axis])] = "data"
    return tuple(spec)


def stored_spec(shape: Sequence[int], split: int | None, mesh: Mesh, stacked: bool = False) -> Spec:
    """How a weight lies between two steps."""
    return state_spec(shape, split, mesh, stacked) if mesh.shard == "full" else used_spec(shape, split)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one weight lies on a mesh between two steps, where it is used, and where its state lies."""

    stored: Spec
    used: Spec
    state: Spec


def layouts(parameters: Iterable[Any], mesh: Mesh) -> dict[str, Layout]:
    """Returns the layout of every parameter by path (see `optim.decay.Parameter`)."""
    found = {}
    for p in parameters:
        shape, how = p.variable.shape.as_list(), (p.split, mesh, p.stacked)
        found[p.path] = Layout(stored_spec(shape, *how), used_spec(shape, p.split), state_spec(shape, *how))
    return found


def stored_place(shape: Sequence[int], split: int | None, stacked: bool) -> Spec | None:
    """How a weight that is being made will lie; None without a mesh."""
    mesh = _MESH.get()
    return None if mesh is None else stored_spec(shape, split, mesh, stacked)


def as_state(x: Any, layout: Layout | None, axes: Sequence[int] | None = None) -> Any:
    """Returns an array of a weight's shape (or of some of its `axes`) as the weight's state lies."""
    if layout is None:
        return x
    return constrain(x, layout.state if axes is None else [layout.state[axis] for axis in axes])


def as_stored(x: Any, layout: Layout | None) -> Any:
    """Returns a weight's value as it lies between two steps."""
    return x if layout is None else constrain(x, layout.stored)


def read(variable: Any, split: int | None, stacked: bool = False) -> Any:
    """Returns the value of a weight, as it is stored. Every reading of a weight passes through here, so that the
    compiler sees one layout of the variable."""
    mesh = _MESH.get()
    if mesh is None:
        return variable
    shape = variable.shape.as_list()
    state = state_spec(shape, split, mesh, stacked)
    stored = stored_spec(shape, split, mesh, stacked)

    @tf.custom_gradient
    def run(weight):
        return constrain(weight, stored), lambda dy: constrain(dy, state)

    return run(tf.convert_to_tensor(variable))


def gather(weight: Any, split: int | None, dtype: tf.DType) -> Any:
    """Returns a weight in `dtype` as the layers use it; its gradient lies where the state lies."""
    mesh = _MESH.get()
    if mesh is None:
        return weight
    shape = weight.shape.as_list()
    stored, used, state = stored_spec(shape, split, mesh), used_spec(shape, split), state_spec(shape, split, mesh)

    @tf.custom_gradient
    def run(weight):
        # Cast where it lies: half the bytes are sent.
        cast = constrain(tf.cast(weight, dtype), stored)
        return constrain(cast, used), lambda dy: tf.cast(constrain(dy, state), weight.dtype)

    return run(tf.convert_to_tensor(weight))


def piece(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of one core's part of an array."""
    return tuple(-(-size // (getattr(mesh, name) if name else 1)) for size, name in zip(shape, spec))


def table(groups: Iterable[Any], optimizer: Any, averaged: bool, mesh: Mesh) -> str:
    """Returns how the weights and their state lie: a line for each group and kind of layout, with the bytes on a core.

    Args:
      groups: of `optim.decay.resolve`.
      optimizer: one of `optim`, built.
      averaged: whether there is a moving average.
      mesh: where.
    """
    rows = [("group", "tensors", "weights", "state", "weights a core", "state a core")]
    sums = [0, 0]
    for group in groups:
        found: dict[tuple[str, str], list[int]] = {}
        for p in group.parameters:
            shape = p.variable.shape.as_list()
            layout = layouts([p], mesh)[p.path]
            words = (_words(layout.stored, mesh, p.stacked), _words(layout.state, mesh, p.stacked))
            row = found.setdefault(words, [0, 0, 0])
            row[0] += 1
            row[1] += 4 * math.prod(piece(shape, layout.stored, mesh))
            row[2] += 4 * math.prod(piece(shape, layout.state, mesh)) * int(averaged and not group.frozen)
            for slot, of in optimizer.slots.items():
                if p.path in of:
                    held = piece(of[p.path].shape, optimizer.place(slot, optimizer.rule(p.variable)), mesh)
                    row[2] += of[p.path].dtype.size * math.prod(held)
        for (stored, state), (count, weights, kept) in sorted(found.items(), key=lambda item: -item[1][1]):
            rows.append((group.name, str(count), stored, state, _mib(weights), _mib(kept)))
            sums = [sums[0] + weights, sums[1] + kept]
    rows.append(("together", "", "", "", _mib(sums[0]), _mib(sums[1])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = ("<", ">", "<", "<", ">", ">")
    return "\n".join("  " + "  ".join(f"{w:{a}{n}}" for w, a, n in zip(row, aligned, widths)).rstrip() for row in rows)


def _words(spec: Spec, mesh: Mesh, stacked: bool) -> str:
    """("data", None, "model") as "[data, -, model]"; "whole" if nothing is split, as over an axis of one core."""
    split = [name if name and getattr(mesh, name) > 1 else None for name in spec]
    if not any(split):
        return "whole"
    names = ["depth" if stacked and axis == 0 else name or "-" for axis, name in enumerate(split)]
    return f"[{', '.join(names)}]"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
