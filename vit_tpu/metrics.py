"""Metrics that count every example once, in float32 and int64 under every policy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError, nearest


class _Share(keras.metrics.Metric):
    """Share of examples that are hits; hits and examples are int64 sums, so no run is long enough to stop them."""

    def __init__(self, name: str, **kwargs: Any):
        kwargs["dtype"] = "float32"  # a saved config brings its own
        super().__init__(name=name, **kwargs)
        self.hits = self.add_weight(name="hits", shape=(), dtype=tf.int64, initializer="zeros")
        self.examples = self.add_weight(name="examples", shape=(), dtype=tf.int64, initializer="zeros")

    def hit(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch: labels [B] or rows [B, C], logits [B, C], and 0/1 weights [B] (0 = padding)."""
        hit = self.hit(tf.convert_to_tensor(y_true), tf.cast(y_pred, tf.float32))
        real = tf.ones_like(hit) if sample_weight is None else tf.cast(sample_weight, tf.float32) > 0
        self.hits.assign_add(_count(tf.logical_and(hit, real)))
        self.examples.assign_add(_count(real))

    def result(self) -> tf.Tensor:
        share = tf.math.divide_no_nan(tf.cast(self.hits, tf.float64), tf.cast(self.examples, tf.float64))
        return tf.cast(share, tf.float32)


@keras.utils.register_keras_serializable(package="vit_tpu")
class Accuracy(_Share):
    """Top-1 accuracy. With label rows [B, C] a prediction is right when its label is the row's largest or a positive
    one."""

    def __init__(self, name: str = "accuracy", **kwargs: Any):
        super().__init__(name, **kwargs)

    def hit(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        best = tf.argmax(logits, -1, output_type=tf.int32)
        if labels.shape.rank == best.shape.rank:
            return tf.equal(tf.cast(labels, tf.int32), best)
        value = tf.gather(labels, best, batch_dims=1)
        return tf.logical_and(value > 0, value >= tf.reduce_max(labels, -1))


@keras.utils.register_keras_serializable(package="vit_tpu")
class TopK(_Share):
    """Share of examples whose label is among the k largest logits; ties count against the label."""

    def __init__(self, k: int = 5, name: str = "top5", **kwargs: Any):
        super().__init__(name, **kwargs)
        self.k = k

    def hit(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        if labels.shape.rank == logits.shape.rank:
            labels = tf.argmax(labels, -1)
        own = tf.gather(logits, tf.cast(labels, tf.int32), batch_dims=1)
        rank = tf.reduce_sum(tf.cast(logits >= own[:, None], tf.int32), -1)
        return rank <= self.k

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "k": self.k}


@keras.utils.register_keras_serializable(package="vit_tpu")
class Count(keras.metrics.Metric):
    """Number of real examples seen: an int64 count of weights above 0."""

    def __init__(self, name: str = "count", **kwargs: Any):
        kwargs["dtype"] = "int64"
        super().__init__(name=name, **kwargs)
        self.examples = self.add_weight(name="examples", shape=(), dtype=tf.int64, initializer="zeros")

    def update_state(self, weights: Any) -> None:
        self.examples.assign_add(_count(tf.cast(weights, tf.float32) > 0))

    def result(self) -> tf.Tensor:
        return tf.identity(self.examples)  # on replicas: the sum, which read_value() does not know here


def _count(hits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(hits, tf.int64))


NAMED = {"accuracy": Accuracy, "top5": TopK}


def get(metric: Any) -> keras.metrics.Metric:
    """Returns the metric itself, or the one that "accuracy" or "top5" names."""
    if isinstance(metric, keras.metrics.Metric):
        return metric
    if isinstance(metric, str) and metric in NAMED:
        return NAMED[metric]()
    if type(metric).__module__.split(".")[0] == "keras":
        raise UserError(f"{metric!r} belongs to the package keras (Keras 3); vit_tpu needs its tf_keras counterpart")
    hint = nearest(metric, NAMED) if isinstance(metric, str) else ""
    raise UserError(f"unknown metric {metric!r}{hint}: use {', '.join(NAMED)} or a tf_keras metric object")
