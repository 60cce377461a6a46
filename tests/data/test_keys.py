import numpy as np
import tensorflow as tf

from vit_tpu.data import keys


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's step in Python's own integers."""
    out = []
    for x in value.tolist():
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        out.append(x ^ (x >> 31))
    return np.array(out, np.uint64)


def test_mix_is_splitmix64():
    # 0xE220A8397B1DCDAF is the published first output for state 0.
    assert int(keys.mix(tf.constant(0, tf.uint64))) == 0xE220A8397B1DCDAF
    values = np.array([0, 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    np.testing.assert_array_equal(keys.mix(tf.constant(values)), _mix(values))


def test_a_key_alone_equals_the_key_in_a_batch_and_in_a_graph():
    epochs, indices = tf.constant([0, 0, 3], tf.int64), tf.constant([0, 7, 7], tf.int64)
    together = keys.make_key(5, epochs, indices).numpy()
    alone = [int(keys.make_key(5, tf.constant(e, tf.int64), tf.constant(i, tf.int64)))
             for e, i in ((0, 0), (0, 7), (3, 7))]  # fmt: skip
    graph = tf.function(lambda e, i: keys.make_key(5, e, i))(epochs, indices).numpy()
    assert together.tolist() == alone == graph.tolist()
    assert len(set(alone)) == 3
    assert not set(alone) & set(keys.make_key(6, epochs, indices).numpy().tolist())


def test_uniform_numbers_are_uniform_and_streams_and_neighbours_independent():
    key = keys.make_key(0, 0, tf.range(100_000, dtype=tf.int64))
    first, second = keys.uniform(key, 0).numpy(), keys.uniform(key, 1).numpy()
    assert first.dtype == np.float32 and first.min() >= 0 and first.max() < 1
    for values in (first, second):
        counts = np.histogram(values, 20, (0, 1))[0]
        # chi squared with 19 degrees of freedom: above 45 once in a thousand
        assert ((counts - 5000) ** 2 / 5000).sum() < 45
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.015
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.015


def test_integer_reaches_both_ends():
    key = keys.make_key(1, tf.range(5000, dtype=tf.int64))
    assert set(keys.integer(key, 3, 9).numpy().tolist()) == set(range(9))


def test_op_seed_has_a_pair_for_each_key():
    seeds = keys.op_seed(keys.make_key(1, tf.range(1000, dtype=tf.int64)), 2)
    assert seeds.shape == (1000, 2) and seeds.dtype == tf.int32
    assert len({tuple(pair) for pair in seeds.numpy().tolist()}) == 1000
