"""Arrays that stay in their file until they are asked for, and only as many rows as are asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_tpu.errors import UserError

# What a weight may be stored as. V2 is how numpy writes an array of bfloat16.
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One array of a file (or made from some), read when `read` is called.

    Attributes:
      name: what the file calls it.
      shape: of the array.
      dtype: as stored: "float32", "bfloat16", ...
      rows: (start, stop) -> float32 array of those rows of axis 0; a scalar has one row.
      by_rows: whether asking for a few rows reads only those.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: Callable[[int, int], np.ndarray]
    by_rows: bool = True

    def read(self) -> np.ndarray:
        """Returns the whole array as float32."""
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def part(self, start: int, stop: int) -> Tensor:
        """Returns rows start to stop of axis 0."""
        shape = (stop - start, *self.shape[1:])
        return Tensor(self.name, shape, self.dtype, lambda a, b: self.rows(start + a, start + b))

    def row(self, index: int) -> Tensor:
        """Returns one row of axis 0, without that axis."""
        return self.part(index, index + 1).mapped(self.shape[1:], lambda x: x[0])

    def mapped(self, shape: Sequence[int], function: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        """Returns `function` of the whole array, which must give `shape`."""
        return made(self.name, shape, lambda: function(self.read()), self.dtype)


def made(name: str, shape: Sequence[int], read: Callable[[], np.ndarray], dtype: str = "float32") -> Tensor:
    """Returns a tensor whose whole content `read` gives."""
    return Tensor(name, tuple(shape), dtype, lambda start, stop: read()[start:stop], by_rows=False)


def of_array(name: str, array: np.ndarray) -> Tensor:
    """Returns a tensor of an array in memory."""
    return made(name, array.shape, lambda: np.asarray(array, np.float32))


def stacked(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors of one shape stacked along a new axis 0."""

    def rows(start: int, stop: int) -> np.ndarray:
        return np.stack([part.read() for part in parts[start:stop]])

    return Tensor(name, (len(parts), *parts[0].shape), parts[0].dtype, rows)


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors concatenated along axis 0."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return made(name, shape, lambda: np.concatenate([part.read() for part in parts]), parts[0].dtype)


def dtype_name(dtype: np.dtype, where: str) -> str:
    """Returns the name of a stored dtype, or raises UserError for what is not a weight's."""
    if dtype.kind == "V" and dtype.itemsize == 2:
        return "bfloat16"
    if dtype.hasobject:
        raise UserError(f"{where} holds Python objects (a pickle), which are never read: save it again as plain arrays")
    return dtype.name


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns stored numbers as native float32; bfloat16 arrives as any 2-byte type."""
    if dtype == "bfloat16":
        bits = array.view(np.dtype("<u2")).astype(np.uint32) << 16
        return bits.view(np.float32)
    return np.asarray(array, dtype=np.float32)
