"""A look at every label before the first step.

TensorFlow does not look: under jit an impossible label makes the loss NaN, and in a one-hot row it
becomes all zeros, which trains on silently.
"""

from __future__ import annotations

import numpy as np
from absl import logging

from vit_tpu.data.source import Source
from vit_tpu.errors import UserError


def check_labels(source: Source, num_classes: int) -> None:
    """Checks that every label of `source` fits a head of `num_classes` outputs.

    Integer labels must lie in 0..num_classes-1. Rows must have num_classes finite values in [0, 1].

    Raises:
      UserError: naming the first wrong record, the range found and the likely cure.
    """
    labels = source.labels
    if labels.ndim == 2:
        _check_rows(source, num_classes)
        return
    low, high = int(labels.min()), int(labels.max())
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{source.name_of(first)} has label {labels[first]}, but the head has "
            f"{num_classes} classes (0..{num_classes - 1}); labels run from {low} to {high}, "
            f"{len(wrong)} of {len(labels)} do not fit: {_cure(low, high, num_classes)}"
        )
    if source.num_classes > num_classes:
        raise UserError(
            f"{source.name} has {source.num_classes} classes, but the head has {num_classes}: "
            f"set num_classes={source.num_classes}"
        )
    if source.num_classes < num_classes:
        logging.warning(
            "%s has %d classes, the head %d: the other outputs never get an example.",
            source.name, source.num_classes, num_classes,
        )  # fmt: skip


def _cure(low: int, high: int, num_classes: int) -> str:
    if low == 1 and high == num_classes:
        return f"they look numbered 1..{num_classes}, subtract 1"
    if low < 0:
        return "remove unlabelled records (negative labels)"
    return f"set num_classes={high + 1} or correct the labels"


def _check_rows(source: Source, num_classes: int) -> None:
    rows = source.labels
    if rows.shape[1] != num_classes:
        raise UserError(
            f"{source.name} has label rows of {rows.shape[1]} values, but the head has "
            f"{num_classes} classes: set num_classes={rows.shape[1]}"
        )
    # Written so that NaN counts as wrong.
    wrong = np.flatnonzero(~((rows >= 0) & (rows <= 1)).all(axis=1))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{source.name_of(first)} has label values from {rows[first].min()} to "
            f"{rows[first].max()}, {len(wrong)} of {len(rows)} rows leave [0, 1]: "
            "give each class a share between 0 and 1"
        )
