"""Files on a local disk and in stores such as gs://, by one set of functions.

A local file or folder is written beside its place, flushed to disk and renamed. Object stores have no rename: there
the parts of a whole are written in place and the one that says it is complete comes last.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

FAILURES = (OSError, tf.errors.OpError)  # what reading and writing raise


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is on a file system with atomic rename, that is, without a scheme such as gs://."""
    return "://" not in os.fspath(path)


def join(*parts: str | os.PathLike[str]) -> str:
    return posixpath.join(*(os.fspath(part) for part in parts))


def exists(path: str) -> bool:
    return os.path.lexists(path) if is_local(path) else tf.io.gfile.exists(path)


def is_folder(path: str) -> bool:
    return os.path.isdir(path) if is_local(path) else tf.io.gfile.isdir(path)


def names(folder: str) -> list[str]:
    """Returns the names in a folder, sorted; none if it is not there."""
    if not is_folder(folder):
        return []
    found = os.listdir(folder) if is_local(folder) else tf.io.gfile.listdir(folder)
    return sorted(name.rstrip("/") for name in found)


def make_folder(path: str) -> None:
    if is_local(path):
        os.makedirs(path, exist_ok=True)
    else:
        tf.io.gfile.makedirs(path)


def remove(path: str) -> None:
    """Removes a file or a folder with all it holds; one that is not there is no error."""
    if is_local(path):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return
    with contextlib.suppress(tf.errors.OpError):
        if tf.io.gfile.isdir(path):
            tf.io.gfile.rmtree(path)
        elif tf.io.gfile.exists(path):
            tf.io.gfile.remove(path)


def size(path: str) -> int:
    return os.path.getsize(path) if is_local(path) else tf.io.gfile.stat(path).length


@contextlib.contextmanager
def reading(path: str) -> Iterator[Any]:
    """Opens a file for `read(n)` of bytes."""
    with open(path, "rb") if is_local(path) else tf.io.gfile.GFile(path, "rb") as file:
        yield file


@contextlib.contextmanager
def writing(path: str) -> Iterator[Any]:
    """Opens a file for `write` of bytes; at the end of the block it is on the disk, not only in memory."""
    if not is_local(path):
        if path.startswith("ram://"):
            remove(path)  # TensorFlow's store in memory would add to what is there
        with tf.io.gfile.GFile(path, "wb") as file:
            yield _Bytes(file)
        return
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def read_text(path: str) -> str:
    with reading(path) as file:
        return file.read().decode()


def write_text(path: str, text: str) -> None:
    """Writes a file that readers find whole, as it was or as it is now."""
    if not is_local(path):
        with writing(path) as file:
            file.write(text.encode())
        return
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with writing(temporary) as file:
            file.write(text.encode())
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def append_text(path: str, text: str) -> None:
    with open(path, "a") if is_local(path) else tf.io.gfile.GFile(path, "a") as file:
        file.write(text)


def begin(target: str) -> str:
    """Returns where to write what shall become the folder `target`: beside it, or, without rename, in its place.

    Without rename the caller has removed what makes an older `target` complete, and writes that part last.
    """
    place = target
    if is_local(target):
        folder, name = os.path.split(target)
        place = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    remove(place)
    make_folder(place)
    return place


def commit(place: str, target: str) -> None:
    """Makes what `begin` gave the folder `target`; an older one of the name is replaced."""
    if place == target:
        return
    _flush_folder(place)
    aside = f"{place}.old"
    if os.path.lexists(target):
        os.rename(target, aside)
    os.rename(place, target)
    _flush_folder(os.path.dirname(target))
    remove(aside)


def rename(path: str, target: str) -> None:
    """Renames a local file or folder."""
    os.rename(path, target)


def leftovers(folder: str) -> list[str]:
    """Returns the names that a killed writer left in a local folder."""
    return [name for name in names(folder) if name.startswith(".") and name.endswith((".tmp", ".old"))]


def reason(error: BaseException) -> str:
    """Returns what went wrong in a few words: "No space left on device"."""
    text = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    return " ".join(str(text).split())[:200]


class _Bytes:
    """A store's file, which takes nothing but `bytes`."""

    def __init__(self, file: Any):
        self.file = file

    def write(self, part: Any) -> None:
        self.file.write(bytes(part))


def _flush_folder(path: str) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
