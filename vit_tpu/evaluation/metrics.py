"""Metrics of a classifier in float64 NumPy, so that they are the same on every device and under every policy.

Logits come in batches [B, C]; what stays of an example is a few numbers (`Judged`), so a large set costs little memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_tpu.errors import UserError

BINS = 15  # of the calibration error, as in arXiv 1706.04599


@dataclasses.dataclass(frozen=True)
class Judged:
    """One row an example, in the order of the data.

    Attributes:
      predicted: int64 [n], the class with the largest logit.
      confidence: float64 [n], its probability.
      rank: int64 [n], the place 1.. of the label among the logits (of the best-placed positive label); ties count
        against the label.
      hit: bool [n], whether the prediction is right.
      loss: float64 [n].
    """

    predicted: np.ndarray
    confidence: np.ndarray
    rank: np.ndarray
    hit: np.ndarray
    loss: np.ndarray


def probabilities(logits: np.ndarray, loss: str) -> np.ndarray:
    """Returns float64 [B, C]: softmax over the classes, or each class's own sigmoid, as the model was trained."""
    x = np.asarray(logits, np.float64)
    if loss == "sigmoid":
        return 0.5 * (1.0 + np.tanh(0.5 * x))
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def judge(logits: np.ndarray, labels: np.ndarray, loss: str = "softmax", label_smoothing: float = 0.0) -> Judged:
    """Returns what counts of each example.

    Args:
      logits: [B, C].
      labels: int [B], or rows [B, C] (soft or multi-label). A prediction is right when its class is a positive one and
        no class has more of the label. The loss of a row is -sum_c y_c log p_c, not divided by the sum of the row, as
        big_vision has it.
      loss: "softmax" or "sigmoid".
      label_smoothing: as the model was trained.
    """
    x = np.asarray(logits, np.float64)
    classes, at = x.shape[-1], np.arange(len(x))
    predicted = x.argmax(-1)
    labels = np.asarray(labels)
    if labels.ndim == 1:
        own = x[at, labels]
        hit, picked, mass = predicted == labels, own, np.ones(len(x))
    else:
        y = labels.astype(np.float64)
        most = y.max(-1, initial=0.0)
        hit = (y[at, predicted] > 0) & (y[at, predicted] >= most)
        own = np.where((y > 0) & (y >= most[:, None]), x, -np.inf).max(-1, initial=-np.inf)
        picked, mass = (y * x).sum(-1), y.sum(-1)
    rank = (x >= own[:, None]).sum(-1)
    s = label_smoothing
    if loss == "sigmoid":
        log_sum = np.logaddexp(0.0, x).sum(-1)
        each = log_sum - ((1.0 - s) * picked + 0.5 * s * x.sum(-1))
    else:
        top = x.max(-1)
        log_sum = top + np.log(np.exp(x - top[:, None]).sum(-1))
        each = (1.0 - s) * (mass * log_sum - picked)
        each += s * mass * (log_sum - x.sum(-1) / classes)
    confidence = probabilities(x, loss)[at, predicted]
    return Judged(predicted, confidence, rank, hit, each)


def joined(parts: Sequence[Judged]) -> Judged:
    """Returns the batches as one."""
    names = [field.name for field in dataclasses.fields(Judged)]
    return Judged(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Returns int64 [C, C]: how often label i was called j."""
    counts = np.bincount(labels.astype(np.int64) * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes)


def per_class(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row a class: count, recall (its accuracy), precision, F1 and the class it is most often taken for."""
    classes = len(names)
    count = np.bincount(labels, minlength=classes)
    called = np.bincount(predicted, minlength=classes)
    right = np.bincount(labels[labels == predicted], minlength=classes)
    pairs = np.stack([labels, predicted], 1)[labels != predicted]
    worst: dict[int, tuple[int, int]] = {}
    if len(pairs):
        unique, times = np.unique(pairs, axis=0, return_counts=True)
        for (label, other), n in zip(unique, times):
            if n > worst.get(int(label), (0, 0))[1]:
                worst[int(label)] = (int(other), int(n))
    rows = []
    for i, name in enumerate(names):
        other, times_ = worst.get(i, (None, 0))
        rows.append({
            "class": name, "count": int(count[i]), "recall": _share(right[i], count[i]),
            "precision": _share(right[i], called[i]), "f1": _share(2 * right[i], count[i] + called[i]),
            "taken_for": None if other is None else names[other], "times": times_,
        })  # fmt: skip
    return rows


def reliability(confidence: np.ndarray, hit: np.ndarray, bins: int = BINS) -> list[dict[str, Any]]:
    """Returns a row for each of `bins` equal intervals (low, high] of confidence: count, confidence, accuracy."""
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    rows = []
    for i in range(bins):
        inside = index == i
        n = int(inside.sum())
        rows.append({
            "low": i / bins, "high": (i + 1) / bins, "count": n,
            "confidence": float(confidence[inside].mean()) if n else None,
            "accuracy": float(hit[inside].mean()) if n else None,
        })  # fmt: skip
    return rows


def calibration_error(confidence: np.ndarray, hit: np.ndarray, bins: int = BINS) -> float:
    """Returns the expected calibration error: the mean over the examples of |accuracy - confidence| of their bin."""
    rows = [row for row in reliability(confidence, hit, bins) if row["count"]]
    total = sum(row["count"] for row in rows)
    return sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in rows) / total


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Returns the area under one class's precision-recall steps, sum (R_k - R_k-1) P_k over distinct scores; None
    without a positive example."""
    positives = int(positive.sum())
    if not positives:
        return None
    order = np.argsort(-scores, kind="stable")
    ordered, right = scores[order], np.cumsum(positive[order] > 0)
    last = np.append(ordered[1:] != ordered[:-1], True)  # equal scores are one threshold
    precision, recall = right[last] / (np.flatnonzero(last) + 1.0), right[last] / positives
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def real_accuracy(predicted: np.ndarray, label_sets: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Returns accuracy on ImageNet ReaL labels (arXiv 2006.07159) and how many images count: those with any label.

    Args:
      predicted: int [n].
      label_sets: for each image all labels that are right; an image with none is left out.
    """
    if len(predicted) != len(label_sets):
        raise UserError(f"ReaL labels: {len(label_sets)} label sets for {len(predicted)} images")
    counted = [i for i, labels in enumerate(label_sets) if labels]
    if not counted:
        raise UserError("ReaL labels: no image has any label")
    hits = sum(int(predicted[i]) in label_sets[i] for i in counted)
    return hits / len(counted), len(counted)


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
