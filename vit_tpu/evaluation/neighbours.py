"""Nearest neighbours by cosine: what features are worth without training anything."""

from __future__ import annotations

import numpy as np

from vit_tpu.errors import UserError

_BLOCK = 1024  # test examples compared at a time


def predict(
    train_features: np.ndarray, train_labels: np.ndarray, test_features: np.ndarray, *, k: int = 10,
    temperature: float | None = None, classes: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns int64 [m]: the class with most votes among the k training examples of largest cosine.

    Args:
      train_features, train_labels: [n, D] and int [n].
      test_features: [m, D].
      k: neighbours.
      temperature: a vote weighs exp(cosine / temperature), as with DINO (0.07 there); None: all weigh the same.
      classes: C; None: as many as the labels show.

    A draw goes to the class with the smaller number.

    Raises:
      UserError: fewer than k training examples.
    """
    if not 1 <= k <= len(train_labels):
        raise UserError(f"{k} neighbours of {len(train_labels)} training examples: ask for 1 to {len(train_labels)}")
    classes = int(train_labels.max()) + 1 if classes is None else classes
    train, test = _unit(train_features), _unit(test_features)
    found = []
    for start in range(0, len(test), _BLOCK):
        cosine = test[start : start + _BLOCK] @ train.T
        nearest = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
        votes = np.zeros((len(cosine), classes))
        weight = np.ones((len(cosine), k))
        if temperature is not None:
            near = np.take_along_axis(cosine, nearest, 1).astype(np.float64)
            weight = np.exp((near - near.max(1, keepdims=True)) / temperature)
        np.add.at(votes, (np.arange(len(cosine))[:, None], train_labels[nearest]), weight)
        found.append(votes.argmax(1))
    return np.concatenate(found)


def _unit(features: np.ndarray) -> np.ndarray:
    x = np.asarray(features, np.float32)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
