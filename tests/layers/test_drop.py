"""Dropout and stochastic depth: rates, scale, seeds, dtypes."""

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.layers import drop

SEED = tf.constant([3, 4])


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.004])
def test_the_rate_is_exact_and_the_kept_are_scaled(dtype, rate):
    y = drop.dropout(tf.ones([400, 500], dtype), rate, SEED)
    assert y.dtype == dtype
    values = tf.cast(y, tf.float32).numpy()
    dropped = (values == 0).mean()
    assert dropped == pytest.approx(rate, abs=5 * np.sqrt(rate * (1 - rate) / 200_000))
    assert set(np.unique(values)) == {0.0, float(tf.cast(tf.cast(1 / (1 - rate), dtype), tf.float32))}


def test_no_seed_or_no_rate_changes_nothing():
    x = tf.ones([3, 4, 5])
    assert drop.dropout(x, 0.5, None) is x
    assert drop.dropout(x, 0.0, SEED) is x
    assert drop.drop_path(x, 0.5, None) is x
    assert drop.drop_path(x, 0.0, SEED) is x
    np.testing.assert_array_equal(drop.drop_path(x, tf.constant(0.0), SEED), x)


def test_stochastic_depth_drops_whole_examples():
    y = drop.drop_path(tf.ones([20_000, 2, 3]), 0.3, SEED).numpy().reshape(20_000, 6)
    assert (y == y[:, :1]).all()
    assert (y[:, 0] == 0).mean() == pytest.approx(0.3, abs=0.02)
    assert y.mean() == pytest.approx(1.0, abs=0.03)


def test_a_rate_below_bfloat16s_resolution_is_still_the_rate():
    # In bfloat16, 1 - 0.001 is 1: nothing would ever be dropped.
    y = drop.drop_path(tf.ones([100_000, 1], tf.bfloat16), 0.001, SEED)
    assert 50 < int(tf.reduce_sum(tf.cast(y == 0, tf.int32))) < 150


def test_a_seed_drops_the_same_units_with_and_without_xla():
    def run(seed):
        inner = drop.fold(seed, 7, tf.constant(2, tf.int64))
        return drop.dropout(tf.ones([64, 65]), 0.3, inner), drop.drop_path(tf.ones([64, 1]), 0.3, seed)

    plain, compiled = (tf.function(run, jit_compile=jit)(SEED) for jit in (False, True))
    eager = run(SEED)
    for a, b, c in zip(plain, compiled, eager):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_folded_seeds_differ():
    seeds = [tuple(drop.fold(tf.constant([s, 0]), i, j).numpy()) for s in range(3) for i in range(5) for j in range(5)]
    assert len(set(seeds)) == 75
