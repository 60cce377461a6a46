"""Image files that a user names: files, folders, globs, lists on standard input."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from typing import TextIO

import numpy as np
import tensorflow as tf

from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest

# What is taken from a folder: also formats that cannot be read, which are then named as such.
ENDINGS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif",
    ".jp2",
)  # fmt: skip
STDIN = "-"


def collect(named: Sequence[str], lines: TextIO | None = None) -> tuple[list[str], list[str]]:
    """Returns the files that names stand for, each in its place, and sentences about what was left out.

    Args:
      named: a file; a folder, of which all images below are taken, sorted; a glob ("**" is any depth); "-" for names
        one a line from `lines`.
      lines: standard input.

    Raises:
      UserError: nothing was named, a glob matches nothing, a folder holds no image, or no named file exists.
    """
    found: list[str] = []
    notes: list[str] = []
    for name in named:
        if name == STDIN:
            given = [line.rstrip("\n") for line in lines or ()]
            found += [line for line in given if line.strip()]
        elif os.path.isdir(name):
            found += _below(name, notes)
        elif glob.has_magic(name) and not os.path.exists(name):
            matches = sorted(glob.glob(name, recursive=True))
            files = [match for match in matches if not os.path.isdir(match)]
            if not files:
                raise UserError(f'no image matches "{name}"' + (": it matches folders only" if matches else ""))
            found += files
        else:
            found.append(name)
    if not found:
        raise UserError("no images: name files, folders or globs, or - with names on standard input")
    if not any(_exists(name) for name in found):
        folder = os.path.dirname(found[0]) or "."
        # Names alone: a long folder in common would make any two paths alike.
        siblings = [name for name in os.listdir(folder) if name[0] != "."] if os.path.isdir(folder) else []
        more = f" (nor any of the other {len(found) - 1})" if len(found) > 1 else ""
        hint = nearest(os.path.basename(found[0]), siblings)
        raise UserError(f"there is no file {shown(found[0]) or 'with an empty name'}{hint}{more}")
    return found, notes


def source_of(files: Sequence[str]) -> Source:
    """Returns the files as a `Source` without labels (all 0)."""
    labels = np.zeros(len(files), np.int32)
    with tf.device("CPU:0"):
        # As the bytes the file system has: not every name is UTF-8. A pipe or a device would block or never end.
        names = tf.constant([os.fsencode(name) for name in files])
        places = tf.constant([b"" if _is_special(name) else os.fsencode(name) for name in files])

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        name = tf.gather(names, index)
        return {"image": tf.io.read_file(tf.gather(places, index)), "label": tf.zeros_like(index, tf.int32), "id": name}

    return Source("files", len(files), 1, ("",), labels, get, None, lambda i: files[i])


class Unreadable(BrokenRecords):
    """A list of unreadable files without a limit and without log lines: the caller names them."""

    def __init__(self) -> None:
        super().__init__(budget=2**62)

    def add(self, record: str, reason: str) -> None:
        if not os.path.isfile(record) and "://" not in record:
            reason = "it is a folder" if os.path.isdir(record) else "there is no such file"
            reason = "it is no regular file" if _is_special(record) else reason
        self.reasons.setdefault(record, reason)


def _below(folder: str, notes: list[str]) -> list[str]:
    images: list[str] = []
    others: list[str] = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = os.path.join(where, name)
            (images if name.lower().endswith(ENDINGS) and not _is_special(path) else others).append(path)
    if not images:
        raise UserError(f"folder {folder} holds no images ({', '.join(ENDINGS[:8])}, ...)")
    if others:
        notes.append(f"{folder}: {len(others)} file(s) without an image's ending left out ({shown(_some(others))})")
    return images


def _some(names: Iterable[str], count: int = 3) -> str:
    names = [os.path.basename(name) for name in names]
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def shown(name: str) -> str:
    """Returns a file's name as text for people: bytes that are not UTF-8 as escapes, which every terminal takes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _exists(name: str) -> bool:
    return "://" in name or os.path.exists(name)


def _is_special(name: str) -> bool:
    """Whether it is a pipe, a socket or a device: something that is there but holds no image."""
    return os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)
