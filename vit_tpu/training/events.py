"""Reads what a log line needs from the model in one go, and writes its numbers as one TensorBoard event.

A log line takes part of the time between two executions, so it has to be cheap: one compiled function and one fetch in
place of a read of each variable, one operation in place of three for each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.models import guard


class Reader:
    """Fetches sums of the metrics, the counters, the learning rate and the loss scale of a compiled model.

    Args:
      model: a StepModel.
    """

    def __init__(self, model: Any):
        self.model = model
        self.names: list[str] = []
        self.gather: Any = None

    def __call__(self, logs: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Returns the numbers by name, "<metric>:sum" and "<metric>:weight" among them, and `logs`' grad_norm."""
        norm = (logs or {}).get("grad_norm")
        norm = tf.constant(0.0) if norm is None else tf.convert_to_tensor(norm, tf.float32)
        if self.gather is None:  # fills in the names; as one program, which TensorFlow does not suspect of retracing
            function = tf.function(self._gather, autograph=False)
            self.gather = function.get_concrete_function(tf.TensorSpec([], tf.float32))
        fetched = self.gather(norm).numpy()
        values = dict(zip(self.names, map(float, fetched)))
        if not logs or "grad_norm" not in logs:
            values.pop("grad_norm")
        return values

    def _gather(self, norm: tf.Tensor) -> tf.Tensor:
        found: dict[str, Any] = {}
        for metric in self.model.metrics:
            if hasattr(metric, "hits"):
                found[f"{metric.name}:sum"], found[f"{metric.name}:weight"] = metric.hits, metric.examples
            elif isinstance(metric, keras.metrics.Mean):
                found[f"{metric.name}:sum"], found[f"{metric.name}:weight"] = metric.total, metric.count
        found |= {name: getattr(self.model.counters, name) for name in guard.COUNTED}
        found["grad_norm"], found["learning_rate"] = norm, self.model.optimizer.learning_rate
        scale = getattr(self.model.optimizer, "loss_scale", None)
        if scale is not None:
            found["loss_scale"] = scale
        self.names = list(found)
        # float64 holds every float32 and every count below 2^53.
        return tf.stack([tf.cast(tf.convert_to_tensor(value), tf.float64) for value in found.values()])


def write_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Writes numbers as TensorBoard scalars of one step, and flushes.

    Args:
      writer: from `tf.summary.create_file_writer`.
      values: by tag.
      step: of all of them.
    """
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    # One message after the other is the message that holds the values of all.
    whole = b"".join(scalar_pb(tag, value).SerializeToString() for tag, value in values.items())
    with writer.as_default(step):
        tf.summary.experimental.write_raw_pb(whole)
    writer.flush()
