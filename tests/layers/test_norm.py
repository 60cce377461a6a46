"""LayerNorm: float32 statistics, epsilon, extremes, gradients."""

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu import precision
from vit_tpu.layers import norm


def layer(policy="float32", width=8, **options):
    with precision.scope(policy):
        return norm.LayerNorm(width, **options)


def exact(x, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


@pytest.mark.parametrize("policy", precision.POLICIES)
def test_values_beyond_float16_are_normalised(policy):
    x = np.float32([[72_000, -72_000, 1, 2, 3, 4, 5, 6]])
    got = layer(policy)(x)
    assert got.dtype == tf.float32
    np.testing.assert_allclose(got, exact(x), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 3.0, 70_000.0])
def test_a_row_without_variance_is_zero(value):
    np.testing.assert_array_equal(layer()(np.full((2, 8), value, np.float32)), np.zeros((2, 8)))


def test_epsilon_is_1e_6_and_settable():
    x = np.float32([[1e-3, -1e-3] * 4])  # variance 1e-6: a default of 1e-3 would give 0.03
    np.testing.assert_allclose(layer()(x), np.float32([[1, -1] * 4]) / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(layer(epsilon=1e-3)(x), exact(x, 1e-3), rtol=1e-5)


def test_a_large_mean_costs_no_variance():
    x = np.float32(4096 + np.arange(8)[None])  # E[x^2] - E[x]^2 in float32 would be off by percents
    np.testing.assert_allclose(layer()(x), exact(x), atol=1e-5)


def test_gradients_equal_those_of_autodiff():
    rng = np.random.default_rng(0)
    x, dy = (tf.constant(rng.normal(size=(3, 5, 8)), tf.float32) for _ in range(2))
    scale, bias = (tf.constant(rng.normal(size=8), tf.float32) for _ in range(2))

    def plain(x, scale, bias):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-6) * scale + bias

    results = []
    for function in (plain, lambda *a: norm.layer_norm(*a, 1e-6)):
        with tf.GradientTape() as tape:
            tape.watch([x, scale, bias])
            y = function(x, scale, bias)
        results.append([y, *tape.gradient(y, [x, scale, bias], dy)])
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_a_half_precision_input_gets_a_gradient_of_its_dtype(dtype):
    x = tf.cast(np.random.default_rng(0).normal(size=(3, 8)), dtype)
    one = layer()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = one(x)
        loss = tf.reduce_sum(y**3)
    assert y.dtype == tf.float32
    gradient = tape.gradient(loss, [x, *one.trainable_variables])
    assert [g.dtype for g in gradient] == [dtype, tf.float32, tf.float32]
    np.testing.assert_allclose(y, exact(tf.cast(x, tf.float32)), atol=1e-5)


def test_config_round_trip():
    again = norm.LayerNorm.from_config(layer(epsilon=1e-5).get_config())
    assert (again.width, again.epsilon) == (8, 1e-5)
