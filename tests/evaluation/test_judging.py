"""Metrics of a classifier against stored reference values, scikit-learn and values worked out by hand."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from vit_tpu import losses
from vit_tpu.errors import UserError
from vit_tpu.evaluation import metrics


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_multi_label_rows_give_the_reference_evaluators_sums(refs, loss):
    stored = refs("classification_eval.json")
    logits, labels = np.array(stored["logits"], np.float32), np.array(stored["labels"], np.float32)
    counted = (np.array(stored["mask"]) > 0) & (labels.max(1) > 0)  # padding, and a row without any label
    judged = metrics.judge(logits[counted], labels[counted], loss)
    wanted = stored[f"{loss}_xent"]
    assert counted.sum() == wanted["nseen"] == 9
    assert judged.hit.sum() == wanted["ncorrect"]
    np.testing.assert_allclose(judged.loss.sum(), wanted["loss_sum"], rtol=1e-6)
    np.testing.assert_allclose(judged.loss.mean(), wanted["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "kind"), [("softmax", losses.SoftmaxCrossEntropy), ("sigmoid", losses.SigmoidCrossEntropy)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_one_trained_with(loss, kind, smoothing):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 4, (32, 7)).astype(np.float32), rng.integers(0, 7, 32)
    wanted = kind(smoothing).call(labels.astype(np.int32), logits).numpy()
    np.testing.assert_allclose(metrics.judge(logits, labels, loss, smoothing).loss, wanted, rtol=2e-6)
    rows = np.eye(7)[labels]
    np.testing.assert_allclose(metrics.judge(logits, rows, loss, smoothing).loss, wanted, rtol=2e-6)


def test_large_logits_stay_finite():
    judged = metrics.judge(np.array([[1e4, 0.0, -1e4]]), np.array([2]), "softmax")
    assert judged.loss[0] == 2e4 and judged.confidence[0] == 1.0 and judged.rank[0] == 3


def test_rank_counts_ties_against_the_label():
    judged = metrics.judge(np.array([[2.0, 2.0, 1.0], [3.0, 1.0, 1.0]]), np.array([0, 2]))
    assert judged.rank.tolist() == [2, 3]
    assert judged.hit.tolist() == [True, False]


def test_the_best_placed_label_of_a_row_has_its_rank():
    judged = metrics.judge(np.array([[5.0, 4.0, 3.0, 2.0]]), np.array([[0, 0, 1, 1]]), "sigmoid")
    assert judged.rank.tolist() == [3] and not judged.hit[0]


def test_a_soft_row_is_hit_by_its_largest_share_only():
    rows = np.array([[0.7, 0.3, 0.0]] * 2)
    assert metrics.judge(np.array([[1.0, 0, 0], [0, 1.0, 0]]), rows).hit.tolist() == [True, False]


def test_calibration_error_by_hand():
    # Two bins in use: 0.9, 0.9 (one right: gap 0.4) and 0.3, 0.3 (both right: gap 0.7); half of the examples each.
    confidence, hit = np.array([0.9, 0.9, 0.3, 0.3]), np.array([True, False, True, True])
    np.testing.assert_allclose(metrics.calibration_error(confidence, hit), 0.5 * 0.4 + 0.5 * 0.7)
    # Weighted by examples, not by bins: three of four have no gap.
    confidence, hit = np.array([1.0, 1.0, 1.0, 0.5]), np.array([True, True, True, False])
    np.testing.assert_allclose(metrics.calibration_error(confidence, hit), 0.25 * 0.5)


def test_every_confidence_has_one_bin():
    confidence = np.array([0.0, 1 / 15, 1 / 15 + 1e-9, 0.5, 1.0])
    rows = metrics.reliability(confidence, np.ones(5, bool))
    assert sum(row["count"] for row in rows) == 5
    assert rows[0]["count"] == 2 and rows[1]["count"] == 1 and rows[-1]["count"] == 1


@pytest.mark.parametrize("digits", [8, 1])  # 1: many equal scores
def test_average_precision_is_scikit_learns(digits):
    rng = np.random.default_rng(1)
    for _ in range(20):
        scores, positive = rng.random(40).round(digits), rng.random(40) < 0.3
        if positive.any():
            found = metrics.average_precision(scores, positive)
            np.testing.assert_allclose(found, average_precision_score(positive, scores), rtol=1e-12)


def test_average_precision_without_a_positive_is_none():
    assert metrics.average_precision(np.array([0.1, 0.2]), np.array([False, False])) is None


def test_per_class_by_hand():
    labels, predicted = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 1, 1, 0])
    first, second, third = metrics.per_class(labels, predicted, ("a", "b", "c"))
    assert first == {
        "class": "a",
        "count": 3,
        "recall": 1 / 3,
        "precision": 0.5,
        "f1": 0.4,
        "taken_for": "b",
        "times": 2,
    }
    assert second["recall"] == 0.5 and second["precision"] == 1 / 3 and second["taken_for"] == "a"
    assert third["count"] == 0 and third["recall"] is None and third["precision"] is None and third["taken_for"] is None
    assert metrics.confusion(labels, predicted, 3).tolist() == [[1, 2, 0], [1, 1, 0], [0, 0, 0]]


def test_real_labels_leave_out_images_without_any():
    assert metrics.real_accuracy(np.array([3, 1, 2, 5]), [[3, 4], [], [0], [5]]) == (2 / 3, 3)
    with pytest.raises(UserError, match="3 label sets for 4"):
        metrics.real_accuracy(np.arange(4), [[0]] * 3)
    with pytest.raises(UserError, match="no image has any label"):
        metrics.real_accuracy(np.arange(2), [[], []])
