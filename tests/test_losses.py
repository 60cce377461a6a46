"""Losses on logits: values against float64 and the reference, dtypes, labels, smoothing."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from vit_tpu import losses
from vit_tpu.errors import UserError

BOTH = [losses.SoftmaxCrossEntropy, losses.SigmoidCrossEntropy]


def exact(kind, logits, rows, smoothing=0.0):
    """The same losses in float64 numpy, from rows of labels."""
    x, y = np.asarray(logits, np.float64), np.asarray(rows, np.float64)
    if kind is losses.SoftmaxCrossEntropy:
        y = y / y.sum(-1, keepdims=True)
        y = (1 - smoothing) * y + smoothing / x.shape[-1]
        top = x.max(-1, keepdims=True)
        log_p = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
        return -(y * log_p).sum(-1)
    y = (1 - smoothing) * y + smoothing / 2
    return (np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))).sum(-1)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_29593_classes_keep_five_digits(kind, smoothing):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (4, 29_593)).astype(np.float32)
    labels = np.array([0, 17, 29_592, 12_345])
    rows = np.zeros_like(logits)
    rows[np.arange(4), labels] = 1
    wanted = exact(kind, logits, rows, smoothing)
    loss = kind(label_smoothing=smoothing)
    for given in (labels, rows):
        np.testing.assert_allclose(loss.call(given, logits), wanted, rtol=1e-5)
    # A bfloat16 sum would be seen.
    low = tf.cast(logits, tf.bfloat16)
    wrong = (
        tf.reduce_sum(tf.nn.softplus(low), -1) if kind is losses.SigmoidCrossEntropy else tf.reduce_logsumexp(low, -1)
    )
    right = exact(kind, logits, rows) + logits[np.arange(4), labels]
    assert (np.abs(tf.cast(wrong, tf.float64) - right) / right).max() > 1e-3


@pytest.mark.parametrize("kind", BOTH)
def test_float16_logits_of_a_hundred_are_finite(kind):
    logits = tf.constant([[100.0, -100.0, 0.0], [-100.0, 100.0, 50.0]], tf.float16)
    rows = np.eye(3, dtype=np.float32)[[1, 0]]
    got = kind().call(np.array([1, 0]), logits)
    assert got.dtype == tf.float32
    np.testing.assert_allclose(got, exact(kind, logits, rows), rtol=1e-6)
    assert float(got[0]) > 100


def test_sigmoid_loss_sums_over_the_classes():
    # log 2 for each of 5 classes at logit 0.
    assert float(losses.SigmoidCrossEntropy()([2], np.zeros((1, 5), np.float32))) == pytest.approx(5 * np.log(2))


@pytest.mark.parametrize("kind", BOTH)
def test_multi_label_and_soft_rows(kind):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 9)).astype(np.float32)
    multi = (rng.random((6, 9)) < 0.3).astype(np.float32)
    multi[:, 0] = 1
    np.testing.assert_allclose(kind().call(multi, logits), exact(kind, logits, multi), rtol=1e-5)
    soft = rng.dirichlet(np.ones(9), 6).astype(np.float32)
    np.testing.assert_allclose(kind().call(soft, logits), exact(kind, logits, soft), rtol=1e-5)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_outside_the_head_is_nan_also_compiled(kind, label):
    run = tf.function(kind().call, jit_compile=True)
    for call in (kind().call, run):
        got = call(tf.constant([label, 2]), tf.zeros([2, 5])).numpy()
        assert np.isnan(got[0]) and np.isfinite(got[1])


@pytest.mark.parametrize("kind", BOTH)
def test_gradient_is_probability_minus_target(kind):
    rng = np.random.default_rng(2)
    logits = tf.constant(rng.normal(size=(3, 4)), tf.float32)
    labels = tf.constant([1, 0, 3])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = tf.reduce_sum(kind().call(labels, logits))
    p = tf.nn.softmax(logits) if kind is losses.SoftmaxCrossEntropy else tf.sigmoid(logits)
    np.testing.assert_allclose(tape.gradient(loss, logits), p - tf.one_hot(labels, 4), atol=1e-6)


@pytest.mark.parametrize("kind", BOTH)
def test_called_with_weights_it_is_the_mean_over_real_examples(kind):
    logits = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    labels = np.array([1, 2, 0])
    each = kind().call(labels, logits).numpy()
    assert float(kind()(labels, logits)) == pytest.approx(each.mean(), rel=1e-6)
    assert float(kind()(labels, logits, [1, 1, 0])) == pytest.approx(each[:2].mean(), rel=1e-6)
    assert float(kind()(labels, logits, [0, 0, 0])) == 0.0


def test_get_by_name_and_config():
    assert type(losses.get("softmax")) is losses.SoftmaxCrossEntropy
    assert type(losses.get("sigmoid")) is losses.SigmoidCrossEntropy
    own = losses.SoftmaxCrossEntropy(0.1)
    assert losses.get(own) is own
    again = keras.losses.deserialize(keras.losses.serialize(own))
    assert type(again) is type(own) and again.label_smoothing == 0.1
    with pytest.raises(UserError, match='did you mean "sigmoid"'):
        losses.get("sigmoyd")
    with pytest.raises(UserError, match="takes logits"):
        losses.get(keras.losses.CategoricalCrossentropy(from_logits=True))
    with pytest.raises(UserError, match=r"label_smoothing=1.0 is not in \[0, 1\)"):
        losses.SigmoidCrossEntropy(1.0)
