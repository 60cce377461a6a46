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
            f"{len(wrong)} of {len(labels)} do not fit: "
            f"{cure(low, high, num_classes, f'set num_classes={high + 1} or correct the labels')}"
        )
    if source.num_classes > num_classes:
        raise UserError(
            f"{source.name} has {source.num_classes} classes, but the head has {num_classes}: "
            f"set num_classes={source.num_classes}"
        )


def check_start(source: Source) -> None:
    """Checks that labels whose classes nobody has named or counted start at 0.

    Counting from 1, they would get a head with one output too many, which trains on silently.

    Raises:
      UserError: with the two ways out.
    """
    labels = source.labels
    numbered = source.class_names == tuple(map(str, range(source.num_classes)))
    if labels.ndim != 1 or not numbered or int(labels.min()) < 1:
        return
    low, high = int(labels.min()), int(labels.max())
    raise UserError(
        f"{source.name}: labels run from {low} to {high} and none is 0: set data.label_offset={-low}, or "
        f"model.num_classes={high + 1} if class 0 is to stay without examples"
    )


def tell_unseen(source: Source, num_classes: int | None = None) -> None:
    """Warns of classes, or outputs of a head of `num_classes`, without an example: they only learn to be wrong."""
    labels = source.labels
    used = np.flatnonzero(labels.any(axis=0)) if labels.ndim == 2 else np.unique(labels)
    seen = np.isin(np.arange(source.num_classes), used)
    unseen = [name for name, there in zip(source.class_names, seen) if not there]
    if unseen:
        logging.warning(
            "%s: %d of %d classes have no example: %s%s", source.name, len(unseen), source.num_classes,
            ", ".join(unseen[:5]), ", ..." if len(unseen) > 5 else "",
        )  # fmt: skip
    if num_classes and num_classes > source.num_classes:
        logging.warning(
            "%s has %d classes, the head %d: the other outputs never get an example", source.name, source.num_classes,
            num_classes,
        )  # fmt: skip


def cure(low: int, high: int, num_classes: int, otherwise: str) -> str:
    """Returns what to do about integer labels from `low` to `high` that do not fit `num_classes` classes."""
    if low == 1 and high == num_classes:
        return f"they look numbered 1..{num_classes}, set data.label_offset=-1"
    if low < 0:
        return "remove unlabelled records (negative labels), or correct data.label_offset"
    return otherwise


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
