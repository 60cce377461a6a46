"""Which files of a folder or pattern hold which split: for TFRecord and ArrayRecord shards."""

from __future__ import annotations

import re

import tensorflow as tf
from absl import logging

from vit_tpu.data import splits
from vit_tpu.data.source import why
from vit_tpu.errors import UserError

_OF = re.compile(r"-(\d{5,})-of-(\d{5,})")
_LOOKS_LIKE = re.compile(r"-\d{5,}-of-\d{5,}|record|\.tfrec", re.IGNORECASE)
_COMPRESSED = (".gz", ".zlib", ".zip")


def find(
    path: str, split: str, train: str | None = None, validation: str | None = None
) -> tuple[tuple[str, ...], bool]:
    """Returns the shards of a split, sorted, and whether they still have to be dealt out by hash.

    Args:
      path: a folder, a file, or a glob pattern, local or gs://; "{split}" in it stands for the split's name.
      split: "train" or "validation".
      train, validation: the splits' names in file names; see `splits.choose`.

    Raises:
      UserError: nothing there, no shards, no such split, or some of "-of-N" shards missing from a folder.
    """
    if "{split}" in path:
        names = {name for name in {train or splits.TRAIN, validation or "", *splits.HELD_OUT} - {""}
                 if _glob(path.replace("{split}", name))}  # fmt: skip
        if not names:
            raise UserError(f"no file matches {path.replace('{split}', train or splits.TRAIN)}: check data.path")
        name, hashed = splits.choose(names, split, train, validation, path)
        return _whole(path.replace("{split}", name), _glob(path.replace("{split}", name))), hashed
    folder = tf.io.gfile.isdir(path)
    files = _in_folder(path.rstrip("/") or "/") if folder else _glob(path)
    if not files:
        raise UserError(
            f"{path} has no shards (files such as x-00000-of-00010 or x.tfrecord): check data.path, or give a pattern"
            if folder
            else f"no file matches {path}: check data.path"
        )
    known = tuple(dict.fromkeys(name for name in (train, validation, splits.TRAIN, *splits.HELD_OUT) if name))
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(splits.split_of_file(file.rpartition("/")[2], known) or "", []).append(file)
    if set(groups) == {""} and train is None and validation is None:
        return _complete(files, path, folder), True
    unnamed = groups.pop("", [])
    if unnamed:
        logging.warning("%s: %d files such as %s belong to no split.", path, len(unnamed), unnamed[0])
    name, hashed = splits.choose(set(groups), split, train, validation, path)
    return _complete(groups[name], path, folder), hashed


def label_of(paths: tuple[str, ...]) -> str:
    """Returns a short name for messages."""
    if len(paths) == 1:
        return paths[0]
    return _OF.sub(r"-*-of-\2", paths[0]) + f" ({len(paths)} shards)"


def _glob(pattern: str) -> list[str]:
    try:
        found = tf.io.gfile.glob(pattern)
    except tf.errors.OpError as error:
        raise UserError(f"{pattern} cannot be listed ({why(error)}): check data.path and access rights") from None
    return sorted(path for path in found if not tf.io.gfile.isdir(path))


def _in_folder(folder: str) -> list[str]:
    try:
        names = tf.io.gfile.listdir(folder)
    except tf.errors.OpError as error:
        raise UserError(f"{folder} cannot be read ({why(error)}): check data.path and access rights") from None
    names = [name for name in names if _LOOKS_LIKE.search(name) and not name.startswith(".")]
    return sorted(f"{folder}/{name}" for name in names if not name.endswith(("/", ".json")))


def _whole(pattern: str, files: list[str]) -> tuple[str, ...]:
    if len(files) == 1 and tf.io.gfile.isdir(files[0]):
        files = _in_folder(files[0])
    return _complete(files, pattern, True)


def _complete(files: list[str], where: str, strict: bool) -> tuple[str, ...]:
    """Checks that none of the shards "x-00003-of-00010" is missing."""
    compressed = [file for file in files if file.endswith(_COMPRESSED)]
    if compressed:
        raise UserError(f"{compressed[0]} {COMPRESSED}")
    families: dict[tuple[str, int], dict[int, str]] = {}
    for file in files:
        match = _OF.search(file)
        if match:
            family = file[: match.start()], int(match.group(2))
            other = families.setdefault(family, {}).setdefault(int(match.group(1)), file)
            if other != file:
                raise UserError(f"{other} and {file} are the same shard: remove one, or its records would count twice")
    for (stem, count), numbers in families.items():
        missing = sorted(set(range(count)) - set(numbers))
        if missing and strict:
            raise UserError(
                f"{where} has {count - len(missing)} of {count} shards {stem.rpartition('/')[2]}-*: "
                f"-{missing[0]:05d}-of-{count:05d} is missing: copy the rest, or give a pattern of those to read"
            )
        if missing:
            logging.warning("%s: %d of %d shards.", where, count - len(missing), count)
    return tuple(files)


COMPRESSED = (
    "is compressed: its records cannot be reached by position, which order and resume need: "
    "write it again uncompressed (docs/data.md, TFRecord, has the lines for it; images are compressed already)"
)
