"""One training step layer by layer: the first that is not finite, forward or backward, and the ranges around it.

The compiled step only says that something went wrong, since a check inside every layer would cost time in every step.
Here the step is taken once more, without XLA, with the same weights, batch and random seed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.layers import drop
from vit_tpu.models.vit import ViT
from vit_tpu.optim import LossScale

# The largest number, and below what magnitude a number becomes zero: float16 rounds to its smallest subnormal, 2^-24;
# TPUs flush bfloat16 below its smallest normal number.
LIMITS = {"float16": (65504.0, 2.0**-25), "bfloat16": (3.3895e38, 2.0**-126)}
LARGEST_TO_SQUARE = 2.0**64


@dataclasses.dataclass(frozen=True)
class Range:
    """What a tensor holds: dtype, finite extremes, how many of its numbers are not finite, what half precision loses.

    Attributes:
      low, high: of the finite numbers.
      bad, size: numbers that are not finite, of how many.
      overflow, flush: shares that would overflow in float16, or become zero though they are not.
      bfloat16: the same two shares for bfloat16.
    """

    dtype: str
    low: float
    high: float
    bad: int
    size: int
    overflow: float
    flush: float
    bfloat16: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, tensor: tf.Tensor) -> Range:
        values = tf.cast(tensor, tf.float32).numpy().ravel()
        finite = values[np.isfinite(values)]
        magnitude = np.abs(finite)
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
        shares = {
            name: (
                float((magnitude > largest).mean()), float(((magnitude < smallest) & (magnitude > 0)).mean())
            ) if finite.size else (0.0, 0.0)
            for name, (largest, smallest) in LIMITS.items()
        }  # fmt: skip
        return cls(
            tensor.dtype.name, low, high, values.size - finite.size, values.size, *shares["float16"], shares["bfloat16"]
        )

    def lost(self, name: str) -> tuple[float, float]:
        """Returns the shares that would overflow and become zero in "float16" or "bfloat16"."""
        return (self.overflow, self.flush) if name == "float16" else self.bfloat16

    def __str__(self) -> str:
        if self.bad == self.size:
            return f"all {self.size:,} not finite"
        wrong = f", {self.bad:,} of {self.size:,} not finite" if self.bad else ""
        return f"{self.low:.3g} to {self.high:.3g}{wrong}"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A tensor on the way from images to loss.

    Attributes:
      name: the layer that made it, such as "blocks/2/attention".
      reader: the layer whose backward pass makes its gradient.
      forward, backward: ranges of the tensor and of the loss gradient with respect to it (None: not reached).
    """

    name: str
    reader: str
    forward: Range
    backward: Range | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step taken layer by layer.

    Attributes:
      stages: in the order of the forward pass.
      loss: of the micro-batch.
      gradients: range of each parameter's gradient by path (times the loss scale).
      precision: the policy it was computed in.
      micro_batch: which one, from 0.
    """

    stages: tuple[Stage, ...]
    loss: float
    gradients: dict[str, Range]
    precision: str
    micro_batch: int

    @property
    def culprit(self) -> str | None:
        """What was the first not to be finite, in one sentence with the range of what went in; None if nothing."""
        before = None
        for stage in self.stages:
            if stage.forward.bad:
                seen = f" (its input: {before.forward})" if before else ""
                return f"{stage.name}, forward: {stage.forward}{seen}"
            before = stage
        if not np.isfinite(self.loss):
            return (
                f"loss, forward: {self.loss} of logits {self.stages[-1].forward}: a label outside the head's classes?"
            )
        above = "1"
        for stage in reversed(self.stages):
            if stage.backward is not None and stage.backward.bad:
                return f"{stage.reader}, backward: {stage.backward} (the gradient that came in: {above})"
            for path, found in self.gradients.items():
                if found.bad and path.startswith(f"{stage.name}/"):
                    return f"{stage.name}, backward: gradient of {path} {found} (the gradient that came in: {above})"
            above = str(stage.backward)
        for path, found in self.gradients.items():
            if found.bad:
                return f"{path}, backward: {found}"
            if max(abs(found.low), abs(found.high)) > LARGEST_TO_SQUARE:  # the step looks at squared norms
                return f"{path}, backward: gradient {found}, whose square is beyond float32"
        return None

    def ranges(self) -> list[tuple[str, Range]]:
        """Returns (where, range) of every tensor, its gradient and every parameter's gradient."""
        found = []
        for stage in self.stages:
            found.append((f"{stage.name}, forward", stage.forward))
            if stage.backward is not None:
                found.append((f"{stage.name}, backward", stage.backward))
        return found + [(f"gradient of {path}", of) for path, of in self.gradients.items()]

    def table(self) -> str:
        """Returns the ranges of every stage, and what float16 would lose."""
        rows = [("layer", "dtype", "forward", "backward", "float16 overflow", "float16 flush")]
        for stage in self.stages:
            both = [stage.forward, *([stage.backward] if stage.backward else [])]
            rows.append((
                stage.name, stage.forward.dtype, str(stage.forward), str(stage.backward or "-"),
                f"{max(r.overflow for r in both):.1%}", f"{max(r.flush for r in both):.1%}",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def walk(model: ViT, images: tf.Tensor, labels: tf.Tensor, step: int, precision: str = "") -> list[Step]:
    """Takes training step `step` (from 1) of a compiled model layer by layer, changing nothing.

    Args:
      model: with the weights before that step.
      images, labels: the step's batch, whole.
      step: decides what drop-out drops.
      precision: name for the report.

    Returns:
      One `Step` for each micro-batch up to the first that is not finite.
    """
    micro = model.compiled["accumulation_steps"]
    seed = drop.fold(tf.constant([model.compiled["seed"], 0]), tf.constant(step - 1, tf.int64))
    scale = float(model.optimizer.loss_scale) if isinstance(model.optimizer, LossScale) else 1.0
    share = images.shape[0] // micro
    taken = []
    for i in range(micro):
        part = slice(i * share, (i + 1) * share)
        part_seed = seed if micro == 1 else drop.fold(seed, i + 1)
        taken.append(_walk_part(model, images[part], labels[part], part_seed, scale / images.shape[0], precision, i))
        if taken[-1].culprit:
            break
    return taken


def _walk_part(
    model: ViT, images: Any, labels: Any, seed: tf.Tensor, factor: float, precision: str, number: int
) -> Step:
    variables = [parameter.variable for parameter in model.trained]
    made: list[tuple[str, str, tf.Tensor]] = []
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(variables)
        logits = _forward(model, tf.convert_to_tensor(images), seed if model._random else None, made)
        total = tf.reduce_sum(model.loss.call(labels, logits))
        target = total * factor
    gradients = tape.gradient(target, [tensor for _, _, tensor in made])
    of_parameters = tape.gradient(target, variables, unconnected_gradients="zero")
    stages = tuple(
        Stage(name, reader, Range.of(tensor), None if gradient is None else Range.of(gradient))
        for (name, reader, tensor), gradient in zip(made, gradients)
    )
    ranges = {p.path: Range.of(gradient) for p, gradient in zip(model.trained, of_parameters)}
    return Step(stages, float(total) / images.shape[0], ranges, precision, number)


def _forward(
    model: ViT, images: tf.Tensor, seed: tf.Tensor | None, made: list[tuple[str, str, tf.Tensor]]
) -> tf.Tensor:
    """`ViT.call` in training, noting (layer, reader of its result, tensor) for each layer."""

    def note(name: str, reader: str, x: tf.Tensor) -> tf.Tensor:
        made.append((name, reader, x))
        return x

    x = note("embedding", "positions", model.embedding.forward(model.embedding.params, images))
    x = model.positions.forward(model.positions.params, x)
    if seed is not None:
        x = drop.dropout(x, model.settings["dropout"], drop.fold(seed, 2**20))
    x = note("positions", "blocks/0/attention", x)
    for i in range(model.variant.depth):
        block = model.blocks[0 if model.scan else i]
        params = {path: v[i] if model.scan else v for path, v in block.params.items()}
        found: dict[str, tf.Tensor] = {}
        block_seed = None if seed is None else drop.fold(seed, i)
        x = block.forward(params, x, seed=block_seed, drop_path=model.rates[i], record=found)
        name, after = f"blocks/{i}", f"blocks/{i + 1}/attention" if i + 1 < model.variant.depth else "norm"
        note(f"{name}/attention", name, found["sa"])
        note(f"{name}/attention + residual", f"{name}/mlp", found["+sa"])
        note(f"{name}/mlp", name, found["mlp"])
        note(f"{name}/mlp + residual", after, found["+mlp"])
    x = note("norm", "pooling", model._norm(x, "before"))
    x = note("map" if model.map is not None else "pooling", "head", model.pooled(x))
    if model.pre_logits is not None:
        x = note("pre_logits", "head", model.pre_logits.forward(model.pre_logits.params, x))
    return note("head", "loss", x if model.head is None else model.head.forward(model.head.params, x))
