"""GELU in both forms with its slope, and the perceptron."""

import math

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import mlp

X = np.linspace(-6, 6, 241)


def exact(kind):
    if kind == "erf":
        return np.array([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in X])
    return 0.5 * X * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)))


@pytest.mark.parametrize("kind", mlp.GELUS)
def test_gelu_equals_float64(kind):
    np.testing.assert_allclose(mlp.gelu(tf.constant(X, tf.float32), kind), exact(kind), atol=1e-6)


def test_the_two_forms_differ():
    assert 1e-4 < np.abs(exact("erf") - exact("tanh")).max() < 1e-3


@pytest.mark.parametrize("kind", mlp.GELUS)
def test_the_slope_is_the_derivative(kind):
    x = tf.constant(X, tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = mlp.gelu(x, kind)
        plain = tf.nn.gelu(x, approximate=kind == "tanh")
    np.testing.assert_allclose(tape.gradient(y, x), tape.gradient(plain, x), atol=4e-6)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_half_precision_is_rounded_once(dtype):
    x = tf.cast(X, dtype)
    wanted = tf.cast(mlp.gelu(tf.cast(x, tf.float32)), dtype)
    np.testing.assert_array_equal(mlp.gelu(x), wanted)


def test_the_layer_is_dense_gelu_dense_and_drops_the_hidden_units():
    layer = mlp.Mlp(4, 6)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    got = layer(x)
    w = {path: v.numpy() for path, v in layer.params.items()}
    hidden = tf.nn.gelu(x @ w["dense1/kernel"] + w["dense1/bias"], approximate=True)
    np.testing.assert_allclose(got, hidden @ w["dense2/kernel"] + w["dense2/bias"], atol=1e-5)
    dropped = layer.forward(layer.params, tf.constant(x), dropout=0.5, seed=tf.constant([1, 2]))
    assert np.abs(dropped - got).max() > 1e-2


def test_unknown_gelu():
    with pytest.raises(UserError, match='gelu="relu" is not one of tanh, erf'):
        mlp.Mlp(4, 6, "relu")
