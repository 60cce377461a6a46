import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.data import order
from vit_tpu.errors import UserError


@pytest.mark.parametrize("num_examples", [1, 2, 3, 7, 10, 64, 1437, 4097])
def test_each_epoch_is_a_permutation(num_examples):
    for epoch in (0, 1, 2**40):
        found = np.sort(order.epoch_order(num_examples, seed=3, epoch=epoch))
        np.testing.assert_array_equal(found, np.arange(num_examples))


def test_epochs_and_seeds_give_different_orders_and_one_seed_the_same():
    first = order.epoch_order(100, 0, 0)
    np.testing.assert_array_equal(first, order.epoch_order(100, 0, 0))
    for other in (order.epoch_order(100, 0, 1), order.epoch_order(100, 1, 0)):
        assert (first == other).mean() < 0.1


def test_all_permutations_of_three_come_equally_often():
    # Consecutive epochs as raw cipher seeds fail this clearly (chi squared above 40).
    _, index = order.locate(tf.range(1800, dtype=tf.int64), 3, seed=0)
    orders = [tuple(one) for one in index.numpy().reshape(600, 3).tolist()]
    counts = np.array([orders.count(one) for one in set(orders)])
    assert len(counts) == 6
    # chi squared with 5 degrees of freedom: above 20.5 once in a thousand
    assert ((counts - 100) ** 2 / 100).sum() < 20.5


def test_neighbours_are_unrelated():
    found = order.epoch_order(1437, 0, 0)
    steps = np.histogram(np.diff(found) % 1437, 16, (0, 1437))[0]
    expected = 1436 / 16
    # chi squared with 15 degrees of freedom: above 37.7 once in a thousand
    assert ((steps - expected) ** 2 / expected).sum() < 37.7


def test_locate_crosses_the_epoch_border():
    epoch, index = order.locate(tf.range(25, dtype=tf.int64), 10, seed=4)
    np.testing.assert_array_equal(epoch, np.arange(25) // 10)
    expected = np.concatenate([order.epoch_order(10, 4, e) for e in range(3)])[:25]
    np.testing.assert_array_equal(index, expected)
    _, plain = order.locate(tf.range(25, dtype=tf.int64), 10, seed=4, shuffle=False)
    np.testing.assert_array_equal(plain, np.arange(25) % 10)


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_together_read_the_global_batch(num_hosts):
    parts = [order.host_positions(tf.constant(5), 8, num_hosts, h).numpy() for h in range(num_hosts)]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(40, 48))


def test_hosts_and_batches_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="batch_size 10 does not divide among 4 hosts: use 8 or 12"):
        order.host_share(10, 4, 0)
    with pytest.raises(UserError, match="host 2 is not one of 0..1"):
        order.host_share(10, 2, 2)
    with pytest.raises(UserError, match="batch_size is 0"):
        order.host_share(0, 1, 0)


def test_steps_per_epoch_counts_full_batches():
    assert order.steps_per_epoch(101, 2) == 50
    assert order.steps_per_epoch(3, 8) == 1
