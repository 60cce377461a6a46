"""The few-shot evaluation of arXiv 2106.04560: l2-regularised linear regression on frozen features, in closed form.

As in big_vision's evaluator: features are whitened with the training examples' mean and standard deviation, a large
constant is appended for the bias, and targets are -1 and 1. All of it is float64 here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_tpu.errors import UserError

BIAS = 100.0  # the appended constant: so large that its weight is hardly regularised
L2 = 2.0**10
SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
STD_FLOOR = 1e-5


@dataclasses.dataclass(frozen=True)
class Regression:
    """A fitted linear regression.

    Attributes:
      mean, std: float64 [1, D], of the training features.
      weights: float64 [D + 1, C]; the last row is for the appended constant.
    """

    mean: np.ndarray
    std: np.ndarray
    weights: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Returns float64 [n, C] of features [n, D]; the largest is the prediction."""
        return _prepared(features, self.mean, self.std) @ self.weights


def fit(features: np.ndarray, labels: np.ndarray, classes: int, l2: float = L2) -> Regression:
    """Returns the regression that minimises |X w - Y|^2 + l2 |w|^2.

    Args:
      features: [n, D].
      labels: int [n].
      classes: C.
      l2: strength of the regularisation.
    """
    x = np.asarray(features, np.float64)
    mean, std = x.mean(0, keepdims=True), x.std(0, keepdims=True) + STD_FLOOR
    x = _prepared(x, mean, std)
    y = 2.0 * np.eye(classes)[labels] - 1.0
    # (X'X + l2)^-1 X'Y = X'(XX' + l2)^-1 Y: the smaller of the two symmetric matrices is decomposed.
    if x.shape[0] >= x.shape[1]:
        values, vectors = np.linalg.eigh(x.T @ x)
        left, right = vectors, vectors.T @ (x.T @ y)
    else:
        values, vectors = np.linalg.eigh(x @ x.T)
        left, right = x.T @ vectors, vectors.T @ y
    return Regression(mean, std, (left / (values + l2)) @ right)


def choose(labels: np.ndarray, shots: int, seed: int, classes: int, names: Sequence[str] = ()) -> np.ndarray:
    """Returns int64 [classes * shots]: places of `shots` random training examples of each class, class by class.

    Smaller numbers of shots of one seed are among the larger ones.

    Raises:
      UserError: a class has fewer examples.
    """
    random, found = np.random.default_rng(seed), []
    for label in range(classes):
        places = random.permutation(np.flatnonzero(labels == label))
        if len(places) < shots:
            name = names[label] if label < len(names) else label
            raise UserError(
                f"{shots} shots need {shots} training examples of each class, but class {name} has {len(places)}: "
                "ask for fewer shots"
            )
        found.append(places[:shots])
    return np.concatenate(found)


@dataclasses.dataclass(frozen=True, repr=False)
class FewShot:
    """Accuracies by seed and shots; prints as a table.

    Attributes:
      rows: {"shots", "seed", "accuracy"} each.
      test_examples: how many were predicted.
    """

    rows: list[dict[str, Any]]
    test_examples: int

    def mean(self, shots: int) -> float:
        """Returns the mean accuracy over the seeds."""
        return float(np.mean([row["accuracy"] for row in self.rows if row["shots"] == shots]))

    def __repr__(self) -> str:  # what a notebook shows
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        shots = sorted({row["shots"] for row in self.rows})
        return {"mean": {str(n): self.mean(n) for n in shots}, "rows": self.rows, "test_examples": self.test_examples}

    def __str__(self) -> str:
        seeds = sorted({row["seed"] for row in self.rows})
        lines = [f"  {'shots':<7}" + "".join(f"{f'seed {seed}':>9}" for seed in seeds) + f"{'mean':>9}{'+-':>7}"]
        for shots in sorted({row["shots"] for row in self.rows}):
            found = [row["accuracy"] for row in self.rows if row["shots"] == shots]
            line = f"  {shots:<7}" + "".join(f"{100 * value:>8.2f}%" for value in found)
            lines.append(line + f"{100 * np.mean(found):>8.2f}%{100 * np.std(found):>7.2f}")
        return "\n".join(lines)


def few_shot(
    train_features: np.ndarray, train_labels: np.ndarray, test_features: np.ndarray, test_labels: np.ndarray,
    shots: Sequence[int] = SHOTS, seeds: Sequence[int] = SEEDS, l2: float = L2, *, classes: int | None = None,
    names: Sequence[str] = (),
) -> FewShot:  # fmt: skip
    """Returns the accuracy of regressions on a few examples of each class.

    Args:
      train_features, train_labels: [n, D] and int [n], from which examples are chosen.
      test_features, test_labels: [m, D] and int [m].
      shots: examples of each class.
      seeds: of the choice.
      l2: strength of the regularisation.
      classes: C; None: as many as the labels show.
      names: of the classes, for messages.

    Raises:
      UserError: a class has too few examples.
    """
    if classes is None:
        classes = int(max(train_labels.max(), test_labels.max())) + 1
    rows = []
    for n in shots:
        for seed in seeds:
            chosen = choose(train_labels, n, seed, classes, names)
            fitted = fit(train_features[chosen], train_labels[chosen], classes, l2)
            right = fitted.scores(test_features).argmax(1) == test_labels
            rows.append({"shots": int(n), "seed": int(seed), "accuracy": float(right.mean())})
    return FewShot(rows, len(test_labels))


def _prepared(features: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    x = (np.asarray(features, np.float64) - mean) / std
    return np.concatenate([x, np.full((len(x), 1), BIAS)], axis=1)
