"""Class names: from a file, or collected from labels that are words; and labels as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from vit_tpu.data.labels import cure
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest


def read(path: str) -> tuple[str, ...]:
    """Returns the names in a text file: one a line, in label order.

    Raises:
      UserError: the file is missing, empty, not UTF-8, has a blank line inside or a name twice.
    """
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except tf.errors.OpError:
        raise UserError(f"data.class_names: the file {path} cannot be read: check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"data.class_names: {path} is not text in UTF-8: write one class name a line") from None
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    if not names:
        raise UserError(f"data.class_names: {path} is empty: write one class name a line, in label order")
    where: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise UserError(f"data.class_names: line {number} of {path} is blank: its class would have no name")
        if name in where:
            raise UserError(f'data.class_names: {path} names "{name}" in lines {where[name]} and {number}: once each')
        where[name] = number
    return tuple(names)


def made_up(count: int) -> tuple[str, ...]:
    """Returns "0", "1", ...: the names of classes that have none."""
    return tuple(map(str, range(count)))


def apply(source: Source, names: tuple[str, ...], path: str) -> Source:
    """Returns `source` with the class names of the file `path`.

    Where the data names its classes (folders, TFDS) and the file has the same names, the file's order numbers the
    labels; wholly different names, as many of them, only replace the data's. Numbered classes just get names.

    Raises:
      UserError: another number of classes than the data has (both counts), or only some names in common.
    """
    ours = source.class_names
    if ours == names:
        return source
    if ours == made_up(len(ours)):  # nobody has counted the classes: the labels show how many there are at least
        if len(ours) > len(names):
            labels = source.labels
            low, high = (int(labels.min()), int(labels.max())) if labels.ndim == 1 else (0, len(ours) - 1)
            raise UserError(
                f"data.class_names: {path} names {len(names)} classes, but {source.name} has {len(ours)} "
                f"(labels run from {low} to {high}): {cure(low, high, len(names), 'add the missing names')}"
            )
        if source.labels.ndim == 2 and len(ours) < len(names):
            raise _counts(path, names, source)
        return dataclasses.replace(source, num_classes=len(names), class_names=names)
    if len(ours) != len(names):
        raise _counts(path, names, source)
    common = set(ours) & set(names)
    if not common:
        logging.info("%s renames the classes of %s in order: %s is %s, ...", path, source.name, ours[0], names[0])
        return dataclasses.replace(source, class_names=names)
    if len(common) < len(ours):
        only = [name for name in names if name not in common]
        raise UserError(
            f"data.class_names: {path} and {source.name} have {len(names)} classes each, but only {len(common)} "
            f'names in common: the file\'s "{only[0]}" is unknown to the data{nearest(only[0], ours)}'
        )
    return _renumber(source, names)


def _counts(path: str, names: tuple[str, ...], source: Source) -> UserError:
    return UserError(
        f"data.class_names: {path} names {len(names)} classes, but {source.name} has {source.num_classes} "
        f"({', '.join(source.class_names[:3])}, ...): give one line for each class"
    )


def _renumber(source: Source, names: tuple[str, ...]) -> Source:
    if source.labels.ndim == 2:
        raise UserError(f"{source.name} has label rows, whose order data.class_names cannot change: leave it out")
    table = np.array([names.index(name) for name in source.class_names], np.int32)
    labels = table[source.labels]
    with tf.device("CPU:0"):
        new = tf.constant(table)

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        record = source.get(index)
        return record | {"label": tf.gather(new, record["label"])}

    return dataclasses.replace(source, labels=labels, class_names=names, get=get)


def number(
    values: Sequence[Any],
    *,
    name: str,
    name_of: Callable[[int], str],
    names: tuple[str, ...] | None = None,
    multi_label: bool = False,
    offset: int = 0,
    collect: bool = True,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Turns labels as they stand in the data into numbers.

    Args:
      values: for each record a whole number, a class name, or a list of such.
      name, name_of: for messages: what is read, and the id of record i.
      names: the class names, if they are known.
      multi_label: give float32 rows [n, classes] of 0 and 1 instead of int32 [n].
      offset: added to labels that are numbers.
      collect: labels that are words may make the class names themselves (sorted), when `names` is None.

    Returns:
      The labels and the class names: the given ones, the collected ones, or "0", "1", ...

    Raises:
      UserError: naming the record: no label, several without `multi_label`, an unknown name, not a number or word.
    """
    lists = [list(value) if isinstance(value, (list, tuple)) else [value] for value in values]
    for i, entry in enumerate(lists):
        if len(entry) != 1 and not multi_label:
            if not entry:
                raise UserError(f"{name_of(i)} has no label: give it one, or take it out")
            raise UserError(
                f"{name_of(i)} has {len(entry)} labels ({', '.join(map(str, entry[:3]))}): "
                "set data.multi_label=true and training.loss=sigmoid"
            )
        for value in entry:
            if isinstance(value, (bool, float)) or not isinstance(value, (int, str, np.integer)):
                raise UserError(f"{name_of(i)} has the label {value!r}: use a whole number or a class name")
    flat = [value for entry in lists for value in entry]
    words = any(isinstance(value, str) for value in flat)
    if words and names is None and not all(_is_number(value) for value in flat):
        if not collect:
            example = next(value for value in flat if not _is_number(value))
            raise UserError(
                f'{name}: labels are words such as "{example}": '
                "set data.class_names to a file with one class name a line, in label order"
            )
        names = tuple(sorted({str(value) for value in flat}))
    table = {word: i for i, word in enumerate(names or ())}

    def index(value: Any, i: int) -> int:
        if isinstance(value, str) and value in table:
            return table[value]
        if _is_number(value):
            return int(value) + offset
        raise UserError(
            f'{name_of(i)} has the label "{value}", which is not one of the {len(table)} class names'
            f"{nearest(value, table)}"
        )

    found = [[index(value, i) for value in entry] for i, entry in enumerate(lists)]
    top = max((n for entry in found for n in entry), default=-1)
    low = min((n for entry in found for n in entry), default=0)
    if max(abs(top), abs(low)) >= 2**31:
        raise UserError(f"{name}: label {top if top >= 2**31 else low} does not fit in int32: number classes from 0")
    classes = names if names is not None else made_up(max(top + 1, 1))
    if top >= len(classes) or (multi_label and low < 0):
        i, wrong = next((i, n) for i, entry in enumerate(found) for n in entry if n >= len(classes) or n < 0)
        raise UserError(
            f"{name} has {top + 1} classes (labels run from {low} to {top}, {name_of(i)} has {wrong}), but there are "
            f"{len(classes)} class names: {cure(low, top, len(classes), 'name them all, or correct the labels')}"
        )
    if not multi_label:
        return np.array([entry[0] for entry in found], np.int32), classes
    rows = np.zeros((len(found), len(classes)), np.float32)
    for i, entry in enumerate(found):
        for n in entry:
            rows[i, n] = 1.0
    return rows, classes


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip("-").isdecimal() and value.count("-") <= 1
    return True
