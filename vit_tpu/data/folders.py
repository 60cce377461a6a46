"""Images sorted into one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from vit_tpu.data import splits
from vit_tpu.data.source import Source, why
from vit_tpu.errors import UserError


def from_folders(root: str | os.PathLike[str], split: str = "train", *, validation_share: float = 0.1) -> Source:
    """Returns the `split` ("train" or "validation") of a tree of class folders.

    `root/train/<class>/*` with `root/{val,valid,validation,test}/<class>/*` (the first that
    exists), or `root/<class>/*`, or `root/train` alone. Without a validation folder each file is
    dealt to a split by a hash of its class and name: the split is the same on every machine, and
    adding files moves no other file. Classes are numbered in sorted order. All files count as
    images, whatever their ending, except hidden ones (".name"); deeper folders are searched too.

    Args:
      root: local path or gs:// address.
      validation_share: the hashed split's share of validation, between 0 and 1.

    Raises:
      UserError: for a missing or empty folder, no class folders, an empty class, or class names
        that differ between training and validation.
    """
    root = os.fspath(root).rstrip("/") or "/"
    splits.check_split(split, validation_share)
    if not tf.io.gfile.isdir(root):
        raise UserError(f"there is no folder {root}: check the path")
    top = _folders(root)
    train_root = f"{root}/{splits.TRAIN}" if splits.TRAIN in top else None
    held_out = next((f"{root}/{name}" for name in splits.HELD_OUT if name in top), None)
    if held_out and not train_root:
        raise UserError(f"{root} has {os.path.basename(held_out)}/ but no train/: name the training folder train")
    by_folder = split == "validation" and held_out is not None
    base = held_out if by_folder and held_out else train_root or root
    classes = _folders(base)
    if not classes:
        raise UserError(
            f"{base} has no class folders: expected {base}/<class>/<image>"
            if tf.io.gfile.listdir(base)
            else f"{base} is empty: expected {base}/<class>/<image>"
        )
    if train_root and held_out:
        _check_same_classes(train_root, held_out)
    paths, labels = [], []
    for label, name in enumerate(classes):
        files = _files(f"{base}/{name}")
        if not files:
            raise UserError(f"class folder {base}/{name} has no images: add some or remove it")
        if held_out is None:
            in_validation = [splits.fraction(f"{name}/{file}") < validation_share for file in files]
            files = [f for f, v in zip(files, in_validation) if v == (split == "validation")]
            if not files and split == "train":
                raise UserError(
                    f"class folder {base}/{name} leaves no image for training: "
                    "add some or lower data.validation_fraction"
                )
        paths += [f"{name}/{file}" for file in files]
        labels += [label] * len(files)
    if not paths:
        raise UserError(f"{base}: the {split} split is empty: add images or raise data.validation_fraction")
    return _source(base, paths, labels, classes)


def _source(base: str, paths: list[str], labels: list[int], classes: list[str]) -> Source:
    label_array = np.asarray(labels, np.int32)
    with tf.device("CPU:0"):
        path_tensor, label_tensor = tf.constant(paths), tf.constant(label_array)

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        path = tf.gather(path_tensor, index)
        return {
            "image": tf.io.read_file(tf.strings.join([base, "/", path])),
            "label": tf.gather(label_tensor, index),
            "id": path,
        }

    return Source(
        name=base,
        num_examples=len(paths),
        num_classes=len(classes),
        class_names=tuple(classes),
        labels=label_array,
        get=get,
        image_shape=None,
        name_of=lambda i: paths[i],
    )


def _check_same_classes(train: str, held_out: str) -> None:
    ours, theirs = set(_folders(train)), set(_folders(held_out))
    if ours == theirs or not ours or not theirs:
        return  # an empty side has an error of its own
    parts = [
        f"only in {base}: {', '.join(sorted(names)[:5])}{', ...' if len(names) > 5 else ''}"
        for base, names in ((train, ours - theirs), (held_out, theirs - ours))
        if names
    ]
    raise UserError(f"class folders differ ({'; '.join(parts)}): give both the same names")


def _folders(path: str) -> list[str]:
    """Returns the sorted names of the folders in `path`, hidden ones left out."""
    try:
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
    except tf.errors.OpError as error:
        raise _unreadable(path, why(error)) from None
    return sorted(name for name in names if not name.startswith(".") and tf.io.gfile.isdir(f"{path}/{name}"))


def _files(folder: str) -> list[str]:
    """Returns the sorted paths, relative to `folder`, of all files in and below it."""

    def stop(error: Exception) -> None:  # without this, both walks step over what they may not read
        raise _unreadable(getattr(error, "filename", None) or folder, why(error))

    walk = tf.io.gfile.walk if "://" in folder else _walk
    found = []
    for where, _, names in walk(folder, onerror=stop):
        inside = where[len(folder) :].strip("/")
        found += [f"{inside}/{name}" if inside else name
                  for name in names if not name.startswith(".")]  # fmt: skip
    return sorted(found)


def _walk(folder: str, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, without what is neither a file nor a link: reading a pipe would wait for ever.

    The kind of an entry comes with the listing, so nothing more is asked of the disk.
    """
    try:
        with os.scandir(folder) as listing:
            entries = list(listing)
    except OSError as error:
        onerror(error)
        return
    below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    links = [entry.name for entry in entries if entry.is_symlink() and not entry.is_dir()]
    yield folder, below, files + links
    for name in below:
        yield from _walk(os.path.join(folder, name), onerror)


def _unreadable(folder: str, reason: str) -> UserError:
    return UserError(f"folder {folder} cannot be read ({reason}): check its access rights")
