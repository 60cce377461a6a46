"""The two-layer perceptron of a block."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import base, drop, target

GELUS = ("tanh", "erf")
_ROOT_HALF = math.sqrt(0.5)
_ROOT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _ROOT_2_OVER_PI


def gelu(x: tf.Tensor, kind: str = "tanh") -> tf.Tensor:
    """GELU computed in float32 and returned in the dtype of `x`; only `x` itself is kept for the backward pass.

    Args:
      x: float, any shape.
      kind: "tanh", the approximation that ViT papers and big_vision use, or "erf", the exact one (timm, DINOv2).
    """

    scope = base.gradient_scope()

    @tf.custom_gradient
    def run(x):
        y = _gelu(tf.cast(x, tf.float32), kind)
        (kept,) = target.keep([x])

        def grad(dy):
            with scope():
                return tf.cast(tf.cast(dy, tf.float32) * _gelu_slope(tf.cast(kept, tf.float32), kind), x.dtype)

        return tf.cast(y, x.dtype), grad

    return run(x)


def _gelu(x: tf.Tensor, kind: str) -> tf.Tensor:
    if kind == "tanh":
        return x * (0.5 + 0.5 * tf.tanh(x * (_ROOT_2_OVER_PI + _CUBIC * (x * x))))
    return 0.5 * x * (1.0 + tf.math.erf(x * _ROOT_HALF))


def _gelu_slope(x: tf.Tensor, kind: str) -> tf.Tensor:
    if kind == "tanh":
        square = x * x
        half = 0.5 * tf.tanh(x * (_ROOT_2_OVER_PI + _CUBIC * square))
        # 0.5 (1 + t) + 0.5 x (1 - t^2) u' with half = t / 2, in few operations: they bound the speed on a TPU.
        twice_inner = x * (2.0 * _ROOT_2_OVER_PI + 6.0 * _CUBIC * square)
        return (0.5 + half) + (0.5 + half) * (0.5 - half) * twice_inner
    density = tf.exp(-0.5 * x * x) * (_ROOT_HALF / math.sqrt(math.pi))
    return 0.5 * (1.0 + tf.math.erf(x * _ROOT_HALF)) + x * density


class Mlp(base.ParamLayer):
    """Dense, GELU, dropout, Dense.

    Args:
      width: D of input and output.
      mlp_dim: size of the hidden layer.
      gelu: "tanh" or "erf".
    """

    def __init__(self, width: int, mlp_dim: int, gelu: str = "tanh", **kwargs: Any):
        super().__init__(**kwargs)
        if gelu not in GELUS:
            raise UserError(f'gelu="{gelu}" is not one of {", ".join(GELUS)}')
        self.width, self.mlp_dim, self.gelu = width, mlp_dim, gelu

    def own_specs(self) -> dict[str, base.Spec]:
        tiny = base.normal(1e-6)
        return {
            "dense1/kernel": base.Spec((self.width, self.mlp_dim), base.xavier_uniform, "kernel", split=1),
            "dense1/bias": base.Spec((self.mlp_dim,), tiny, "bias", split=0),
            "dense2/kernel": base.Spec((self.mlp_dim, self.width), base.xavier_uniform, "kernel", split=0),
            "dense2/bias": base.Spec((self.width,), tiny, "bias"),
        }

    def forward(
        self, params: base.Params, x: tf.Tensor, dropout: float = 0.0, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        dtype = tf.as_dtype(self.compute_dtype)
        with tf.name_scope("mlp"):
            hidden = base.dense(x, params["dense1/kernel"], params["dense1/bias"], dtype)
            hidden = drop.dropout(gelu(hidden, self.gelu), dropout, seed)
            return base.dense(hidden, params["dense2/kernel"], params["dense2/bias"], dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "mlp_dim": self.mlp_dim, "gelu": self.gelu}
