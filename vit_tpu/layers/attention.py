"""Multi-head self-attention whose logits and softmax are float32 under every policy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import base, target, tpu_attention


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """softmax(q k^T / sqrt(h)) v per head, with the logits and the softmax in float32.

    The probabilities are rounded to the dtype of `v` only for the product with `v`, and that rounded copy is the only
    [N, N] array kept for the backward pass.

    Args:
      q, k, v: compute dtype, [B, H, N, h].

    Returns:
      compute dtype, [B, H, N, h].
    """
    factor, scope = q.shape[-1] ** -0.5, base.gradient_scope()

    @tf.custom_gradient
    def run(q, k, v):
        p = tf.cast(probabilities(q, k), v.dtype)
        out = tf.matmul(p, v)

        def grad(dy):
            with scope():
                dv = tf.matmul(p, dy, transpose_a=True)
                dp = _wide_matmul(dy, v)
                # sum_m p_nm dp_nm is the row sum of dy * out: no pass over [N, N].
                inner = tf.reduce_sum(tf.cast(dy, tf.float32) * tf.cast(out, tf.float32), -1, keepdims=True)
                ds = tf.cast(tf.cast(p, tf.float32) * (dp - inner) * factor, q.dtype)
                return tf.matmul(ds, k), tf.matmul(ds, q, transpose_a=True), dv

        return out, grad

    return run(q, k, v)


def probabilities(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Returns float32 attention weights [B, H, N, M] of q [B, H, N, h] over k [B, H, M, h]; each row sums to 1."""
    with tf.name_scope("softmax"):
        return tf.nn.softmax(_wide_matmul(q, k) * (q.shape[-1] ** -0.5))


def _wide_matmul(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """a b^T with a float32 result: half-precision products are exact in float32, so nothing is rounded."""
    return tf.matmul(tf.cast(a, tf.float32), tf.cast(b, tf.float32), transpose_b=True)


class Attention(base.ParamLayer):
    """Multi-head self-attention with separate query, key and value kernels, as big_vision and flax lay them out.

    Args:
      width: D; must divide by num_heads.
      num_heads: H; each head has h = D / H channels.

    Raises:
      UserError: width does not divide by num_heads.
    """

    def __init__(self, width: int, num_heads: int, **kwargs: Any):
        super().__init__(**kwargs)
        check_heads(width, num_heads)
        self.width, self.num_heads = width, num_heads

    def own_specs(self) -> dict[str, base.Spec]:
        return attention_specs(self.width, self.num_heads)

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        dtype = tf.as_dtype(self.compute_dtype)
        with tf.name_scope("attention"):
            if target.on_tpu():
                return tpu_attention.forward(params, tf.cast(x, dtype), dtype)
            q, k, v = _project(params, tf.cast(x, dtype), dtype)
            y = tf.transpose(attend(q, k, v), [0, 2, 1, 3])
            y = tf.reshape(y, [-1, x.shape[1], self.width])
            kernel = tf.reshape(params["out/kernel"], [self.width, self.width])
            return base.dense(y, kernel, params["out/bias"], dtype)

    def weights_of(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns the float32 attention weights [B, H, N, N], for pictures and analysis."""
        q, k, _ = _project(params, tf.cast(x, self.compute_dtype), tf.as_dtype(self.compute_dtype))
        return probabilities(q, k)

    def logits_of(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns the float32 logits [B, H, N, N] that go into the softmax, for analysis."""
        q, k, _ = _project(params, tf.cast(x, self.compute_dtype), tf.as_dtype(self.compute_dtype))
        return _wide_matmul(q, k) * (q.shape[-1] ** -0.5)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "num_heads": self.num_heads}


def check_heads(width: int, num_heads: int) -> None:
    if num_heads < 1 or width % num_heads:
        fits = [heads for heads in range(1, width + 1) if width % heads == 0]
        near = sorted(sorted(fits, key=lambda heads: abs(heads - num_heads))[:2])
        raise UserError(
            f"width {width} does not divide by num_heads {num_heads}; heads that do: {', '.join(map(str, near))}"
        )


def attention_specs(width: int, num_heads: int) -> dict[str, base.Spec]:
    head_dim = width // num_heads
    kernel = base.xavier_of(width, width)
    specs = {}
    for name in ("query", "key", "value"):
        specs[f"{name}/kernel"] = base.Spec((width, num_heads, head_dim), kernel, "kernel", split=1)
        specs[f"{name}/bias"] = base.Spec((num_heads, head_dim), base.zeros, "bias", split=0)
    specs["out/kernel"] = base.Spec((num_heads, head_dim, width), kernel, "kernel", split=0)
    specs["out/bias"] = base.Spec((width,), base.zeros, "bias")
    return specs


def _project(params: base.Params, x: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
    """Returns q, k, v [B, H, N, h] from one matrix product over the three kernels side by side."""
    names = ("query", "key", "value")
    width, heads, head_dim = params["query/kernel"].shape
    kernel = tf.concat([tf.reshape(tf.cast(params[f"{n}/kernel"], dtype), [width, -1]) for n in names], 1)
    biases = [tf.convert_to_tensor(params[f"{n}/bias"]) for n in names]
    biases[1] = base.unseen(biases[1])  # the same for all keys: the softmax does not depend on it
    bias = tf.concat([tf.reshape(bias, [-1]) for bias in biases], 0)
    qkv = base.dense(x, kernel, bias, dtype)
    qkv = tf.reshape(qkv, [-1, x.shape[1], 3, heads, head_dim])
    return tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
