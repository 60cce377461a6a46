"""Attention as a TPU runs it best: the same function as `attention.attend` in another order. See `layers.target`."""

from __future__ import annotations

import tensorflow as tf

from vit_tpu.layers import base, target


def forward(params: base.Params, x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns [B, N, D] in `dtype`: projections, attention and output of `x` [B, N, D] in `dtype`."""
    y = tf.einsum("bnhk,hkd->bnd", attend(*project(params, x, dtype)), tf.cast(params["out/kernel"], dtype))
    return y + tf.cast(params["out/bias"], dtype)


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """softmax(q k^T) v per head, with the logits and the softmax in float32; `q` comes divided by sqrt(h).

    exp(logit - largest) is rounded to the dtype of `v` for the product with `v`, and that rounded copy is the only
    [N, N] array kept for the backward pass; the sum over the keys is divided out of the product, which is [N, h].

    Args:
      q, k, v: compute dtype, [B, N, H, h].

    Returns:
      compute dtype, [B, N, H, h].
    """

    scope = base.gradient_scope()

    @tf.custom_gradient
    def run(q, k, v):
        with tf.name_scope("softmax"):
            largest = tf.reduce_max(_wide("bnhk,bmhk->bhnm", q, k), -1, keepdims=True)
            # The logits are computed a second time, inside the operation that needs their exponential: that costs
            # less than writing and reading them in float32.
            again_q, again_k, largest = target.barrier([q, k, largest])
            wide = tf.exp(_wide("bnhk,bmhk->bhnm", again_q, again_k) - largest)
            inverse = 1.0 / tf.reduce_sum(wide, -1)  # [B, H, N]
            e = tf.cast(wide, v.dtype)
        out = tf.cast(_wide("bhnm,bmhk->bnhk", e, v) * _rows(inverse), v.dtype)
        kept = target.keep([q, k, v, e, inverse, out])

        def grad(dy):
            q, k, v, e, inverse, out = kept
            with scope():
                wide = tf.cast(dy, tf.float32) * _rows(inverse)
                dy = tf.cast(wide, q.dtype)
                # sum_m p_nm dp_nm is the row sum of dy * out: no pass over [N, N].
                inner = tf.transpose(tf.reduce_sum(wide * tf.cast(out, tf.float32), -1), [0, 2, 1])[..., None]
                ds = tf.cast(tf.cast(e, tf.float32) * (_wide("bnhk,bmhk->bhnm", dy, v) - inner), q.dtype)
                dq, dk = tf.einsum("bhnm,bmhk->bnhk", ds, k), tf.einsum("bhnm,bnhk->bmhk", ds, q)
                return dq, dk, tf.einsum("bhnm,bnhk->bmhk", e, dy)

        return out, grad

    return run(q, k, v)


def project(params: base.Params, x: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
    """Returns q / sqrt(h), k and v, each [B, N, H, h] in `dtype`."""
    names = ("query", "key", "value")
    kernels, biases = ([tf.convert_to_tensor(params[f"{n}/{part}"]) for n in names] for part in ("kernel", "bias"))
    factor = params["query/kernel"].shape[-1] ** -0.5
    # In float32 also for the weights of a scanned block, which come in half precision: so rounded, the factor itself
    # would be off by up to 0.4 %, and all logits with it.
    kernels[0], biases[0] = (tf.cast(weight, tf.float32) * factor for weight in (kernels[0], biases[0]))
    scope = base.gradient_scope()

    @tf.custom_gradient
    def run(x, *kernels):
        def grad(*dys):
            with scope():
                # One product over all three kernels instead of three and two sums.
                dy = tf.stack(dys)
                dx = tf.einsum("cbnhk,cdhk->bnd", dy, tf.stack(kernels))
                return dx, *tf.unstack(tf.einsum("bnd,cbnhk->cdhk", x, dy))

        return [tf.einsum("bnd,dhk->bnhk", x, kernel) for kernel in kernels], grad

    found = run(x, *[tf.cast(kernel, dtype) for kernel in kernels])
    return [y + tf.cast(bias, dtype) for y, bias in zip(found, biases)]


def _wide(equation: str, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """einsum with a float32 result: half-precision products are exact in float32, so nothing is rounded."""
    return tf.einsum(equation, tf.cast(a, tf.float32), tf.cast(b, tf.float32))


def _rows(per_row: tf.Tensor) -> tf.Tensor:
    """[B, H, N] as a factor of [B, N, H, h]."""
    return tf.transpose(per_row, [0, 2, 1])[..., None]
