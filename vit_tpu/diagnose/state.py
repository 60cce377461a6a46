"""What a training step holds besides activations, from a config alone: weights, moments, gradients, copies, batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from vit_tpu.diagnose import kept
from vit_tpu.diagnose.kept import Tensor
from vit_tpu.layers.patches import grid_of
from vit_tpu.models import variants
from vit_tpu.settings import Config, Model, Optimizer

STACKED = "gradient of all blocks"


def parameters(m: Model, pixels: tuple[int, int, int], classes: int) -> list[Any]:
    """Returns the parameters of a model that is not built: `optim.decay.Parameter` with a shape for its variable.

    Args:
      m: the model's settings.
      pixels: height, width and channels of its images.
      classes: of its head.
    """
    from vit_tpu.layers.block import Block
    from vit_tpu.layers.head import Head, Representation
    from vit_tpu.layers.norm import LayerNorm
    from vit_tpu.layers.patches import PatchEmbedding
    from vit_tpu.layers.pooling import MapPool
    from vit_tpu.layers.positions import PositionsAndTokens
    from vit_tpu.optim.decay import Parameter

    v = variant_of(m)
    grid = grid_of(pixels[:2], v.patch_size)
    one = Block(v.width, v.num_heads, v.mlp_dim, layer_scale=m.layer_scale).specs()
    features, top = m.representation_size or v.width, v.depth + 1
    parts: list[tuple[str, int, dict[str, Any]]] = [
        ("embedding", 0, PatchEmbedding(v.width, v.patch_size, pixels[2]).specs()),
        ("", 0, PositionsAndTokens(grid, v.width, m.posemb, m.pool == "tok", m.registers).specs()),
    ]
    parts += [("blocks", 1, one)] if m.scan else [(f"blocks/{i}", i + 1, one) for i in range(v.depth)]
    parts.append(("norm", top, LayerNorm(v.width).specs()))
    if m.pool == "map":
        parts.append(("map", top, MapPool(v.width, v.num_heads, v.mlp_dim).specs()))
    if m.representation_size:
        parts.append(("pre_logits", top, Representation(v.width, features).specs()))
    parts.append(("head", top, Head(features, classes).specs()))
    found = []
    for prefix, depth, specs in parts:
        stack = (v.depth,) if prefix == "blocks" else ()
        for path, spec in specs.items():
            name = f"{prefix}/{path}" if prefix else path
            part = "head" if prefix == "head" else "body"
            split = None if spec.split is None else spec.split + len(stack)
            shape = _Sized((*stack, *spec.shape))
            found.append(Parameter(name, shape, spec.kind, part, depth, stacked=bool(stack), split=split))
    return found


def variant_of(m: Model) -> variants.Variant:
    """Returns the shape that a config's model has, its own width, depth and so on put in."""
    from vit_tpu.models.vit import override

    names = ("width", "depth", "mlp_dim", "num_heads", "patch_size")
    return override(variants.variant(m.variant), {name: getattr(m, name) for name in names})


@dataclasses.dataclass(frozen=True)
class _Sized:
    """Stands for a variable where only its shape is asked for."""

    shape: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def of_model(
    m: Model, o: Optimizer, averaged: bool, pixels: tuple[int, int, int], classes: int
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Returns the trained parameters, and weights, optimizer slots and average as arrays."""
    from vit_tpu import optim
    from vit_tpu.optim import decay
    from vit_tpu.optim.rules import Rule

    everything = parameters(m, pixels, classes)
    groups = decay.resolve(everything, freeze=o.freeze)
    frozen = {path for group in groups if group.frozen for path in group.paths}
    trained = tuple(p for p in everything if p.path not in frozen)
    options = {name: value for name, value in dataclasses.asdict(o).items() if value is not None}
    for name in ("name", "learning_rate", "freeze", "layer_decay"):
        options.pop(name, None)
    optimizer = optim.build(o.name, 0.0, **options)
    found = [float32(p, "weights", "weights") for p in everything]
    for p in trained:
        slots = optimizer._slot_specs(Rule(p.path, p.variable.shape, stacked=p.stacked))
        found += [Tensor("optimizer state", p.path, slot, tuple(size), dtype) for slot, (size, dtype) in slots.items()]
    if averaged:
        found += [float32(p, "EMA", "average") for p in trained]
    return trained, tuple(found)


def gradient(parameter: Any, shape: kept.Shape) -> Tensor:
    """The gradient of a parameter: in the compute dtype where the layer casts the weight, float32 in the islands."""
    kind = STACKED if parameter.stacked else "gradient"
    return Tensor(
        "gradients", parameter.path, kind, parameter.variable.shape, "float32" if _island(parameter) else shape.dtype
    )


def _island(parameter: Any) -> bool:
    return parameter.kind == "norm" or parameter.path.split("/")[0] in ("map", "pre_logits", "head")


def copies(config: Config, trained: Sequence[Any], state: Sequence[Tensor], shape: kept.Shape) -> list[Tensor]:
    """Weights in half precision: a TPU casts inside a product, or before a loop over micro-batches; moments on CPUs."""
    found = []
    if shape.mode == "cpu":
        found += [dataclasses.replace(t, part="copies") for t in state if t.part == "optimizer state"]
    if shape.mode == "tpu" and (shape.steps == 1 or config.model.scan):
        return found
    if shape.rounded or shape.mode == "tpu":
        cast = [p for p in trained if p.kind == "kernel" and not _island(p)]
        found += [Tensor("copies", p.path, "weights", p.variable.shape, shape.product) for p in cast]
    return found


def batch(config: Config, shape: kept.Shape) -> list[Tensor]:
    examples = shape.batch * shape.steps
    soft = config.data.mixup or config.data.cutmix or config.training.loss == "sigmoid"
    labels = (examples, shape.classes) if soft else (examples,)
    return [
        Tensor("batch", "images", "images", (examples, *shape.pixels), "float32"),
        Tensor("batch", "labels", "labels", labels, "float32" if soft else "int32"),
    ]


def float32(parameter: Any, part: str, kind: str) -> Tensor:
    return Tensor(part, parameter.path, kind, parameter.variable.shape, "float32")
