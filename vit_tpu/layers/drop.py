"""Dropout and stochastic depth, drawn in float32 from explicit seeds."""

from __future__ import annotations

import tensorflow as tf

# A seed must drop the same units with and without XLA and on every device, so that a step can be
# replayed elsewhere: the algorithm is named, and its bits are compared as they come, because
# TensorFlow's and XLA's conversions of the same bits to floats in [0, 1) differ.
ALGORITHM = "philox"


def fold(seed: tf.Tensor, *numbers: int | tf.Tensor) -> tf.Tensor:
    """Returns a new stateless seed (int32 [2]) from `seed` and the numbers that tell this use from every other."""
    for number in numbers:
        seed = tf.random.experimental.stateless_fold_in(seed, number, alg=ALGORITHM)
    return seed


def dropout(x: tf.Tensor, rate: float, seed: tf.Tensor | None) -> tf.Tensor:
    """Zeroes each element with probability `rate` and scales the others by 1 / (1 - rate).

    Args:
      x: float, any shape.
      rate: in [0, 1).
      seed: int32 [2], or None outside training: then `x` is returned as it is.
    """
    if rate == 0.0 or seed is None:
        return x
    return _keep(x, tf.shape(x), rate, seed)


def drop_path(x: tf.Tensor, rate: float | tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
    """Stochastic depth (Huang et al., arXiv 1603.09382): drops the whole branch of an example with probability `rate`.

    The draw is float32 under every policy: in bfloat16 a rate below 1 % would not be the rate that is drawn.

    Args:
      x: [B, N, D], the output of a residual branch.
      rate: in [0, 1), a number or a float32 scalar tensor.
      seed: int32 [2], or None outside training.
    """
    if seed is None or (isinstance(rate, float) and rate == 0.0):
        return x
    return _keep(x, [tf.shape(x)[0]] + [1] * (len(x.shape) - 1), rate, seed)


def _keep(x: tf.Tensor, shape, rate: float | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    bits = tf.random.stateless_uniform(shape, seed, minval=None, maxval=None, dtype=tf.int32, alg=ALGORITHM)
    keep = tf.cast(bits, tf.float32) >= (rate - 0.5) * 2.0**32
    scale = tf.where(keep, 1.0 / (1.0 - rate), 0.0)
    return x * tf.cast(scale, x.dtype)
