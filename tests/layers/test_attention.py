"""Attention against float64 numpy: values, gradients, and what the backward pass keeps."""

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import attention


def exact(q, k, v):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def inputs(tokens=7, size=8, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=(2, 3, tokens, size)), tf.float32) for _ in range(3)]


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "jit"])
def test_values_equal_float64(jit):
    q, k, v = inputs()
    out = tf.function(attention.attend, jit_compile=jit)(q, k, v)
    np.testing.assert_allclose(out, exact(q, k, v), atol=2e-6)


def test_gradients_equal_those_of_the_plain_formula():
    q, k, v = inputs()
    dy = tf.constant(np.random.default_rng(5).normal(size=v.shape), tf.float32)

    def plain(q, k, v):
        return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 8**-0.5), v)

    results = []
    for function in (plain, attention.attend):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = function(q, k, v)
        results.append(tape.gradient(out, [q, k, v], dy))
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_half_precision_gradients_stay_near_float32(dtype, tolerance):
    wide = inputs(tokens=50)
    half = [tf.cast(x, dtype) for x in wide]
    gradients = []
    for q, k, v in (half, [tf.cast(x, tf.float32) for x in half]):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = tf.reduce_sum(tf.cast(attention.attend(q, k, v), tf.float32) ** 2)
        gradients.append(tape.gradient(out, [q, k, v]))
    for ours, theirs in zip(*gradients):
        assert ours.dtype == dtype
        error = np.abs(tf.cast(ours, tf.float32) - theirs).max() / np.abs(theirs).max()
        assert error < tolerance


def test_logits_beyond_float16_do_not_overflow():
    q, k, v = inputs()
    q, k = tf.cast(q * 300, tf.float16), tf.cast(k * 300, tf.float16)
    assert float(np.abs(exact(q, k, v)).max()) < 5
    rows = attention.probabilities(q, k)
    assert rows.dtype == tf.float32
    assert np.isfinite(attention.attend(q, k, tf.cast(v, tf.float16)).numpy()).all()


def test_the_layer_is_the_projections_and_attend():
    layer = attention.Attention(12, 3)
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    layer(x)
    for variable in layer.params.values():
        variable.assign(np.random.default_rng(variable.shape[0]).normal(size=variable.shape))
    w = {path: v.numpy().astype(np.float64) for path, v in layer.params.items()}
    q, k, v = (
        np.einsum("bnd,dhk->bhnk", x, w[f"{n}/kernel"]) + w[f"{n}/bias"][:, None] for n in ("query", "key", "value")
    )
    wanted = np.einsum("bhnk,hkd->bnd", exact(q, k, v), w["out/kernel"]) + w["out/bias"]
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-5, atol=1e-4)
    rows = layer.weights_of(layer.params, x)
    assert rows.shape == (2, 3, 5, 5)
    np.testing.assert_allclose(tf.reduce_sum(rows, -1), np.ones((2, 3, 5)), atol=1e-6)


def test_heads_that_do_not_divide_name_those_that_do():
    with pytest.raises(UserError, match="width 12 does not divide by num_heads 5; heads that do: 4, 6"):
        attention.Attention(12, 5)
    with pytest.raises(UserError, match="num_heads 0; heads that do: 1, 2"):
        attention.Attention(12, 0)
