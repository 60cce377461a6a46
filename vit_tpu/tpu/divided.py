"""Variables of which every core of a mesh holds its part alone.

TPUStrategy's own variables lie whole on each core, so that annotations would divide the work and save nothing of the
weights and moments. TensorFlow's compiler does know divided variables (the operation TPUPartitionedInputV2 makes one of
the parts); what was missing is the Python class, which is this.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, tpu_replicated_variable, tpu_util
from tensorflow.python.ops import gen_tpu_partition_ops, resource_variable_ops
from tensorflow.python.trackable import base as trackable

from vit_tpu.layers import sharding
from vit_tpu.mesh import Mesh


class DividedVariable(tpu_replicated_variable.TPUReplicatedVariable):
    """One variable in parts, one on each core of a mesh.

    In a TPU's step it is one array with an annotation; outside of it reading brings the parts together and assigning
    divides the value.

    Args:
      parts: the variable of each core, in the mesh's order; cores that differ in no axis of `spec` hold the same part.
      spec: which axis is divided over which axis of the mesh; every size divides.
      mesh: of the cores.
      name: of the whole.
    """

    def __init__(self, parts: Sequence[tf.Variable], spec: sharding.Spec, mesh: Mesh, name: str):
        super().__init__(list(parts), name)
        self._spec, self._mesh = spec, mesh
        sizes = [size * count for size, count in zip(parts[0].shape, self._counts())]
        self._whole = tf.TensorShape(sizes)

    def _counts(self) -> list[int]:
        """How many parts each axis has."""
        return [1 if name is None else getattr(self._mesh, name) for name in self._spec]

    @property
    def shape(self) -> tf.TensorShape:
        return self._whole

    @property
    def handle(self) -> Any:
        if tpu_util.enclosing_tpu_context() is None:
            raise NotImplementedError(f"{self.name} lies in parts: it has one handle in a TPU's step alone")
        counts = self._counts()
        copies = self._mesh.cores // math.prod(counts)
        with tpu_util.outside_or_skip_tpu_context():
            tensor = gen_tpu_partition_ops.tpu_partitioned_input_v2(
                [part.handle for part in self._vars], is_packed=False,
                partition_dims=counts + ([copies] if copies > 1 else []),
            )  # fmt: skip
        return sharding.annotation(self._spec, self._mesh).apply_to_tensor(tensor)

    def read_value(self) -> tf.Tensor:
        """Returns the whole value."""
        return self._joined([], [])

    def _joined(self, at: list[int], names: list[str | None]) -> tf.Tensor:
        axis = len(at)
        if axis == len(self._spec):
            places = dict(zip(names, at))
            core = (places.get("data") or 0) * self._mesh.model + (places.get("model") or 0)
            return self._vars[core].read_value()
        name = self._spec[axis]
        found = [self._joined([*at, i], [*names, name]) for i in range(self._counts()[axis])]
        return found[0] if len(found) == 1 else tf.concat(found, axis)

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        done = []
        for core, part in enumerate(self._vars):
            with tf.device(part.device):
                done.append(update_fn(part, part_of(value, core, self._spec, self._mesh), **kwargs))
        return tf.group(*done)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {trackable.VARIABLE_VALUE_KEY: self.read_value()}

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        raise NotImplementedError(f"{self.name} lies in parts: save its value (read_value) instead")


def part_of(value: tf.Tensor, core: int, spec: sharding.Spec, mesh: Mesh) -> tf.Tensor:
    """Returns the part of a whole value that a core holds."""
    place = dict(zip(("data", "model"), divmod(core, mesh.model)))
    for axis, name in enumerate(spec):
        if name is not None and getattr(mesh, name) > 1:
            size = value.shape[axis] // getattr(mesh, name)
            value = tf.gather(value, range(place[name] * size, (place[name] + 1) * size), axis=axis)
    return value


def create(strategy: Any, mesh: Mesh, spec: sharding.Spec, next_creator: Any, **kwargs: Any) -> Any:
    """TPUStrategy's `custom_tpu_variable_creator`: one divided variable for each copy of the mesh."""
    kwargs.pop("colocate_with", None)

    def parts_of(cores: Sequence[str], initial: tf.Tensor, name: str, **settings: Any) -> list[tf.Variable]:
        found = []
        for core, device in enumerate(cores):
            with tf.device(device):
                piece = part_of(initial, core, spec, mesh)
                found.append(resource_variable_ops.ResourceVariable(piece, name=f"{name}/part_{core}", **settings))
        return found

    def mirrored(**kwargs: Any) -> list[DividedVariable]:
        initial, name = kwargs["initial_value"], kwargs.get("name") or "variable"
        with tf.init_scope(), tf.device("CPU:0"):  # the whole value never lies on a core
            initial = tf.convert_to_tensor(initial() if callable(initial) else initial, kwargs.get("dtype"))
        names = ("trainable", "constraint", "synchronization", "aggregation")
        settings = {key: kwargs[key] for key in names if key in kwargs}
        return [
            DividedVariable(parts_of(list(cores), initial, name, **settings), spec, mesh, f"{name}/r:{replica}")
            for replica, cores in enumerate(strategy.extended._tpu_devices)
        ]

    return distribute_utils.create_mirrored_variable(
        strategy, mirrored, distribute_utils.TPU_VARIABLE_CLASS_MAPPING,
        distribute_utils.TPU_VARIABLE_POLICY_MAPPING, **kwargs,
    )  # fmt: skip


@contextlib.contextmanager
def variables(strategy: Any, mesh: Mesh) -> Iterator[None]:
    """Inside a TPUStrategy's scope: variables made under `sharding.placed(spec)` are divided as `spec` says."""

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        spec = sharding.placement()
        if spec is None or not any(name and getattr(mesh, name) > 1 for name in spec):
            return next_creator(**kwargs)
        made = functools.partial(create, strategy, mesh, spec)
        return next_creator(custom_tpu_variable_creator=made, **kwargs)

    with tf.variable_creator_scope(creator):
        yield
