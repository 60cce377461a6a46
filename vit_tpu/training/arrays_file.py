"""Arrays in .safetensors files, written and read one after the other, hashed on the way.

The format (a JSON header with offsets, then the bytes) is that of huggingface/safetensors; its own writer wants all
arrays of a file in memory a second time.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_tpu.training import storage

CHUNK = 1 << 24  # bytes between two looks at `abandoned`
NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class AbandonedError(Exception):
    """The writer was told to stop; nothing it began counts."""


def write(
    path: str, arrays: Mapping[str, tuple[np.ndarray, str]], metadata: Mapping[str, str], abandoned: Callable[[], bool]
) -> dict[str, Any]:
    """Writes one file; returns {"bytes", "sha256"}.

    Args:
      path: the file.
      arrays: name -> (array, dtype name); bfloat16 comes as its bits in uint16.
      metadata: texts for the header.
      abandoned: asked every few MiB; True raises AbandonedError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (array, dtype) in arrays.items():
        header[name] = {"dtype": NAMES[dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with storage.writing(path) as file:
        for part in _parts(struct.pack("<Q", len(text)) + text, arrays):
            if abandoned():
                raise AbandonedError
            digest.update(part)
            file.write(part)
            written += len(part)
    return {"bytes": written, "sha256": digest.hexdigest()}


def _parts(head: bytes, arrays: Mapping[str, tuple[np.ndarray, str]]) -> Iterator[Any]:
    yield head
    for array, _ in arrays.values():
        if array.nbytes:
            view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(view), CHUNK):
                yield view[start : start + CHUNK]


def read(path: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) in the file's order, one in memory at a time; bfloat16 as its bits in uint16."""
    types = {
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "F64": "<f8",
        "I64": "<i8",
        "I32": "<i4",
        "U8": "u1",
        "BOOL": "?",
    }
    with storage.reading(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            yield name, np.frombuffer(file.read(last - first), types[entry["dtype"]]).reshape(entry["shape"])


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with storage.reading(path) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
