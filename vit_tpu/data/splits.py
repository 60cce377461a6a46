"""Training and validation: by name where the data has both, else by a hash that is the same on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import re

import numpy as np
import tensorflow as tf

from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest

TRAIN = "train"
HELD_OUT = ("validation", "val", "valid", "test")  # the first that exists


def check_split(split: str, share: float = 0.1) -> None:
    """Raises a UserError unless `split` is "train" or "validation" and `share` lies between 0 and 1."""
    if split not in ("train", "validation"):
        raise UserError(f'unknown split "{split}": use train or validation')
    if not 0 < share < 1:
        raise UserError(f"data.validation_fraction is {share}: use a number between 0 and 1")


def choose(found: set[str], split: str, train: str | None, validation: str | None, where: str) -> tuple[str, bool]:
    """Returns which of the splits `found` in the data to read, and whether to deal it out by hash.

    Args:
      found: the names of the data's splits.
      split: "train" or "validation".
      train, validation: the names asked for; None: "train", and the first of `HELD_OUT`.
      where: file or folder, for messages.

    Raises:
      UserError: a name that was asked for, or the training split, is not there.
    """
    listed = ", ".join(sorted(found))
    for key, name in (("data.split", train), ("data.validation_split", validation)):
        if name is not None and name not in found:
            raise UserError(f'{key}: {where} has no split "{name}"{nearest(name, found)}; it has {listed or "none"}')
    base = train or TRAIN
    if base not in found:
        raise UserError(f'{where} has no split "{base}"{nearest(base, found)}; it has {listed}: set data.split')
    held_out = validation or next((name for name in HELD_OUT if name in found and name != base), None)
    if split == "validation" and held_out is not None:
        return held_out, False
    return base, held_out is None


def by_hash(source: Source, split: str, share: float) -> Source:
    """Returns the records of `source` that a hash of their id deals to `split`; validation gets about `share`.

    Adding records moves no other record, and every machine finds the same split.

    Raises:
      UserError: nothing is left for the split.
    """
    held_out = np.array([fraction(source.name_of(i)) < share for i in range(source.num_examples)], bool)
    chosen = np.flatnonzero(held_out == (split == "validation"))
    name = f"{source.name} ({share:.0%} held out)" if split == "train" else f"{source.name} ({share:.0%} by hash)"
    if not len(chosen):
        raise UserError(
            f"{source.name}: the {split} split is empty: {source.num_examples} examples, of which "
            f"{share:.0%} are held out by hash: add examples or change data.validation_fraction"
        )
    return subset(source, chosen, name)


def subset(source: Source, chosen: np.ndarray, name: str) -> Source:
    """Returns the records `chosen` (indices int64 [m]) of `source`, in that order, with their own ids."""
    chosen = np.asarray(chosen, np.int64)
    with tf.device("CPU:0"):
        table = tf.constant(chosen)
    return dataclasses.replace(
        source,
        name=name,
        num_examples=len(chosen),
        labels=source.labels[chosen],
        get=lambda index: source.get(tf.gather(table, index)),
        name_of=lambda i: source.name_of(int(chosen[i])),
    )


def fraction(name: str) -> float:
    """Returns a number in [0, 1) that depends on `name` alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of_file(name: str, known: tuple[str, ...]) -> str | None:
    """Returns the first of the split names `known` that stands as a word of its own in a file's name."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((split for split in known if split.lower() in words), None)
