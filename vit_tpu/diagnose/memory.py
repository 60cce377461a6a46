"""The memory of a training step on one device, from the config alone: nothing is built or compiled.

State (weights, moments, average) is there all the time. Activations pile up in the forward pass; the backward pass
lets them go block by block while gradients come in their place. `breakdown` follows that and takes the fullest moment.

`python -m vit_tpu.plan` asks the TPU compiler instead, which knows padding, layouts and what it can leave out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vit_tpu import mesh as meshes
from vit_tpu.diagnose import kept, state
from vit_tpu.diagnose.kept import Tensor
from vit_tpu.layers.patches import grid_of
from vit_tpu.settings import Config

PARTS = ("weights", "optimizer state", "EMA", "accumulator", "gradients", "copies", "activations", "batch")
WHAT = {
    "weights": "float32",
    "optimizer state": "moments",
    "EMA": "average of the weights, float32",
    "accumulator": "gradient sum over micro-batches, float32",
    "gradients": "alive at the fullest moment",
    "copies": "of weights or images in the compute dtype, and what XLA copies on CPUs",
    "activations": "kept for the backward pass, and what it makes",
    "batch": "images as the model reads them, labels",
}


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """What one device holds at the fullest moment of a training step, without padding.

    Attributes:
      tensors: the arrays.
      moment: where in the step that is ("backward pass of blocks/11/mlp", "update").
      hardware: "CPU", "GPU" or "TPU".
      activations: of one micro-batch, all that the forward pass keeps (with rematerialisation: one block whole).
      accumulation_steps: micro-batches.
    """

    tensors: tuple[Tensor, ...]
    moment: str
    hardware: str
    activations: int
    accumulation_steps: int

    @property
    def total(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def state(self) -> int:
        """Bytes that are there before any step: weights, optimizer state, average."""
        return sum(self.parts[name] for name in ("weights", "optimizer state", "EMA"))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for, keys as in PARTS."""
        found = dict.fromkeys(PARTS, 0)
        for tensor in self.tensors:
            found[tensor.part] += tensor.bytes
        return found

    def by(self, what: str, part: str = "activations") -> dict[str, int]:
        """Bytes of a part by "layer" (blocks/3) or "kind" (query, attention weights, ...), largest first."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.part == part:
                name = _block_of(tensor.layer) if what == "layer" else tensor.kind
                found[name] = found.get(name, 0) + tensor.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def largest(self, count: int = 5) -> list[tuple[str, str, int, int]]:
        """The largest arrays as (layer, what it is, how many alike, bytes of one), repeated layers as one line."""
        groups: dict[tuple[str, str, int], list[str]] = {}
        for tensor in self.tensors:
            layer, _, rest = tensor.layer.partition("/")
            alike = "/".join(["blocks/*", *rest.split("/")[1:]]) if layer == "blocks" else tensor.layer
            what = f"{tensor.kind} {tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
            groups.setdefault((alike, what, tensor.bytes), []).append(tensor.layer)
        rows = [
            (names[0] if len(names) == 1 else alike, what, len(names), size)
            for (alike, what, size), names in groups.items()
        ]
        return sorted(rows, key=lambda row: -row[2] * row[3])[:count]

    def remarks(self) -> list[str]:
        """What is odd: micro-batches that cost more memory than they free."""
        freed, cost = (self.accumulation_steps - 1) * self.activations, self.parts["accumulator"]
        if self.accumulation_steps > 1 and cost > freed:
            return [
                f"{self.accumulation_steps} micro-batches cost more memory than they free: the sum of gradients takes "
                f"{size_text(cost)}, the activations shrink by {size_text(freed)}"
            ]
        return []

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as --json writes them."""
        return {
            "hardware": self.hardware, "moment": self.moment, "total": self.total, "parts": self.parts,
            "activations_by_kind": self.by("kind"), "activations_by_layer": self.by("layer"),
            "remarks": self.remarks(), "estimated_not_measured": True,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = {name: size for name, size in self.parts.items() if size}
        lines = [f"memory (an estimate from the shapes for a {self.hardware}; nothing was compiled)"]
        lines += [f"  {name:<15}  {size_text(size):>12}  {WHAT[name]}" for name, size in parts.items()]
        lines.append(f"  {'together':<15}  {size_text(self.total):>12}  on each device, fullest in the {self.moment}")
        kinds = self.by("kind")
        if kinds:
            named = [f"{kind} {size_text(size)}" for kind, size in list(kinds.items())[:6]]
            rest = sum(list(kinds.values())[6:])
            named += [f"other {size_text(rest)}"] if rest else []
            lines.append(f"  activations by kind: {', '.join(named)}")
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks())])


