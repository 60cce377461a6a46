"""A folder of compressed files: traces and the compiler's answers, under hashes of what they were made from."""

from __future__ import annotations

import contextlib
import gzip
import os
import pathlib
import shutil


def folder() -> pathlib.Path:
    """Returns the user's own folder, under XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "vit_tpu" / "plan"


def read(path: pathlib.Path) -> bytes | None:
    """Returns a file's contents, None if it is missing or broken."""
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError):
        return None


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole or not at all; a cache that cannot be written costs time, nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(gzip.compress(content, 3))
        partial.replace(path)


def clear() -> None:
    """Removes everything kept in the user's own folder."""
    shutil.rmtree(folder(), ignore_errors=True)
