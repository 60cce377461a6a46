"""The linear probe against scikit-learn's logistic regression and the condition of a minimum."""

import numpy as np
from sklearn.linear_model import LogisticRegression

from vit_tpu.evaluation import probe


def _data(examples=120, width=6, classes=3, noise=1.5):
    rng = np.random.default_rng(0)
    labels = np.arange(examples) % classes
    return rng.normal(size=(classes, width))[labels] + noise * rng.normal(size=(examples, width)), labels


def test_kernel_is_scikit_learns():
    x, labels = _data()
    fitted = probe.fit(x, labels, 3, l2=2.0)
    assert fitted.converged
    whitened = (x - x.mean(0)) / (x.std(0) + 1e-5)
    wanted = LogisticRegression(C=1 / 2.0, tol=1e-10, max_iter=5000).fit(whitened, labels)
    np.testing.assert_allclose(fitted.kernel, wanted.coef_.T, atol=2e-4)
    logits = whitened @ wanted.coef_.T + wanted.intercept_
    ours = fitted.logits(x)
    np.testing.assert_allclose(ours - ours.mean(1, keepdims=True), logits - logits.mean(1, keepdims=True), atol=1e-3)


def test_the_gradient_of_the_stated_loss_vanishes():
    x, labels = _data()
    fitted = probe.fit(x, labels, 3, l2=5.0)
    logits = fitted.logits(x)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - np.eye(3)[labels]
    whitened = (x - fitted.mean) / fitted.std
    assert np.abs(whitened.T @ share + 5.0 * fitted.kernel).max() < 1e-3
    assert np.abs(share.sum(0)).max() < 1e-3  # the bias is not regularised


def test_strength_is_chosen_on_held_out_examples():
    rng = np.random.default_rng(1)
    x, labels = _data(60, 40, noise=4.0)  # more noise than signal: the weakest strength overfits
    fitted = probe.fit(x, labels, 3)
    assert fitted.l2 > min(probe.STRENGTHS)
    assert probe.fit(rng.normal(size=(4, 2)), np.array([0, 0, 1, 1]), 2).l2 == 1.0  # nothing to hold out
