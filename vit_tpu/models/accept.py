"""What `compile` and the step accept, and what they make of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras
from absl import logging

from vit_tpu.errors import UserError
from vit_tpu.optim.base import GroupedOptimizer
from vit_tpu.optim.build import build
from vit_tpu.optim.loss_scale import LossScale


def choose_jit(jit_compile: bool | None, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether our own code asks XLA to compile; TPUs compile the step themselves."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return False
    if jit_compile is not None:
        return jit_compile
    return bool(tf.config.list_physical_devices("GPU"))


def accept_optimizer(optimizer: Any, policy: str) -> Any:
    """Returns the optimizer, made from its name or wrapped in the loss scale that float16 needs.

    Raises:
      UserError: it is not one of ours.
    """
    if isinstance(optimizer, str):
        optimizer = build(optimizer, 1e-3)
    if not isinstance(optimizer, GroupedOptimizer | LossScale):
        package = type(optimizer).__module__.split(".")[0]
        whose = " of Keras 3" if package == "keras" else ""
        raise UserError(
            f"optimizer {type(optimizer).__name__}{whose} is not one of vit_tpu.optim (LAMB, Adafactor, "
            "AdamW, SGD, LossScale); "
            "others would count skipped updates and have no head and body decay"
        )
    if policy == "mixed_float16" and not isinstance(optimizer, LossScale):
        optimizer = LossScale(optimizer)  # float16 gradients underflow without it, as Keras itself does
    return optimizer


def unpack(data: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns images, labels and weights [B] of what Keras hands over; weights of 1 where there are none."""
    images, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
    if labels is None:
        raise UserError("a batch without labels: fit and evaluate read (images, labels) or (images, labels, weights)")
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank == 2 and labels.shape[-1] == 1:
        labels = labels[:, 0]  # Keras' own array adapter adds this axis
    if weights is None:
        weights = tf.ones([tf.shape(images)[0]], tf.float32)
        weights.set_shape(images.shape[:1])
    return images, labels, tf.reshape(tf.cast(weights, tf.float32), [-1])


def note_trace(before: tuple[str, ...], images: tf.Tensor, labels: tf.Tensor) -> tuple[str, ...]:
    """Returns the shapes that a training step has been traced for, with these; says so when that compiles it again."""
    now = f"images {images.dtype.name} {images.shape}, labels {labels.dtype.name} {labels.shape}"
    if now in before or tf.executing_eagerly():
        return before
    if before:
        logging.warning("the training step is compiled again, for %s after %s: give every batch one shape and dtype",
                        now, before[-1])  # fmt: skip
    return (*before, now)


def static_batch(images: tf.Tensor) -> int:
    """Returns the batch size, which must be known when the step is traced."""
    batch = images.shape[0]
    if batch is None:
        raise UserError(
            "the batch size is not static: batch the data with drop_remainder=True, or give fit a "
            "batch_size that divides the number of examples"
        )
    return batch


def check_positive(**values: int) -> None:
    """Raises UserError for a value that is not a whole number above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name}={value!r} is not a positive whole number")
