"""MAP pooling: the folded arithmetic equals full key and value projections."""

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu import precision
from vit_tpu.layers.pooling import MapPool


@pytest.fixture
def layer():
    one = MapPool(12, 3, 20)
    one(tf.zeros([1, 2, 12]))
    rng = np.random.default_rng(0)
    for variable in one.params.values():
        variable.assign(rng.normal(0, 0.5, variable.shape))
    return one


def exact(layer, x):
    w = {path: v.numpy().astype(np.float64) for path, v in layer.params.items()}
    q, k, v = (
        np.einsum("bnd,dhk->bhnk", y, w[f"attention/{n}/kernel"]) + w[f"attention/{n}/bias"][:, None]
        for n, y in (("query", np.repeat(w["probe"], len(x), 0)), ("key", x), ("value", x))
    )
    logits = q @ k.transpose(0, 1, 3, 2) / 2
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = np.einsum("bhnk,hkd->bnd", p @ v, w["attention/out/kernel"])[:, 0] + w["attention/out/bias"]
    z = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    z = z * w["norm/scale"] + w["norm/bias"]
    h = z @ w["mlp/dense1/kernel"] + w["mlp/dense1/bias"]
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return y + h @ w["mlp/dense2/kernel"] + w["mlp/dense2/bias"], p[:, :, 0]


def test_it_equals_attention_with_full_projections(layer):
    x = np.random.default_rng(1).normal(size=(2, 5, 12)).astype(np.float32)
    pooled, rows = exact(layer, x)
    np.testing.assert_allclose(layer(x), pooled, rtol=1e-5, atol=1e-5)
    got = layer.probabilities(layer.params, x)
    np.testing.assert_allclose(got, rows, atol=1e-6)
    np.testing.assert_allclose(tf.reduce_sum(got, -1), np.ones((2, 3)), atol=1e-6)


@pytest.mark.parametrize("policy", precision.POLICIES)
def test_it_is_float32_under_every_policy(policy):
    with precision.scope(policy):
        layer = MapPool(12, 3, 20)
    out = layer(tf.cast(np.random.default_rng(1).normal(size=(2, 5, 12)), tf.bfloat16))
    assert out.dtype == tf.float32
    assert layer.mlp.compute_dtype == layer.norm.compute_dtype == "float32"
    x = np.random.default_rng(1).normal(size=(2, 5, 12)).astype(np.float32)
    np.testing.assert_allclose(layer(x), exact(layer, x)[0], rtol=1e-5, atol=1e-5)


def test_197_tokens_sum_to_one(layer):
    x = np.random.default_rng(1).normal(0, 6, size=(2, 197, 12)).astype(np.float32)
    total = tf.reduce_sum(tf.cast(layer.probabilities(layer.params, x), tf.float64), -1)
    assert np.abs(total - 1).max() < 1e-6
