"""Shapes against the tiles of the hardware: what padding wastes, and which neighbouring size would not."""

from __future__ import annotations

import dataclasses

from vit_tpu.diagnose.findings import Finding
from vit_tpu.layers.patches import grid_of
from vit_tpu.models import variants
from vit_tpu.settings import Config

LANES = 128  # a TPU stores the last axis of an array in tiles of 128 numbers, whatever their dtype
TENSOR_CORE = 8  # GPU matrix units take half-precision sizes that are multiples of 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides padding: tokens N, width D, hidden size M, heads H, classes, batch on one device and dtype size."""

    tokens: int
    width: int
    mlp_dim: int
    num_heads: int
    depth: int
    classes: int
    batch: int
    item: int


def of_config(config: Config, classes: int, replicas: int) -> Shape:
    """Returns the shape of a run's model."""
    from vit_tpu.models.vit import override

    m = config.model
    names = ("width", "depth", "mlp_dim", "num_heads", "patch_size")
    v = override(variants.variant(m.variant), {name: getattr(m, name) for name in names})
    size = (m.image_size, m.image_size) if isinstance(m.image_size, int) else m.image_size
    rows, columns = grid_of(size, v.patch_size)
    tokens = rows * columns + (m.pool == "tok") + m.registers
    batch = max(config.training.batch_size // replicas // config.training.accumulation_steps, 1)
    item = 4 if config.precision == "float32" else 2
    return Shape(tokens, v.width, v.mlp_dim, v.num_heads, v.depth, classes, batch, item)


def padded(size: int, tile: int = LANES) -> int:
    """Returns `size` rounded up to whole tiles."""
    return -(-size // tile) * tile


def check(shape: Shape, hardware: str, pool: str = "gap") -> list[Finding]:
    """Returns what the hardware pads.

    Args:
      shape: from `of_config`.
      hardware: "TPU", "GPU" or "CPU"; a CPU pads nothing.
      pool: of the model: a class token can be traded for another pooling.
    """
    if hardware == "TPU":
        found = [*_tokens(shape, pool), *_widths(shape), *_heads(shape)]
        return found or [Finding("ok", "shapes", f"{shape.tokens} tokens and width {shape.width} fill the TPU's tiles")]
    if hardware == "GPU":
        return _gpu(shape)
    return []


def _tokens(shape: Shape, pool: str) -> list[Finding]:
    n, full = shape.tokens, padded(shape.tokens)
    if n == full:
        return []
    waste = shape.batch * shape.num_heads * n * (full - n) * shape.item * shape.depth
    below = full - LANES
    text = (
        f"{n} tokens fill {full} lanes: {1 - n / full:.0%} of each attention matrix is padding, {_mib(waste)} over "
        f"{shape.depth} blocks at batch {shape.batch} (estimate)"
    )
    if below and n - below <= 1 + 8:  # a class token or registers have just opened a new tile
        what = "pool=gap or map instead of the class token" if pool == "tok" else "fewer registers"
        return [Finding("warning", "shapes", text, f"{what}: {below} tokens fill their tiles")]
    level = "warning" if 1 - n / full > 0.3 else "note"
    near = f"{below} or {full} tokens fill their tiles" if below else f"up to {full} tokens cost the same"
    return [Finding(level, "shapes", text, f"{near}; what it costs in time: python -m vit_tpu.plan --cycles")]


def _widths(shape: Shape) -> list[Finding]:
    found = []
    for name, size in (("width", shape.width), ("mlp_dim", shape.mlp_dim)):
        full = padded(size)
        if full != size and size > LANES // 2:
            waste = shape.batch * shape.tokens * (full - size) * shape.item * shape.depth
            text = f"{name} {size} fills {full} lanes: {1 - size / full:.0%} padding, {_mib(waste)} (estimate)"
            near = [str(s) for s in (full - LANES, full) if s]
            level = "warning" if 1 - size / full > 0.1 else "note"
            found.append(Finding(level, "shapes", text, f"{name} {' or '.join(near)}"))
    return found


def _heads(shape: Shape) -> list[Finding]:
    head = shape.width // shape.num_heads
    if head % LANES == 0:
        return []
    fits = [h for h in range(1, shape.num_heads + 1) if shape.width % h == 0 and shape.width // h % LANES == 0]
    text = f"heads of {head} channels use {head / padded(head):.0%} of a matrix unit's {LANES} columns in attention"
    if fits:
        return [
            Finding("note", "shapes", text, f"num_heads {max(fits)} has heads of {shape.width // max(fits)} channels")
        ]
    return [Finding("note", "shapes", text)]


def _gpu(shape: Shape) -> list[Finding]:
    if shape.item == 4:
        return []
    sizes = {"width": shape.width, "mlp_dim": shape.mlp_dim, "head size": shape.width // shape.num_heads}
    odd = {name: size for name, size in sizes.items() if size % TENSOR_CORE}
    found = [
        Finding(
            "warning",
            "shapes",
            f"{name} {size} is no multiple of {TENSOR_CORE}: tensor cores are not used for it",
            f"{name} {padded(size, TENSOR_CORE)}",
        )  # fmt: skip
        for name, size in odd.items()
    ]
    return found or [Finding("ok", "shapes", "all matrix sizes are multiples of 8: tensor cores apply")]


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
