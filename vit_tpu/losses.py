"""Losses on logits, in float32, one value per example."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError, nearest


class LogitsLoss(keras.losses.Loss):
    """Base of the losses: takes logits (never probabilities) of any float dtype and computes in float32.

    Labels are integers [B] or rows [B, C] (soft, mixed or multi-label). Called as a Keras loss it returns the mean over
    the examples, weighted by `sample_weight` [B]; `call` gives the value of each example.
    """

    def __init__(self, label_smoothing: float = 0.0, name: str | None = None):
        super().__init__(reduction=keras.losses.Reduction.NONE, name=name)
        if not 0.0 <= label_smoothing < 1.0:
            raise UserError(f"label_smoothing={label_smoothing} is not in [0, 1)")
        self.label_smoothing = label_smoothing

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        values = self.call(y_true, y_pred)
        if sample_weight is None:
            return tf.reduce_mean(values)
        weight = tf.cast(sample_weight, tf.float32)
        return tf.math.divide_no_nan(tf.reduce_sum(values * weight), tf.reduce_sum(weight))

    def get_config(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing, "name": self.name}


@keras.utils.register_keras_serializable(package="vit_tpu")
class SoftmaxCrossEntropy(LogitsLoss):
    """-sum_c y_c log softmax(logits)_c.

    Rows of labels are scaled to sum to 1, so that an image with several labels weighs as one with one.

    Args:
      label_smoothing: s moves the target to (1 - s) y + s / C.
    """

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        logits = tf.cast(y_pred, tf.float32)
        smoothing = self.label_smoothing
        log_sum = tf.reduce_logsumexp(logits, axis=-1)
        if _are_indices(y_true, logits):
            picked = pick(logits, y_true)
        else:
            rows = tf.cast(y_true, tf.float32)
            picked = tf.math.divide_no_nan(tf.reduce_sum(rows * logits, -1), tf.reduce_sum(rows, -1))
        loss = log_sum - picked
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - tf.reduce_mean(logits, -1))
        return loss


@keras.utils.register_keras_serializable(package="vit_tpu")
class SigmoidCrossEntropy(LogitsLoss):
    """Sum over the classes of the binary cross-entropy, as big_vision trains on JFT-3B and ImageNet-21k.

    Args:
      label_smoothing: s moves the target to (1 - s) y + s / 2.
    """

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        logits = tf.cast(y_pred, tf.float32)
        # -[y log p + (1-y) log(1-p)] = softplus(x) - y x: no one-hot rows are needed for integer labels.
        if _are_indices(y_true, logits):
            picked = pick(logits, y_true)
        else:
            picked = tf.reduce_sum(tf.cast(y_true, tf.float32) * logits, -1)
        smoothing = self.label_smoothing
        if smoothing:
            picked = (1.0 - smoothing) * picked + 0.5 * smoothing * tf.reduce_sum(logits, -1)
        return tf.reduce_sum(tf.nn.softplus(logits), -1) - picked


LOSSES: dict[str, type[LogitsLoss]] = {"softmax": SoftmaxCrossEntropy, "sigmoid": SigmoidCrossEntropy}


def get(loss: Any) -> LogitsLoss:
    """Returns the loss itself, or the one that "softmax" or "sigmoid" names.

    Raises:
      UserError: another name, or a loss that is not one of ours (it might expect probabilities).
    """
    if isinstance(loss, LogitsLoss):
        return loss
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]()
    hint = nearest(loss, LOSSES) if isinstance(loss, str) else ""
    raise UserError(
        f"loss {loss!r}{hint} is not one that takes logits: use vit_tpu.losses.SoftmaxCrossEntropy or "
        'SigmoidCrossEntropy, or their names "softmax" and "sigmoid"'
    )


def pick(logits: tf.Tensor, labels: Any) -> tf.Tensor:
    """Returns the logit of each label; a label outside 0..C-1 gives NaN, never a quiet zero."""
    labels = tf.cast(labels, tf.int32)
    classes = logits.shape[-1]
    hit = tf.equal(labels[..., None], tf.range(classes))
    picked = tf.reduce_sum(tf.where(hit, logits, 0.0), -1)
    inside = tf.logical_and(labels >= 0, labels < classes)
    # The square root of -1, not a NaN constant, which TensorFlow's numerics check would stop at in every run.
    return picked + tf.sqrt(tf.where(inside, 0.0, -1.0))


def _are_indices(labels: Any, logits: tf.Tensor) -> bool:
    return tf.convert_to_tensor(labels).shape.rank == logits.shape.rank - 1
