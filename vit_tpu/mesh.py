"""How the cores of one model copy are laid out: a data axis, a model axis, and what is sharded over them.

Text and numbers only, no TensorFlow: what a config says is checked before anything loads. The annotations that follow
from a mesh are in `layers.sharding`.
"""

from __future__ import annotations

import dataclasses
import math

from vit_tpu.errors import UserError, nearest

AXES = ("data", "model")
SHARDS = ("none", "state", "full")
SMALLEST = 2**14


@dataclasses.dataclass(frozen=True)
class Mesh:
    """`data` x `model` cores that train one model together.

    Attributes:
      data: parts of a batch.
      model: parts of the attention heads and of the MLPs' hidden units.
      shard: what else is divided over the data axis: "none"; "state", the optimizer's state, the average and the
        gradients; "full", the weights too.
      smallest: weights with fewer elements are not divided over the data axis: exchanging them costs more than they.
    """

    data: int = 1
    model: int = 1
    shard: str = "none"
    smallest: int = dataclasses.field(default_factory=lambda: SMALLEST)

    @property
    def cores(self) -> int:
        return self.data * self.model

    @property
    def partitioned(self) -> bool:
        """Whether the program is divided; otherwise every core runs a copy and the copies add their gradients."""
        return self.model > 1 or (self.shard != "none" and self.data > 1)

    def __str__(self) -> str:
        return f"data={self.data},model={self.model}"


def parse(text: str | None, shard: str = "none") -> Mesh | None:
    """Returns the mesh that "data=4,model=2" describes, None for no text.

    Raises:
      UserError: unknown axis, not a number above 0, or something to shard and no mesh.
    """
    if text is None or not text.strip():
        if shard != "none":
            raise UserError(f"shard={shard} needs cores to shard over: add mesh=data=N, such as mesh=data=8")
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise UserError(f'mesh "{text}": axis "{name}"{nearest(name, AXES)} is none of data and model')
        if name in sizes:
            raise UserError(f'mesh "{text}" gives {name} twice')
        if not number.isdigit() or int(number) < 1:
            raise UserError(f'mesh "{text}": {name}="{number}" is not a whole number above 0, as in data=4,model=2')
        sizes[name] = int(number)
    return Mesh(sizes.get("data", 1), sizes.get("model", 1), shard)


def check_model(mesh: Mesh, num_heads: int, mlp_dim: int) -> None:
    """Raises UserError unless heads and hidden units divide over the model axis; names axes that both divide over."""
    for name, size in (("num_heads", num_heads), ("mlp_dim", mlp_dim)):
        if size % mesh.model:
            both = math.gcd(num_heads, mlp_dim)
            fits = [n for n in range(1, both + 1) if both % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - mesh.model))[:3])
            raise UserError(
                f"mesh {mesh}: model.{name} {size} does not divide into {mesh.model} parts: "
                f"use model={' or model='.join(map(str, near))}, or another model.{name}"
            )


def check_batch(mesh: Mesh, batch: int, accumulation_steps: int = 1) -> None:
    """Raises UserError unless every micro-batch divides over the data axis; names batches that do."""
    unit = mesh.data * accumulation_steps
    if batch % unit:
        lower = batch // unit * unit
        parts = f"{mesh.data} parts" + (f" of {accumulation_steps} micro-batches" if accumulation_steps > 1 else "")
        raise UserError(
            f"mesh {mesh}: training.batch_size {batch} does not divide into {parts}: "
            f"use {' or '.join(str(size) for size in (lower, lower + unit) if size)}"
        )


def check_cores(mesh: Mesh, cores: int) -> None:
    """Raises UserError unless the mesh has as many cores as there are; names meshes that do."""
    if mesh.cores != cores:
        fits = [f"data={cores // n},model={n}" for n in (1, 2, 4, 8) if cores % n == 0]
        raise UserError(f"mesh {mesh} has {mesh.cores} cores, not {cores}: use {' or '.join(fits)}")
