"""How much memory a training step needs on one device, from shapes alone: at once, and roughly.

`python -m vit_tpu.plan` asks the TPU compiler instead, which knows padding, layouts and what it can leave out.
"""

from __future__ import annotations

import math
from typing import Any

from vit_tpu.models import variants
from vit_tpu.models.vit import ViT
from vit_tpu.settings import Config
from vit_tpu.training import display

WHAT = {
    "weights": "float32",
    "optimizer state": "moments, as made for this run",
    "EMA": "average of the weights, float32",
    "gradients": "all of them at once, in the compute dtype",
    "accumulator": "gradient sum over micro-batches, float32",
    "activations": "what the forward pass keeps for the backward pass",
    "batch": "images as the model reads them, float32",
}


def memory(config: Config, model: ViT, replicas: int = 1) -> dict[str, int]:
    """Returns bytes on one device by what they are for, keys as in WHAT.

    Args:
      config: of the run.
      model: compiled for it, so that its optimizer's slots exist.
      replicas: devices that share a batch.
    """
    count = sum(math.prod(p.variable.shape) for p in model.parameters())
    trained = sum(math.prod(p.variable.shape) for p in model.trained)
    slots = [v for slot in model.inner_optimizer.slots.values() for v in slot.values()]
    examples = config.training.batch_size // replicas
    steps = config.training.accumulation_steps
    size = 4 if config.precision == "float32" else 2
    return {
        "weights": 4 * count,
        "optimizer state": sum(v.dtype.size * math.prod(v.shape) for v in slots),
        "EMA": 0 if model.averages is None else sum(4 * math.prod(v.shape) for v in model.averages.averages),
        "gradients": size * trained,
        "accumulator": 4 * trained if steps > 1 else 0,
        "activations": activations(
            model.variant,
            examples // steps,
            model.num_patches + model.positions.num_prefix,
            size,
            keep_inputs_only=config.model.scan or config.model.remat != "none",
        ),
        "batch": 4 * examples * math.prod(model.image_size) * model.channels,
    }


def activations(v: variants.Variant, batch: int, tokens: int, size: int, keep_inputs_only: bool = False) -> int:
    """Returns the bytes that the blocks keep for the backward pass.

    A block keeps its input and the sum after attention, q, k, v and the heads' output (6 N D), the exponentials of the
    logits (H N^2) and what enters GELU (N M); with rematerialisation its input alone, and one block is whole at a time.

    Args:
      v: the model's shape.
      batch: images of one micro-batch on one device.
      tokens: N.
      size: bytes of an element in the compute dtype.
      keep_inputs_only: remat=block or scan.
    """
    block = tokens * (6 * v.width + v.num_heads * tokens + v.mlp_dim)
    kept = v.depth * tokens * v.width + block if keep_inputs_only else v.depth * block
    return batch * size * kept


def text(config: Config, model: ViT, replicas: int = 1) -> str:
    """Returns the estimate as a table, with where to get the compiler's own answer."""
    parts = memory(config, model, replicas)
    rows: list[tuple[str, str]] = [
        (name, f"{size_text(bytes_):>12}  {WHAT[name]}") for name, bytes_ in parts.items() if bytes_
    ]
    rows.append(("together", f"{size_text(sum(parts.values())):>12}  on each device, without padding"))
    lines = ["memory (an estimate from the shapes, nothing was compiled)", display.table(rows)]
    lines += [f"  {line}" for line in remarks(config, model, parts)]
    lines.append(
        "the TPU compiler's own answer, fits or not: python -m vit_tpu.plan with the same --config and settings"
    )
    return "\n".join(lines)


def remarks(config: Config, model: ViT, parts: dict[str, Any]) -> list[str]:
    """Returns what is odd about an estimate: micro-batches that cost more than they free."""
    steps = config.training.accumulation_steps
    freed = (steps - 1) * parts["activations"]
    if steps > 1 and parts["accumulator"] > freed:
        return [
            f"{steps} micro-batches cost more memory than they free: the sum of gradients takes "
            f"{size_text(parts['accumulator'])}, the activations shrink by {size_text(freed)}"
        ]
    return []


def size_text(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
