"""SGD against hand-worked numbers and Keras' own, where the two agree."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from optim_helpers import make_gradients, make_variables, run

from vit_tpu.errors import UserError
from vit_tpu.optim import SGD, schedules


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_keras_for_a_constant_rate(nesterov):
    gradients, ours, theirs = make_gradients(5), make_variables(), make_variables()
    got = run(SGD(0.1, momentum=0.9, nesterov=nesterov), ours, gradients)
    want = run(keras.optimizers.SGD(0.1, 0.9, nesterov, jit_compile=False), theirs, gradients)
    for one, two in zip(got, want):
        np.testing.assert_allclose(one, two, rtol=0, atol=2e-6)


def test_the_trace_is_of_gradients_not_of_steps():
    # Rates 1 and 0.5, gradients 1: w = -1, then -1 - 0.5 * (0.9 + 1) = -1.95.
    # Keras' trace of steps would give -1 - (0.9 + 0.5) = -2.4.
    weights = tf.Variable([0.0])
    optimizer = SGD(schedules.Linear(1.0, 2), momentum=0.9)
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones([1]), weights)])
    np.testing.assert_allclose(weights.numpy(), [-1.95], rtol=1e-6)


def test_without_momentum_there_are_no_slots():
    optimizer = SGD(0.1)
    optimizer.build(make_variables())
    assert [v.name for v in optimizer.variables] == ["iteration:0"]


def test_decay_is_decoupled_from_the_trace():
    weights = tf.Variable([1.0])
    optimizer = SGD(0.5, momentum=0.9, weight_decay=0.2)
    for _ in range(2):
        optimizer.apply_gradients([(tf.zeros([1]), weights)])
    np.testing.assert_allclose(weights.numpy(), [0.81], rtol=1e-6)


def test_momentum_outside_its_range_is_named():
    with pytest.raises(UserError, match="momentum is 1.0"):
        SGD(0.1, momentum=1.0)
