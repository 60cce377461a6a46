"""Which arrays the layers hold during a training step, from shapes alone: what the custom gradients keep, and the
arrays a backward pass makes.

The rules follow the code: `layers.norm` keeps its input and two numbers a row, `layers.attention` the projections, the
weights rounded to the compute dtype and the result, `layers.mlp` what enters GELU. What compilers add to that:

- A TPU computes the operand of a matrix product inside the product. Elsewhere products are library calls, so their
  operands are arrays too: normalised inputs, GELU's output, the heads side by side.
- XLA off TPUs merges GELU's tanh of both passes and keeps it.
- XLA on CPUs holds half precision in float32, rounded, merges what remat=block would compute again, and copies the
  optimizer's moments before it overwrites them.
- A TPU's products read float32 as bfloat16, so that what is cast before a loop is half as large.
"""

from __future__ import annotations

import dataclasses
import math

from vit_tpu.models import variants
from vit_tpu.settings import Model

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
MODES = ("tpu", "gpu", "cpu", "plain")  # compiled for it by XLA; plain: TensorFlow's own kernels


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array of a training step.

    Attributes:
      part: what it counts to, one of `memory.PARTS`. layer: "blocks/3/mlp". kind: what it holds.
      shape, dtype: of it.
      split: axis of heads or hidden units, which a mesh's model axis divides, or None.
    """

    part: str
    layer: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    def cut(self, axis: int, parts: int) -> Tensor:
        """Returns one of `parts` parts along an axis."""
        shape = tuple(-(-size // parts) if a == axis else size for a, size in enumerate(self.shape))
        return dataclasses.replace(self, shape=shape)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the arrays' sizes follow from.

    Attributes:
      variant: width, depth and so on.
      batch: B, images of one micro-batch on one device.
      tokens, patches: N with and without class token and registers.
      pixels: (height, width, channels).
      classes: of the head.
      dtype: what activations are held in: the compute dtype, but float32 by XLA on CPUs.
      rounded: whether the compute dtype is a half precision.
      mode: one of MODES.
      steps: micro-batches.
      model: the model's settings.
    """

    variant: variants.Variant
    batch: int
    tokens: int
    patches: int
    pixels: tuple[int, int, int]
    classes: int
    dtype: str
    rounded: bool
    mode: str
    steps: int
    model: Model

    @property
    def product(self) -> str:
        """The dtype that matrix products read: bfloat16 on TPUs also under float32."""
        return "bfloat16" if self.mode == "tpu" and self.dtype == "float32" else self.dtype

    @property
    def stream(self) -> tuple[int, int, int]:
        return self.batch, self.tokens, self.variant.width


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the forward pass, and what its backward pass does to memory.

    Attributes:
      name: "embedding", "blocks/3", "head".
      depth: of its parameters (0, 1..L, L + 1).
      kept: arrays from the forward to the backward pass.
      again: arrays that the backward pass computes again first (rematerialisation).
      moments: (name, arrays made, arrays of kept or again that are gone by then) of its backward pass.
    """

    name: str
    depth: int
    kept: tuple[Tensor, ...]
    again: tuple[Tensor, ...] = ()
    moments: tuple[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]], ...] = ()


def stages(s: Shape) -> list[Stage]:
    """Returns the stages of a model in the order of its forward pass."""
    again = s.model.scan or (s.model.remat == "block" and s.mode != "cpu")
    found = [embedding(s, again)]
    found += [block(s, i, again) for i in range(s.variant.depth)]
    return [*found, head(s)]


def embedding(s: Shape, again: bool) -> Stage:
    """Returns the embedding; `again`: whether its backward pass takes the images of the batch anew, on a TPU."""
    # The matrix product's operand: cast, and cut into patches off TPUs.
    kept = [_activation(s, "embedding", "images for the product", (s.batch, *s.pixels), s.product)]
    if s.mode == "tpu" and s.steps > 1:  # cast for all micro-batches at once, before the loop
        kept.append(_activation(s, "embedding", "images, cast", (s.steps * s.batch, *s.pixels), s.product))
    if s.mode == "tpu" and again:
        kept = [dataclasses.replace(tensor, part="copies") for tensor in kept]
    gradient = _activation(s, "embedding", "gradient of tokens", s.stream)
    return Stage("embedding", 0, tuple(kept), (), (("embedding", (gradient,), ()),))


def block(s: Shape, number: int, again: bool) -> Stage:
    """Returns block `number`; with `again` only its input is kept until its backward pass computes the rest anew."""
    v, name = s.variant, f"blocks/{number}"
    heads = (s.batch, s.tokens, v.num_heads, v.width // v.num_heads)
    maps, hidden = (s.batch, v.num_heads, s.tokens, s.tokens), (s.batch, s.tokens, v.mlp_dim)

    def array(layer: str, kind: str, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        split = {heads: 2, maps: 1, maps[:3]: 1, hidden: 2}.get(shape)
        return dataclasses.replace(_activation(s, f"{name}{layer}", kind, shape, dtype), split=split)

    start = array("", "block input", s.stream)
    before_gelu = array("/mlp", "before GELU", hidden)
    rest = [array("/attention", kind, heads) for kind in ("query", "key", "value")]
    rest += [
        array("/attention", "attention weights", maps),
        array("/attention", "heads' output", heads),
        array("", "after attention", s.stream),
        before_gelu,
    ]
    rest += [array(f"/norm{i}", "mean and factor", (2, s.batch, s.tokens), "float32") for i in (1, 2)]
    if s.mode == "tpu":
        rest.append(array("/attention", "sums of exponentials", maps[:3], "float32"))
    gone = [before_gelu]
    if s.mode != "tpu":
        rest += [array(f"/norm{i}", "normalised", s.stream) for i in (1, 2)]
        rest.append(array("/attention", "heads side by side", s.stream))
        gone.append(array("/mlp", "after GELU", hidden))
        if s.mode in ("gpu", "cpu"):
            gone.append(array("/mlp", "tanh of GELU", hidden, "float32"))
        rest += gone[1:]
    if s.mode == "cpu" and s.rounded:
        rest.append(array("/attention", "attention weights, rounded", maps))
    if s.model.layer_scale is not None:
        rest += [array("", f"branch before scale{i}", s.stream) for i in (1, 2)]
    if s.model.dropout:
        rest += [array("", "dropout mask", s.stream), array("/mlp", "dropout mask", s.stream)]
        rest.append(array("/mlp", "dropout mask", hidden))
    dy = array("", "gradient of tokens", s.stream)
    through_mlp = (array("/mlp", "gradient before GELU", hidden), dy)
    inside = [array("/attention", f"gradient of {kind}", heads) for kind in ("query", "key", "value")]
    through_maps = (array("/attention", "gradient of attention weights", maps), dy)
    # In place of what entered GELU; a loop inside a loop keeps both, as libtpu 0.0.52 compiles it.
    replaced = () if s.model.scan and s.steps > 1 else (before_gelu,)
    moments = (
        (f"{name}/mlp", through_mlp, replaced),
        (f"{name}/attention", through_maps, tuple(gone)),
        (f"{name}/attention", (*inside, dy), tuple(gone)),
    )
    if again and s.mode == "tpu":
        rest.append(array("", "input, behind the barrier", s.stream))
    if again:
        return Stage(name, number + 1, (start,), tuple(rest), moments)
    return Stage(name, number + 1, (start, *rest), (), moments)


def head(s: Shape) -> Stage:
    """Returns the final norm, the pooling and the classifier, all float32."""
    v, last = s.variant, s.model.representation_size or s.variant.width
    kept = [
        _activation(s, "norm", "encoder output", s.stream),
        _activation(s, "norm", "mean and factor", (2, s.batch, s.tokens), "float32"),
        _activation(s, "head", "features", (s.batch, last), "float32"),
        _activation(s, "head", "logits", (s.batch, s.classes), "float32"),
    ]
    made = [
        _activation(s, "head", "gradient of logits", (s.batch, s.classes), "float32"),
        _activation(s, "norm", "gradient of tokens", s.stream),
    ]
    if s.model.pool == "map":
        tokens = (s.batch, s.patches, v.width)
        kept.append(_activation(s, "map", "tokens", tokens, "float32"))
        made.append(_activation(s, "map", "gradient of tokens", tokens, "float32"))
        kept.append(_activation(s, "map", "attention weights", (s.batch, v.num_heads, s.patches), "float32"))
        kept.append(_activation(s, "map", "seen by each head", (s.batch, v.num_heads, v.width), "float32"))
        kept.append(_activation(s, "map/mlp", "before GELU", (s.batch, v.mlp_dim), "float32"))
    return Stage("head", v.depth + 1, tuple(kept), (), (("head", tuple(made), ()),))


def _activation(s: Shape, layer: str, kind: str, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
    return Tensor("activations", layer, kind, shape, dtype or s.dtype)
