"""A trained linear probe: multinomial logistic regression on frozen features."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np

STRENGTHS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
HELD_OUT = 5  # every fifth example chooses the strength
STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Probe:
    """A fitted probe.

    Attributes:
      mean, std: float64 [D], of the training features.
      kernel: float64 [D, C]; bias: float64 [C].
      l2: the strength used.
      converged: whether L-BFGS found the minimum within its steps.
    """

    mean: np.ndarray
    std: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray
    l2: float
    converged: bool

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Returns float64 [n, C] of features [n, D]."""
        return (np.asarray(features, np.float64) - self.mean) / self.std @ self.kernel + self.bias


def fit(
    features: np.ndarray, labels: np.ndarray, classes: int, l2: float | None = None,
    strengths: Sequence[float] = STRENGTHS, steps: int = STEPS,
) -> Probe:  # fmt: skip
    """Returns the probe that minimises sum_i CE_i + l2 / 2 |kernel|^2 on whitened features, by L-BFGS.

    Args:
      features: [n, D].
      labels: int [n].
      classes: C.
      l2: strength; None: the one of `strengths` that is best on every fifth example when fitted on the others.
      strengths: to choose from.
      steps: most steps of L-BFGS.
    """
    x, labels = np.asarray(features, np.float64), np.asarray(labels)
    if l2 is None:
        held = np.zeros(len(x), bool)
        for label in np.unique(labels):  # a fifth of each class, so that none is lost
            held[np.random.default_rng(0).permutation(np.flatnonzero(labels == label))[HELD_OUT - 1 :: HELD_OUT]] = True
        if not held.any():
            return fit(x, labels, classes, 1.0, steps=steps)
        return fit(x, labels, classes, _best(x, labels, classes, held, strengths, steps), steps=steps)
    mean, std = x.mean(0), x.std(0) + 1e-5
    start = np.zeros((x.shape[1] + 1) * classes)
    flat, converged = _minimise((x - mean) / std, np.eye(classes)[labels], l2, start, steps, 1e-12)
    return Probe(mean, std, *_split(flat, classes), l2, converged)


def _best(
    x: np.ndarray, labels: np.ndarray, classes: int, held: np.ndarray, strengths: Sequence[float], steps: int
) -> float:  # fmt: skip
    """The strength with most hits on the held-out examples; of equals the strongest."""
    mean, std = x[~held].mean(0), x[~held].std(0) + 1e-5
    x = (x - mean) / std
    flat, best, most = np.zeros((x.shape[1] + 1) * classes), 0.0, -1
    for strength in sorted(strengths, reverse=True):  # each starts from the minimum of the stronger one, which is near
        flat, _ = _minimise(x[~held], np.eye(classes)[labels[~held]], strength, flat, min(steps, 100), 1e-6)
        kernel, bias = _split(flat, classes)
        hits = int(((x[held] @ kernel + bias).argmax(1) == labels[held]).sum())
        if hits > most:
            best, most = strength, hits
    return best


def _split(flat: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """kernel [D, C] and bias [C] of one vector."""
    return flat[:-classes].reshape(-1, classes), flat[-classes:]


def _minimise(
    x: np.ndarray, y: np.ndarray, l2: float, start: np.ndarray, steps: int, tolerance: float
) -> tuple[np.ndarray, bool]:  # fmt: skip
    from scipy.optimize import minimize  # comes with scikit-learn

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        kernel, bias = _split(flat, y.shape[1])
        logits = x @ kernel + bias
        logits -= logits.max(1, keepdims=True)
        exponent = np.exp(logits)
        total = exponent.sum(1, keepdims=True)
        loss = float((np.log(total)[:, 0] - (y * logits).sum(1)).sum() + 0.5 * l2 * (kernel**2).sum())
        slope = exponent / total - y
        gradient = np.concatenate([(x.T @ slope + l2 * kernel).ravel(), slope.sum(0)])
        return loss / len(x), gradient / len(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = minimize(
            value, start, jac=True, method="L-BFGS-B", options={"maxiter": steps, "ftol": tolerance, "gtol": 1e-6}
        )
    return found.x, bool(found.success)