def breakdown(
    config: Config, classes: int | None = None, channels: int | None = None, replicas: int = 1, hardware: str = "TPU"
) -> Breakdown:
    """Returns what one device holds at the fullest moment of a training step.

    Args:
      config: checked.
      classes, channels: of the data; None: what the config says (1000 and 3 if it does not).
      replicas: devices that share a batch; with a mesh that divides the program, the mesh says.
      hardware: "CPU", "GPU" or "TPU"; with `training.jit` it decides what the compiler keeps.

    Raises:
      UserError: sizes that do not divide.
    """
    shape = shape_of(config, classes, channels, replicas, hardware)
    trained, held = state.of_model(
        config.model, config.optimizer, config.training.ema is not None, shape.pixels, shape.classes
    )
    steps = config.training.accumulation_steps
    always = [*held, *state.batch(config, shape), *state.copies(config, trained, held, shape)]
    # Micro-batches add each gradient to the sum as it comes.
    always += [state.float32(p, "accumulator", "gradient sum") for p in trained] if steps > 1 else []
    gradients = [(p.depth, state.gradient(p, shape)) for p in trained if steps == 1 or p.stacked]
    mesh = meshes.parse(config.mesh, config.shard)
    parted = mesh if mesh is not None and mesh.partitioned else None
    if parted is not None:
        everything = state.parameters(config.model, shape.pixels, shape.classes)
        gradients = [(depth, divided([gradient], everything, parted)[0]) for depth, gradient in gradients]
    first = min((p.depth for p in trained), default=0)  # nothing below it needs a gradient
    stages = [stage for stage in kept.stages(shape) if stage.depth >= first]
    moment, found = "update", [gradient for _, gradient in gradients]
    most = _bytes(found)
    for name, size, arrays in _moments(stages, *_in_loops(gradients, shape)):
        if size > most:
            moment, most, found = f"backward pass of {name}", size, arrays()
    if parted is not None:
        always, found = divided(always, everything, parted), divided(found, everything, parted)
    activations = sum(_bytes(s.kept) for s in stages) + max((_bytes(s.again) for s in stages), default=0)
    return Breakdown((*always, *found), moment, hardware, activations, steps)


def divided(tensors: Sequence[Tensor], parameters: Sequence[Any], mesh: meshes.Mesh) -> list[Tensor]:
    """Returns the parts of arrays that one core of a mesh holds (see `layers.sharding`).

    Args:
      tensors: of one core's share of the batch.
      parameters: of the model, frozen ones too.
      mesh: partitioned.
    """
    from vit_tpu.layers import sharding
    from vit_tpu.optim import adafactor

    known = {p.path: p for p in parameters}

    def piece(tensor: Tensor) -> Tensor:
        p = known.get(tensor.layer)
        if p is None:  # an activation: its heads or hidden units
            return tensor if tensor.split is None else tensor.cut(tensor.split, mesh.model)
        if tensor.part == "gradients" and tensor.shape != p.variable.shape:
            return tensor  # a part already
        how = (p.variable.shape, p.split, mesh, p.stacked)
        place = sharding.stored_spec(*how) if tensor.part == "weights" else sharding.state_spec(*how)
        if tensor.shape != p.variable.shape:  # Adafactor's means of rows and columns lack one of the axes
            first = int(p.stacked)
            second, largest = adafactor.factored_axes(p.variable.shape[first:], 1) or (0, 0)
            gone = first + (largest if tensor.kind.endswith("row") else second)
            place = place[:gone] + place[gone + 1 :]
        return dataclasses.replace(tensor, shape=sharding.piece(tensor.shape, place, mesh))

    return [piece(tensor) for tensor in tensors]


