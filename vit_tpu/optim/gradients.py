"""Small things done to gradients on their way to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras


def dense_float32(grad: Any) -> tf.Tensor:
    """Returns a dense or sparse gradient as a dense float32 tensor."""
    return tf.cast(tf.convert_to_tensor(grad), tf.float32)


def all_finite(grads: Iterable[Any]) -> tf.Tensor:
    """Returns a scalar bool: every element of every gradient is finite (None is skipped)."""
    flags = [tf.reduce_all(tf.math.is_finite(getattr(grad, "values", grad))) for grad in grads if grad is not None]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def times(grad: Any, factor: tf.Tensor) -> Any:
    """Returns a dense or sparse gradient times a float32 factor, float32."""
    if isinstance(grad, tf.IndexedSlices):
        values = tf.cast(grad.values, tf.float32) * factor
        return tf.IndexedSlices(values, grad.indices, dense_shape=grad.dense_shape)
    return tf.cast(grad, tf.float32) * factor


def apply_if(good: tf.Tensor, optimizer: keras.optimizers.Optimizer, pairs: list) -> None:
    """Applies with an optimizer that knows no `ok`: a branch, taken outside the replicas."""
    variables = [variable for _, variable in pairs]

    def apply(grads: Sequence[tf.Tensor]) -> tf.Tensor:
        optimizer.apply_gradients(list(zip(grads, variables)), skip_gradients_aggregation=True)
        return tf.constant(True)

    grads = [grad for grad, _ in pairs]
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(good, lambda: apply(grads), lambda: tf.constant(False))
        return

    def across(strategy: tf.distribute.Strategy, good: Any, grads: Sequence[tf.Tensor]) -> None:
        first = strategy.experimental_local_results(good)[0]

        def everywhere() -> tf.Tensor:
            strategy.extended.call_for_each_replica(apply, args=(grads,))
            return tf.constant(True)

        tf.cond(first, everywhere, lambda: tf.constant(False))

    tf.distribute.get_replica_context().merge_call(across, args=(good, grads))
