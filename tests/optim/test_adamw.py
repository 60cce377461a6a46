"""AdamW against a float64 model, and against the variants it must not be."""

import numpy as np
import pytest
import tensorflow as tf
from optim_helpers import make_gradients, make_variables, run

from vit_tpu.optim import AdamW


def adamw_in_float64(start, gradients, lr, decay, epsilon=1e-8):
    weight = start.astype(np.float64)
    m, v = 0 * weight, 0 * weight
    for t, grad in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * grad.astype(np.float64)
        v = 0.999 * v + 0.001 * grad.astype(np.float64) ** 2
        direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + epsilon)
        weight = weight - lr * (direction + decay * weight)
    return weight


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_equals_a_float64_model_for_twenty_steps(mode):
    gradients, variables = make_gradients(20), make_variables()
    starts = [v.numpy() for v in variables]
    got = run(AdamW(0.01, weight_decay=0.3), variables, gradients, mode)
    for index, start in enumerate(starts):
        want = adamw_in_float64(start, [grads[index] for grads in gradients], 0.01, 0.3)
        np.testing.assert_allclose(got[index], want, rtol=0, atol=1e-6)


def test_epsilon_is_added_to_the_corrected_root():
    # g = 1e-8: m_hat / (sqrt(v_hat) + 1e-8) = 1/2 at the first step. Keras' own Adam, which adds
    # epsilon before the correction of v, would step by 1 / (1 + 1 / sqrt(0.001)) = 0.031.
    weights = tf.Variable([0.0])
    AdamW(1.0).apply_gradients([(tf.constant([1e-8]), weights)])
    np.testing.assert_allclose(weights.numpy(), [-0.5], rtol=1e-4)


def test_decay_does_not_pass_through_the_moments():
    weights = tf.Variable([2.0])
    AdamW(0.5, weight_decay=0.1).apply_gradients([(tf.constant([0.0]), weights)])
    np.testing.assert_allclose(weights.numpy(), [1.9], rtol=1e-6)


def test_the_update_applied_is_not_rounded_to_bfloat16():
    gradients = [[np.float32([[1.001]])], [np.float32([[0.7]])]]
    exact, rounded = (
        run(
            AdamW(1.0, momentum_dtype=dtype),
            make_variables({"w": (1, 1)}),
            gradients[:1],
        )[0]
        for dtype in ("float32", "bfloat16")
    )
    assert exact == rounded
