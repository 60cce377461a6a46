"""Attention as a TPU runs it best: the same function as `attention.attend` in another order. See `layers.target`.

Two biases never meet the [N, N] arrays. A key's bias adds the same number to all logits of a query, which the softmax
does not see: it is left out, and its gradient is zero (see `base.unseen`). A value's bias passes through the
probabilities, whose rows sum to 1: it joins the output's bias, behind the output kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from vit_tpu.layers import base, target

_NAMES = ("query", "key", "value")
_Gradient = Callable[[tf.Tensor], list[tf.Tensor]]


def forward(params: base.Params, x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns [B, N, D] in `dtype`: projections, attention and output of `x` [B, N, D] in `dtype`."""
    factor = params["query/kernel"].shape[-1] ** -0.5
    bias = tf.cast(tf.cast(params["query/bias"], tf.float32) * factor, dtype)
    key_bias = tf.convert_to_tensor(params["key/bias"])
    scope = base.gradient_scope()

    def together(kernels):
        # The factor in float32 also for the weights of a scanned block, which come in half precision: so rounded, it
        # would be off by up to 0.4 %, and all logits with it.
        scaled = tf.cast(kernels[0], tf.float32) * factor
        return tf.stack([tf.cast(kernel, dtype) for kernel in (scaled, *kernels[1:])])

    @tf.custom_gradient
    def run(x, bias, key_bias, *kernels):
        qkv = tf.einsum("bnd,cdhk->bcnhk", x, together(kernels))
        none = tf.zeros_like(bias)
        out, gradient = attend(qkv + tf.stack([bias, none, none])[:, None])
        # So that the backward pass rounds them again: the rounded ones of all blocks would be kept.
        kept = target.keep(list(kernels))

        def grad(dy):
            with scope():
                dq, dk, dv = gradient(dy)
                # One product over all three kernels instead of three and two sums.
                dqkv = tf.stack([dq, dk, dv], 1)
                dx = tf.einsum("bcnhk,cdhk->bnd", dqkv, together(kept))
                dws = tf.unstack(tf.einsum("bnd,bcnhk->cdhk", x, dqkv))
                dws[0] = tf.cast(dws[0], tf.float32) * factor
                dws = [tf.cast(dw, kernel.dtype) for dw, kernel in zip(dws, kernels)]
                return dx, tf.reduce_sum(dq, [0, 1]), tf.zeros_like(key_bias), *dws

        return out, grad

    y = run(x, bias, key_bias, *[tf.convert_to_tensor(params[f"{name}/kernel"]) for name in _NAMES])
    kernel = tf.convert_to_tensor(params["out/kernel"])
    y = tf.einsum("bnhk,hkd->bnd", y, tf.cast(kernel, dtype))
    value_bias, wide = tf.cast(params["value/bias"], tf.float32), tf.cast(kernel, tf.float32)
    bias = tf.cast(params["out/bias"], tf.float32) + tf.einsum("hk,hkd->d", value_bias, wide)
    return y + tf.cast(bias, dtype)


def attend(qkv: tf.Tensor) -> tuple[tf.Tensor, _Gradient]:
    """softmax(q k^T) v per head, with the logits and the softmax in float32, and its gradient.

    exp(logit - largest) is rounded to the compute dtype for the product with v, and that rounded copy is the only
    [N, N] array kept for the backward pass; the sum over the keys is divided out of the product, which is [N, h].

    Args:
      qkv: compute dtype, [B, 3, N, H, h]: q, which comes divided by sqrt(h), k and v. In one array they are one product
        of the input, and what reads them takes them from there.

    Returns:
      [B, N, H, h] in the compute dtype, and the function from its cotangent to those of q, k and v [B, N, H, h].
    """
    dtype = qkv.dtype
    with tf.name_scope("softmax"):
        q, k, _ = tf.unstack(qkv, axis=1)
        largest = tf.reduce_max(_wide("bnhk,bmhk->bhnm", q, k), -1, keepdims=True)
        # The logits are computed a second time, inside the operation that needs their exponential: that costs less
        # than writing and reading them in float32.
        again, largest = target.barrier([qkv, largest])
        q, k, v = tf.unstack(again, axis=1)
        wide = tf.exp(_wide("bnhk,bmhk->bhnm", q, k) - largest)
        inverse = 1.0 / tf.reduce_sum(wide, -1)  # [B, H, N]
        e = tf.cast(wide, dtype)
    out = tf.cast(_wide("bhnm,bmhk->bnhk", e, v) * _rows(inverse), dtype)
    kept = target.keep([qkv, e, inverse, out])

    def gradient(dy):
        qkv, e, inverse, out = kept
        q, k, v = tf.unstack(qkv, axis=1)
        wide = tf.cast(dy, tf.float32) * _rows(inverse)
        dy = tf.cast(wide, dtype)
        # sum_m p_nm dp_nm is the row sum of dy * out: no pass over [N, N].
        inner = tf.transpose(tf.reduce_sum(wide * tf.cast(out, tf.float32), -1), [0, 2, 1])[..., None]
        ds = tf.cast(tf.cast(e, tf.float32) * (_wide("bnhk,bmhk->bhnm", dy, v) - inner), dtype)
        dq, dk = tf.einsum("bhnm,bmhk->bnhk", ds, k), tf.einsum("bhnm,bnhk->bmhk", ds, q)
        return [dq, dk, tf.einsum("bhnm,bnhk->bmhk", e, dy)]

    return out, gradient


def _wide(equation: str, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """einsum with a float32 result: half-precision products are exact in float32, so nothing is rounded."""
    return tf.einsum(equation, tf.cast(a, tf.float32), tf.cast(b, tf.float32))


def _rows(per_row: tf.Tensor) -> tf.Tensor:
    """[B, H, N] as a factor of [B, N, H, h]."""
    return tf.transpose(per_row, [0, 2, 1])[..., None]
