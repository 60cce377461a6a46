"""Metrics: exact counts, padding, label rows, and no rounding under any policy."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from vit_tpu import metrics, precision
from vit_tpu.errors import UserError


@pytest.mark.parametrize("policy", precision.POLICIES)
def test_six_hundred_updates_count_six_hundred(policy):
    with precision.scope(policy):
        metric = metrics.Accuracy()
    assert {v.dtype for v in metric.variables} == {tf.int64}
    for _ in range(600):
        metric.update_state([1], tf.constant([[0.0, 1.0]], tf.bfloat16))
    assert int(metric.examples) == int(metric.hits) == 600
    assert float(metric.result()) == 1.0


def test_counts_beyond_float32_are_exact():
    metric = metrics.Accuracy()
    metric.examples.assign(2**24)
    metric.hits.assign(2**24)
    for _ in range(3):
        metric.update_state([0], [[0.0, 1.0]])
    assert int(metric.examples) == 2**24 + 3
    assert int(metric.hits) == 2**24


def test_accuracy_and_top_k_equal_numpy_with_padding():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 10)).astype(np.float32)
    labels = rng.integers(0, 10, 50)
    weights = (np.arange(50) < 43).astype(np.float32)
    order = np.argsort(-logits, -1)
    for metric, k in ((metrics.Accuracy(), 1), (metrics.TopK(5), 5), (metrics.TopK(3), 3)):
        for start in range(0, 50, 10):
            part = slice(start, start + 10)
            metric.update_state(labels[part], logits[part], weights[part])
        hits = (order[:, :k] == labels[:, None]).any(-1)[:43]
        assert float(metric.result()) == np.float32(hits.sum() / 43)
        metric.reset_state()
        assert float(metric.result()) == 0.0


def test_label_rows():
    logits = np.float32([[0, 1, 2], [2, 1, 0], [0, 3, 1]])
    for metric in (metrics.Accuracy(), metrics.TopK(1)):
        metric.update_state(np.float32([[0, 0.2, 0.8], [0.4, 0.6, 0], [0, 1, 0]]), logits)
        assert float(metric.result()) == pytest.approx(2 / 3)
    several = metrics.Accuracy()
    several.update_state(np.float32([[0, 1, 1], [0, 1, 1], [0, 0, 0]]), logits)
    assert float(several.result()) == pytest.approx(1 / 3)


def test_ties_and_nan_are_no_hits():
    metric = metrics.TopK(2)
    metric.update_state([2], np.zeros((1, 4), np.float32))
    assert float(metric.result()) == 0.0


def test_near_logits_are_told_apart():
    metric = metrics.Accuracy()
    metric.update_state([1], np.float32([[10.0, 10.02]]))
    assert float(metric.result()) == 1.0


def test_get_by_name_and_config():
    assert type(metrics.get("accuracy")) is metrics.Accuracy
    assert metrics.get("top5").k == 5
    again = metrics.TopK.from_config(metrics.TopK(3, name="top3").get_config())
    assert (again.k, again.name) == (3, "top3")
    own = keras.metrics.Mean()
    assert metrics.get(own) is own
    with pytest.raises(UserError, match='unknown metric .topp5. .did you mean "top5"'):
        metrics.get("topp5")
