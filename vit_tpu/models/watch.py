"""What a training step can say of itself besides loss and gradient: how far it moved the weights, how long it waited
for data, and how large the attention logits are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras
from tensorflow.python.ops import resource_variable_ops

from vit_tpu.layers import base
from vit_tpu.optim.decay import Group


class Updates(tf.Module):
    """The squared lengths of the last applied update and of the weights after it, one number for each parameter.

    Costs two sums over every weight in every step, and no memory but the old weights until the update is done.

    Args:
      paths: of the trained parameters.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(name="updates")
        self.paths = tuple(paths)
        self.squares = tf.Variable(
            tf.zeros([2, len(paths)]), trainable=False, name="squares",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )  # fmt: skip

    def record(self, before: Sequence[tf.Tensor], after: Sequence[tf.Tensor], ok: tf.Tensor) -> None:
        """Keeps the lengths of one step, if its update was applied."""
        moved = [tf.reduce_sum(tf.square(new - old)) for old, new in zip(before, after)]
        length = [tf.reduce_sum(tf.square(new)) for new in after]
        self.squares.assign(tf.where(ok, tf.stack([tf.stack(moved), tf.stack(length)]), self.squares.read_value()))

    def ratios(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns |update| / |weights| of each group that is trained, by its name."""
        moved, length = self.squares.numpy()
        place = {path: i for i, path in enumerate(self.paths)}
        found = {}
        for group in groups:
            members = [place[path] for path in group.paths if path in place]
            if members and length[members].sum() > 0:
                found[group.name] = float((moved[members].sum() / length[members].sum()) ** 0.5)
        return found


class Waiting:
    """Seconds that the executions of a model have waited for their next batch.

    The clock is read inside the execution, before and after each batch is taken, so steps per execution do not matter.
    On a device that works beside the host this is how long the host waited, while the device may still have been busy:
    the device waited that long at most.

    Attributes:
      measures: whether executions are timed; those of plain Python (run_eagerly) are not.
    """

    def __init__(self) -> None:
        self.measures = False
        with tf.init_scope(), tf.device("/cpu:0"):
            # Made directly: a strategy would put a copy on each device, and the sum is the host's.
            self.total = resource_variable_ops.ResourceVariable(0.0, dtype=tf.float64, trainable=False, name="waited")

    def seconds(self) -> float:
        return float(self.total.numpy())

    def timed(self, execution: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function of an iterator that does as `execution`, and adds up the time of taking batches."""
        self.measures = True
        as_graph = tf.autograph.to_graph(execution, recursive=False)

        def run(iterator):
            # Eagerly (tf.config.run_functions_eagerly) the converted loop would still want to trace its body.
            return (execution if tf.executing_eagerly() else as_graph)(_Timed(iterator, self.total))

        return run


class WaitingModel(keras.Model):
    """A Keras model whose executions count how long they wait for data.

    Attributes:
      waiting: the time; starts anew with each `compile`.
    """

    waiting: Waiting
    train_function: Any
    train_tf_function: Any

    def _configure_steps_per_execution(self, steps_per_execution: int) -> None:
        # Keras calls this in `compile`, and reads the number before every execution: from the memory of a GPU that
        # would wait for all that the GPU has to do.
        with tf.device("/cpu:0"):
            super()._configure_steps_per_execution(steps_per_execution)
        self.waiting = Waiting()

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' function of one execution, which also adds up in `waiting` how long it waits for batches."""
        if self.train_function is not None and not force:
            return self.train_function
        made = super().make_train_function(force=True)
        if self.run_eagerly or self._cluster_coordinator:
            return made
        execution = self.waiting.timed(self.train_tf_function.python_function)
        self.train_function = self.train_tf_function = tf.function(execution, reduce_retracing=True, autograph=False)
        return self.train_function


class _Timed:
    """An iterator that adds the time each `next` takes to a variable."""

    def __init__(self, iterator: Any, total: Any):
        self.iterator, self.total = iterator, total

    def __next__(self) -> Any:
        before = tf.timestamp()
        with tf.control_dependencies([before]):
            batch = next(self.iterator) if tf.executing_eagerly() else self.iterator.get_next()
        with tf.control_dependencies([part for part in tf.nest.flatten(batch) if tf.is_tensor(part)]):
            after = tf.timestamp()
        self.total.assign_add(after - before)
        return batch


def max_attention_logits(model: Any, images: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the largest attention logit, q k / sqrt(h) before the softmax, in each layer over a batch of images.

    In the model's own precision, as the training step computes them; without dropout.

    Args:
      model: a ViT.
      images: float [B, H, W, C] in [-1, 1].

    Returns:
      layer, such as "blocks/2/attention" or "map/attention" -> float32 scalar.
    """
    found = {}
    x = model.positions.forward(model.positions.params, model.embedding.forward(model.embedding.params, images))
    for i in range(model.variant.depth):
        block = model.blocks[0 if model.scan else i]
        params = {path: value[i] if model.scan else value for path, value in block.params.items()}
        normal = block.norm1.forward(base.below(params, "norm1"), x)
        logits = block.attention.logits_of(base.below(params, "attention"), normal)
        found[f"blocks/{i}/attention"] = tf.reduce_max(logits)
        x = block.forward(params, x)
    if model.map is not None:
        tokens = model._norm(x, "before")[:, model.positions.num_prefix :]
        found["map/attention"] = tf.reduce_max(model.map.logits_of(model.map.params, tokens))
    return found
