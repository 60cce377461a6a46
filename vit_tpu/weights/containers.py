"""Readers of the two containers, .npz and .safetensors: rows of an array on request, nothing else in memory."""

from __future__ import annotations

import contextlib
import json
import pathlib
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib import format as npy

from vit_tpu.errors import UserError
from vit_tpu.weights.tensors import Tensor, dtype_name, widen

PICKLED = "holds a pickle, which can run code and is never loaded"
HOW = (
    "convert it where PyTorch is installed: "
    'safetensors.torch.save_file(torch.load("x.pth", weights_only=True), "x.safetensors")'
)
_TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
Opened = tuple[dict[str, Tensor], dict[str, str]]  # tensors by name, metadata


@contextlib.contextmanager
def explained(file: pathlib.Path) -> Iterator[None]:
    """Turns what the readers raise on broken files into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib, struct, tokenize, safetensors and numpy raise a dozen types here
        detail = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{file} is broken or cut short ({detail}); get the file again") from None


def open_npz(file: pathlib.Path, stack: contextlib.ExitStack) -> Opened:
    with explained(file):
        archive = stack.enter_context(zipfile.ZipFile(file))
        names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            raise UserError(f"{file} {PICKLED} (a PyTorch file); {HOW}")
        foreign = [name for name in names if not name.endswith(".npy")]
        if foreign:
            raise UserError(f"{file} is a zip but no .npz: it holds {foreign[0]}")
        tensors = {name[:-4]: _Member(archive, name, file).tensor() for name in names}
    _check_end(file, archive.comment)
    comment = archive.comment.decode("utf-8", "replace")
    return tensors, ({"vit_tpu": comment} if comment.startswith("{") else {})


def _check_end(file: pathlib.Path, comment: bytes) -> None:
    """zipfile takes a file whose comment is cut off as whole."""
    with open(file, "rb") as stream:
        stream.seek(-22 - len(comment), 2)
        end = stream.read(22)
    if end[:4] != b"PK\x05\x06" or int.from_bytes(end[20:], "little") != len(comment):
        raise UserError(f"{file} is broken or cut short (its end is missing); get the file again")


class _Member:
    """One array of an .npz, read forwards: rows asked for in order come from one open stream."""

    def __init__(self, archive: zipfile.ZipFile, name: str, file: pathlib.Path):
        self.archive, self.name, self.file = archive, name, file
        self.stream: Any = None
        self.at = 0
        with archive.open(name) as stream:
            self.shape, self.fortran, self.dtype = _header(stream)
        self.kind = dtype_name(self.dtype, f"{file}: {name[:-4]}")

    def tensor(self) -> Tensor:
        return Tensor(self.name[:-4], self.shape, self.kind, self.rows)

    def rows(self, start: int, stop: int) -> np.ndarray:
        with explained(self.file):
            shape = self.shape or (1,)
            if self.fortran and len(shape) > 1:
                flat = self._take(0, shape[0], shape)
                return flat.reshape(shape[::-1]).T[start:stop]
            return self._take(start, stop, shape).reshape(stop - start, *shape[1:])

    def _take(self, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        row = int(np.prod(shape[1:], dtype=np.int64)) * self.dtype.itemsize
        if self.stream is None or self.at != start:
            self.close()
            self.stream = self.archive.open(self.name)
            _header(self.stream)
            self.stream.seek(start * row, 1)
        data = self.stream.read((stop - start) * row)
        if len(data) != (stop - start) * row:
            raise ValueError(f"{self.name[:-4]} ends early")
        self.at = stop
        if stop == shape[0]:
            self.close()
        return widen(np.frombuffer(data, self.dtype), self.kind)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return read(stream)


def open_safetensors(file: pathlib.Path, stack: contextlib.ExitStack) -> Opened:
    """Checks the file with the safetensors library and reads rows at the offsets its header gives."""
    import safetensors

    with explained(file):
        with safetensors.safe_open(file, framework="np") as checked:
            checked.keys()  # opening checks sizes and offsets
        stream = stack.enter_context(open(file, "rb"))  # noqa: SIM115 (the stack closes it)
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    metadata = header.pop("__metadata__", {})
    return {name: _stored(stream, file, name, entry, 8 + length) for name, entry in header.items()}, metadata


def _stored(stream: Any, file: pathlib.Path, name: str, entry: dict[str, Any], base: int) -> Tensor:
    shape, kind = tuple(entry["shape"]), _TYPES.get(entry["dtype"], entry["dtype"])
    begin = base + entry["data_offsets"][0]

    def rows(start: int, stop: int) -> np.ndarray:
        dtype = np.dtype("<u2") if kind == "bfloat16" else np.dtype(kind).newbyteorder("<")
        count = int(np.prod(shape[1:], dtype=np.int64))
        with explained(file):
            stream.seek(begin + start * count * dtype.itemsize)
            data = stream.read((stop - start) * count * dtype.itemsize)
            return widen(np.frombuffer(data, dtype), kind).reshape(stop - start, *shape[1:])

    return Tensor(name, shape, kind, rows)
