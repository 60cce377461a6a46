"""What every layer here shares: weights in one flat dict, arithmetic that takes that dict.

`forward(params, x)` is a pure function of its weights, so the same code runs on a layer's own variables (`call`), on
one slice of weights stacked over depth (scan) and on weights handed through a recomputation (remat).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.layers import sharding, target

Params = Mapping[str, Any]  # path -> tf.Variable or tf.Tensor, all float32


@dataclasses.dataclass(frozen=True)
class Spec:
    """One weight to create: its shape, how it starts, what it is (see `optim.decay.Parameter.kind`), and the axis of
    attention heads or hidden units, which a mesh's model axis splits (None: it has no such axis)."""

    shape: tuple[int, ...]
    initializer: Callable[..., tf.Tensor]
    kind: str
    split: int | None = None


def below(params: Params, prefix: str) -> dict[str, Any]:
    """Returns the entries under `prefix/`, with the prefix taken off."""
    start = len(prefix) + 1
    return {path[start:]: value for path, value in params.items() if path.startswith(prefix + "/")}


class ParamLayer(keras.layers.Layer):
    """A Keras layer whose weights are described by specs and used by `forward(params, x, ...)`.

    Variables are float32 under every policy and are read without autocast: arithmetic that follows the policy casts
    explicitly (to `self.compute_dtype`), so a float32 island cannot be rounded on its way in. `params` holds the
    layer's own weights and those of its children, by path.
    """

    built: bool

    def __init__(self, **kwargs: Any):
        super().__init__(autocast=False, **kwargs)
        # Not tracked by Keras, which would list the weights sorted by path and save them twice.
        self.params: dict[str, tf.Variable] = self._no_dependency({})
        self.stacked = False

    def own_specs(self) -> dict[str, Spec]:
        """The weights of this layer itself."""
        return {}

    def children(self) -> dict[str, ParamLayer]:
        """The layers inside this one, by the name that starts their weights' paths."""
        return {}

    def specs(self) -> dict[str, Spec]:
        """All weights, the children's included, by path."""
        specs = self.own_specs()
        for name, child in self.children().items():
            specs.update({f"{name}/{path}": spec for path, spec in child.specs().items()})
        return specs

    forward: Callable[..., tf.Tensor]  # forward(params, x, ...): the arithmetic, pure in its weights

    def create_weights(self, prefix: str = "", stack: int | None = None) -> None:
        """Creates the variables once, named `prefix/path`; with `stack`, each gets a leading axis of that length."""
        if self.built:
            return
        start = f"{prefix}/" if prefix else ""
        self.stacked = stack is not None
        for path, spec in self.own_specs().items():
            shape, initializer = spec.shape, spec.initializer
            if stack is not None:
                shape, initializer = (stack, *shape), _stacked(initializer, stack)
            split = None if spec.split is None else spec.split + int(self.stacked)
            with sharding.placed(sharding.stored_place(shape, split, self.stacked)):
                self.params[path] = self.add_weight(
                    name=start + path, shape=shape, initializer=initializer, dtype="float32",
                    experimental_autocast=False,
                )  # fmt: skip
        for name, child in self.children().items():
            child.create_weights(start + name, stack)
            self.params.update({f"{name}/{path}": variable for path, variable in child.params.items()})
        self.built = True

    def values(self) -> Params:
        """The weights to compute with: the variables themselves, or on a mesh what was read of them."""
        if sharding.current() is None:
            return self.params
        offset = int(self.stacked)
        axes = {path: None if s.split is None else s.split + offset for path, s in self.specs().items()}
        return {path: sharding.read(v, axes[path], self.stacked) for path, v in self.params.items()}

    def gathered(self, params: Params) -> Params:
        """On a mesh the weights of one layer, brought together where they are computed with, in the dtype in which they
        are; else as they are."""
        if sharding.current() is None:
            return params
        dtype = tf.as_dtype(self.compute_dtype)
        found = {path: sharding.gather(params[path], spec.split, dtype) for path, spec in self.own_specs().items()}
        for name, child in self.children().items():
            inner = child.gathered(below(params, name))
            found.update({f"{name}/{path}": value for path, value in inner.items()})
        return found

    def build(self, input_shape: Any = None) -> None:
        self.create_weights()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.forward(self.params, x)


def _stacked(initializer: Callable[..., tf.Tensor], stack: int) -> Callable[..., tf.Tensor]:
    """Draws each slice with the fan-in and fan-out of one layer, not of the stack."""

    def init(shape, dtype=None, **kwargs):
        return tf.stack([initializer(shape[1:], dtype=dtype) for _ in range(stack)])

    return init


class SeedlessInitializer:
    """Calls a Keras initializer class afresh for every weight, so that no two weights start equal."""

    def __init__(self, cls: type, **config: Any):
        self.cls, self.config = cls, config

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        return self.cls(**self.config)(shape, dtype=dtype)


zeros = keras.initializers.Zeros()
ones = keras.initializers.Ones()
xavier_uniform = SeedlessInitializer(keras.initializers.GlorotUniform)
lecun_normal = SeedlessInitializer(keras.initializers.LecunNormal)


def normal(stddev: float) -> SeedlessInitializer:
    return SeedlessInitializer(keras.initializers.RandomNormal, stddev=stddev)


def xavier_of(fan_in: int, fan_out: int) -> SeedlessInitializer:
    """Xavier uniform with the fans of the matrix a multi-axis kernel stands for (Keras would take other ones)."""
    limit = (6.0 / (fan_in + fan_out)) ** 0.5
    return SeedlessInitializer(keras.initializers.RandomUniform, minval=-limit, maxval=limit)


def gradient_scope() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns a context for the operations of a custom gradient, which names them after the layer traced now.

    TensorFlow does that for its own gradients ("gradient_tape/blocks/3/mlp"); those of `tf.custom_gradient` would have
    no name, and neither would their memory and time in plans and profiles.
    """
    name = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()
    if not name:
        return contextlib.nullcontext
    prefix = "" if name.startswith("gradient_tape/") else "gradient_tape/"
    return lambda: tf.name_scope(f"{prefix}{name}/")


def dense(x: tf.Tensor, kernel: Any, bias: Any, dtype: tf.DType) -> tf.Tensor:
    """`x @ kernel + bias` over the last axis, with operands cast to `dtype` (the float32 weights are not changed)."""
    x, kernel, bias = tf.cast(x, dtype), tf.cast(kernel, dtype), tf.cast(bias, dtype)
    if target.on_tpu():
        # 196 tokens do not fill their tiles: merging axes would copy the array.
        axes = "abc"[: len(x.shape) - 1]
        return tf.einsum(f"{axes}x,xy->{axes}y", x, kernel) + bias
    y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), kernel) + bias
    return tf.reshape(y, [*_leading(x), kernel.shape[-1]])


@tf.custom_gradient
def unseen(x: tf.Tensor) -> Any:
    """Returns `x`, for a sum that does not depend on it: its gradient is zero, not what rounding leaves of it.

    Adam and LAMB would scale such a rest up to full steps.
    """
    return tf.identity(x), lambda dy: tf.zeros_like(x)


def _leading(x: tf.Tensor) -> list[Any]:
    """All axes but the last: static where known, one dynamic one (the batch) at most."""
    sizes = x.shape.as_list()[:-1]
    return [-1 if size is None else size for size in sizes]
