"""Writes weight files tensor by tensor: to a temporary file, to disk, then into place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy

from vit_tpu.errors import UserError, nearest
from vit_tpu.weights.tensors import Tensor

_SUFFIXES = {
    "big_vision": (".npz",),
    "timm": (".safetensors",),
    "huggingface": (".safetensors",),
    "keras": (".safetensors", ".npz"),
}
_CHUNK = 1 << 26  # bytes of a stacked tensor that are in memory at a time


def destination(path: str, format_: str) -> pathlib.Path:
    """Returns the file to write; a path without suffix is a folder.

    Raises:
      UserError: an unknown format, or a suffix that is not the format's.
    """
    if format_ not in _SUFFIXES:
        raise UserError(f'format="{format_}"{nearest(format_, _SUFFIXES)} is not one of {", ".join(_SUFFIXES)}')
    file, suffixes = pathlib.Path(path), _SUFFIXES[format_]
    if file.is_dir() or not file.suffix:
        return file / f"model{suffixes[0]}"
    if file.suffix not in suffixes:
        raise UserError(f"{file}: format {format_} is written as {' or '.join(suffixes)}, not {file.suffix}")
    return file


def arrays(file: pathlib.Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes float32 arrays as .npz or .safetensors, by the suffix.

    Args:
      file: replaced only once the new one is complete.
      tensors: by the name in the file.
      metadata: texts; an .npz carries "vit_tpu" as its zip comment.
    """
    with _replacing(file) as stream:
        if file.suffix == ".npz":
            _npz(stream, tensors, metadata["vit_tpu"])
        else:
            _safetensors(stream, tensors, metadata)


def text(file: pathlib.Path, content: str) -> None:
    """Writes a text file whole or not at all."""
    with _replacing(file) as stream:
        stream.write(content.encode())


def facts(file: pathlib.Path) -> tuple[int, str]:
    """Returns a file's size and sha256."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return file.stat().st_size, digest.hexdigest()


@contextlib.contextmanager
def _replacing(file: pathlib.Path) -> Iterator[Any]:
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
            temporary = stream.name
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror or error})") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _npz(stream: Any, tensors: Mapping[str, Tensor], comment: str) -> None:
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = comment.encode()
        for name, tensor in tensors.items():
            # A fixed date, so that equal weights give equal files.
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            with archive.open(info, "w", force_zip64=True) as member:
                npy.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": tensor.shape})
                _rows(member, tensor)


def _safetensors(stream: Any, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + 4 * tensor.size]}
        at += 4 * tensor.size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    stream.write(struct.pack("<Q", len(encoded)) + encoded)
    for tensor in tensors.values():
        _rows(stream, tensor)


def _rows(stream: Any, tensor: Tensor) -> None:
    """Writes a stack of blocks row by row and everything else at once."""
    rows = tensor.shape[0] if tensor.shape else 1
    step = rows if 4 * tensor.size <= _CHUNK or not tensor.by_rows else max(1, _CHUNK * rows // (4 * tensor.size))
    for start in range(0, rows, step):
        block = tensor.rows(start, min(start + step, rows))
        stream.write(np.ascontiguousarray(block, dtype="<f4").tobytes())
