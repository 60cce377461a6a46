"""A mesh on the cores of a TPU: which cores one model copy takes, and the strategy that compiles for them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vit_tpu.errors import UserError
from vit_tpu.mesh import Mesh


def check_strategy(mesh: Mesh | None, tpu: bool, name: str) -> None:
    """Raises UserError where something is to be divided and there is no TPU; says what is possible without one."""
    if mesh is None or tpu:
        return
    raise UserError(
        f"mesh {mesh}, shard={mesh.shard}: strategy={name} cannot divide a model, since TensorFlow's other strategies "
        "keep a whole copy on every device. Train with strategy=tpu; without a TPU, python -m vit_tpu.plan says what "
        "each core would hold, and strategy=mirrored divides the batch alone (leave mesh and shard out)"
    )


def computation_shape(slice_shape: Sequence[int], cores: int) -> list[int]:
    """Returns the block [x, y, z, core] of a slice that one model copy takes: cores of a chip first, then neighbours.

    The model axis is the innermost of a mesh, so its parts, which exchange most, share a chip.

    Args:
      slice_shape: of the TPU, [x, y, z, cores of a chip].
      cores: of the mesh.

    Raises:
      UserError: no block has that many cores; names the nearest that do.
    """

    def block(cores: int) -> list[int] | None:
        shape, left = [1, 1, 1, 1], cores
        for axis in (3, 0, 1, 2):
            shape[axis] = math.gcd(left, slice_shape[axis])
            left //= shape[axis]
        return shape if left == 1 else None

    found, total = block(cores), math.prod(slice_shape)
    if found is None:
        fits = sorted((n for n in range(1, total + 1) if block(n)), key=lambda n: abs(n - cores))[:3]
        raise UserError(
            f"a mesh of {cores} cores does not fit this TPU of {total} cores ({'x'.join(map(str, slice_shape))}): "
            f"use {', '.join(map(str, sorted(fits)))} cores, the product of data and model"
        )
    return found


def assignment(topology: Any, mesh: Mesh) -> Any:
    """Returns the `tf.tpu.experimental.DeviceAssignment` of as many copies of the mesh as a TPU has room for."""
    import tensorflow as tf

    slice_shape = [int(size) for size in topology.mesh_shape]
    block = computation_shape(slice_shape, mesh.cores)
    copies = math.prod(slice_shape) // mesh.cores
    return tf.tpu.experimental.DeviceAssignment.build(topology, computation_shape=block, num_replicas=copies)


def strategy(resolver: Any, topology: Any, mesh: Mesh | None) -> Any:
    """Returns the TPUStrategy of a run: a replica on each core, or, on a mesh, one on each `mesh.cores` cores."""
    import tensorflow as tf

    if mesh is None or not mesh.partitioned:
        return tf.distribute.TPUStrategy(resolver)
    return tf.distribute.TPUStrategy(
        resolver, experimental_device_assignment=assignment(topology, mesh), experimental_spmd_xla_partitioning=True
    )


def line(strategy: Any, mesh: Mesh | None) -> str:
    """How the start-up line says it; "" without a mesh."""
    if mesh is None:
        return ""
    copies = strategy.num_replicas_in_sync
    whole = f", {copies} copies of the mesh" if mesh.partitioned and copies > 1 else ""
    return f"; mesh {mesh}, shard {mesh.shard}{whole}"


def check_replicas(strategy: Any, mesh: Mesh | None) -> None:
    """Raises UserError if a mesh of copies alone names another number of cores than the TPU has."""
    if mesh is not None and not mesh.partitioned and mesh.data != strategy.num_replicas_in_sync:
        raise UserError(
            f"mesh {mesh}: this TPU has {strategy.num_replicas_in_sync} cores: use "
            f"mesh=data={strategy.num_replicas_in_sync}, or leave it out"
        )
