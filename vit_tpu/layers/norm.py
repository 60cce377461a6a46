"""Layer normalisation in float32, whatever the policy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from vit_tpu.layers import base, target


def layer_norm(x: tf.Tensor, scale: Any, bias: Any, epsilon: float) -> tf.Tensor:
    """Normalises the last axis of `x` in float32.

    Only `x` as it came and one mean and one factor per row are kept for the backward pass, never a float32 copy of a
    half-precision input.

    Args:
      x: any float dtype, [..., D].
      scale, bias: float32 [D].
      epsilon: added to the variance.

    Returns:
      float32 [..., D].
    """
    scale, bias = tf.convert_to_tensor(scale), tf.convert_to_tensor(bias)
    scope = base.gradient_scope()

    @tf.custom_gradient
    def run(x, scale, bias):
        wide = tf.cast(x, tf.float32)
        mean = tf.reduce_mean(wide, axis=-1, keepdims=True)
        one_pass = target.on_tpu() and x.dtype != tf.float32
        if one_pass:
            # One pass, which XLA fuses into what computes `x`. Its relative error, 1e-7 (mean/std)^2, is below what
            # rounding `x` to half precision has cost already.
            variance = tf.maximum(tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True) - tf.square(mean), 0.0)
        else:
            # Two passes: E[x^2]-E[x]^2 loses every digit of the variance when the mean is large.
            variance = tf.reduce_mean(tf.square(wide - mean), axis=-1, keepdims=True)
        factor = tf.math.rsqrt(variance + epsilon)
        y = (wide - mean) * (factor * scale) + bias
        kept, mean_kept, factor_kept = target.keep([x, mean, factor])

        def grad(dy):
            with scope():
                wide = tf.cast(kept, tf.float32)
                centred = wide - mean_kept
                rows = list(range(len(x.shape) - 1))
                scaled = dy * scale
                inner = tf.reduce_mean(scaled, axis=-1, keepdims=True) * factor_kept
                outer = tf.reduce_mean(scaled * centred, axis=-1, keepdims=True) * factor_kept**3
                if one_pass:  # three numbers for each row instead of four, in the operation that memory bounds
                    dx = scaled * factor_kept - wide * outer + (mean_kept * outer - inner)
                else:
                    dx = scaled * factor_kept - centred * outer - inner
                return tf.cast(dx, x.dtype), tf.reduce_sum(dy * (centred * factor_kept), rows), tf.reduce_sum(dy, rows)

        return y, grad

    return run(x, scale, bias)


class LayerNorm(base.ParamLayer):
    """LayerNorm over the last axis with the field's epsilon; computes and returns float32 under every policy.

    Args:
      width: D, the size of the last axis.
      epsilon: added to the variance (Keras' own default, 1e-3, is another function).
    """

    def __init__(self, width: int, epsilon: float = 1e-6, **kwargs: Any):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.width, self.epsilon = width, epsilon

    def own_specs(self) -> dict[str, base.Spec]:
        return {
            "scale": base.Spec((self.width,), base.ones, "norm"),
            "bias": base.Spec((self.width,), base.zeros, "norm"),
        }

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("norm"):
            return layer_norm(x, params["scale"], params["bias"], self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "epsilon": self.epsilon}