def _in_loops(
    gradients: Sequence[tuple[int, Tensor]], shape: kept.Shape
) -> tuple[list[tuple[int, Tensor]], list[tuple[int, int]]]:
    """Returns the gradients with those of stacked blocks cut into one array for each loop, and the loops.

    A gradient comes with the depth below which it is there; a loop is (depth of its first block, of its last).
    """
    from vit_tpu.layers.block import loops

    stacked = [tensor for _, tensor in gradients if tensor.kind == state.STACKED]
    if not stacked:
        return list(gradients), []
    depth, pieces = shape.variant.depth, [(0, shape.variant.depth)]
    if shape.mode == "tpu":
        inputs = kept.SIZES[shape.dtype] * math.prod(shape.stream)
        pieces = loops(depth, inputs, _bytes(stacked) // depth)
    found = [(at, tensor) for at, tensor in gradients if tensor.kind != state.STACKED]
    for first, count in pieces:  # from the loop's beginning on, at its last block
        parts = (dataclasses.replace(tensor, shape=(count, *tensor.shape[1:])) for tensor in stacked)
        found += [(first + count + 1, tensor) for tensor in parts]
    return found, [(first + 1, first + count) for first, count in pieces]


def _moments(
    stages: Sequence[kept.Stage], gradients: Sequence[tuple[int, Tensor]], loops: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int, Callable[[], list[Tensor]]]]:
    """Yields (name, bytes, function giving the arrays) of each moment of the backward pass."""
    for place in range(len(stages) - 1, -1, -1):
        stage = stages[place]
        # What a loop keeps of its blocks is one array, which goes when the loop has run.
        last = next((last for first, last in loops if first <= stage.depth <= last), stage.depth)
        below = [s for s in stages if s.depth <= last]
        alive = [gradient for depth, gradient in gradients if depth > stage.depth]
        fixed = sum(_bytes(s.kept) for s in below) + _bytes(stage.again) + _bytes(alive)
        for name, made, gone in stage.moments:

            def arrays(below=below, again=stage.again, made=made, gone=gone, alive=alive) -> list[Tensor]:
                there = [tensor for s in below for tensor in s.kept] + [*again, *made, *alive]
                return [tensor for tensor in there if not any(tensor is other for other in gone)]

            yield name, fixed + _bytes(made) - _bytes(gone), arrays


def shape_of(
    config: Config, classes: int | None, channels: int | None, replicas: int = 1, hardware: str = "TPU"
) -> kept.Shape:
    """Returns the sizes that a step's arrays follow from."""
    m, v = config.model, state.variant_of(config.model)
    height, width = (m.image_size, m.image_size) if isinstance(m.image_size, int) else m.image_size
    rows, columns = grid_of((height, width), v.patch_size)
    tokens = rows * columns + (m.pool == "tok") + m.registers
    dtype = {"float32": "float32", "mixed_bfloat16": "bfloat16"}.get(config.precision, "float16")
    compiled = config.training.jit if config.training.jit is not None else hardware == "GPU"
    mode = "tpu" if hardware == "TPU" else hardware.lower() if compiled else "plain"
    held = "float32" if mode == "cpu" else dtype
    mesh = meshes.parse(config.mesh, config.shard)
    replicas = mesh.data if mesh is not None and mesh.partitioned else replicas
    batch = max(config.training.batch_size // replicas // config.training.accumulation_steps, 1)
    pixels = (height, width, channels or config.data.channels or 3)
    classes = classes or m.num_classes or 1000
    steps = config.training.accumulation_steps
    return kept.Shape(v, batch, tokens, rows * columns, pixels, classes, held, dtype != "float32", mode, steps, m)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _block_of(layer: str) -> str:
    parts = layer.split("/")
    return "/".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def size_text(size: float) -> str:
    """Returns bytes as GiB, MiB or KiB with one or two decimals."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
