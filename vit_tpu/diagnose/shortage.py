"""Reads out-of-memory errors of TensorFlow, XLA, the TPU runtime, NumPy and Python: what was asked, what there is.

The texts are those that the libraries' programs contain, with figures as they print them ("15.48G", "(4770354232B)").
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from typing import Any

DTYPES = {"half": "float16", "float": "float32", "double": "float64", "int": "int32"}
_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "double": 8,
    "float64": 8,
    "int64": 8,
}
_NUMBER = r"([\d.]+ ?[KMGT]?i?B?)"

# TensorFlow uses the same code for full disks, many open files and long messages.
_OTHER = re.compile(
    r"no space left|too many open files|quota|rate limit|message larger than max|retries", re.IGNORECASE
)
_MEMORY = re.compile(
    r"out of memory|\bOOM\b|ran out of|(failed|unable|attempting|cannot) to (allocate|reserve)|cannot allocate memory"
    r"|bad_alloc|OUT_OF_MEMORY|exceeds available HBM|MemoryError",
    re.IGNORECASE,
)
_TENSOR = re.compile(
    r"OOM when allocating (?:temporary )?tensor (?:with|of) shape\s*\[([\d,]*)\](?: and type (\w+))?(?: on (\S+))?"
)
_ARRAY = re.compile(rf"Unable to allocate {_NUMBER} for an array with shape \(([\d, ]*)\) and data type (\w+)")
_ASKED = (
    re.compile(r"Out of memory (?:while trying to allocate|allocating) (\d+) bytes", re.IGNORECASE),
    re.compile(r"Failed to allocate request for \S+ \((\d+)B\)", re.IGNORECASE),
    re.compile(rf"trying to allocate {_NUMBER}", re.IGNORECASE),
)
# (needed, there) of a whole program on a TPU, then (asked, free) of one allocation there.
_PROGRAM = (
    re.compile(rf"Used {_NUMBER} of {_NUMBER} hbm"),
    re.compile(rf"HLO temporaries \({_NUMBER}\) exceeds available HBM \({_NUMBER}\)"),
)
_ALLOCATION = re.compile(
    rf"Attempting to (?:reserve|allocate) {_NUMBER}(?: at the bottom of memory)?\. That was not possible\. "
    rf"There are {_NUMBER} free"
)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}|\[Op:(\w+)\]")


@dataclasses.dataclass(frozen=True)
class Shortage:
    """What an out-of-memory error says.

    Attributes:
      place: "TPU", "GPU", "CPU" or "" (the error does not say).
      asked: bytes of the allocation that failed, or None.
      array: dtype and shape of it, or "".
      program: bytes that the whole program needs, or None.
      there: bytes of the device, or None.
      free: bytes that were free, or None.
      layer: the operation that asked, or "".
    """

    place: str = ""
    asked: int | None = None
    array: str = ""
    program: int | None = None
    there: int | None = None
    free: int | None = None
    layer: str = ""


def read(error: BaseException) -> Shortage | None:
    """Returns what an error, or what caused it, says about missing memory; None if it is about something else."""
    seen: BaseException | None = error
    while seen is not None:
        found = parse(f"{type(seen).__name__}: {seen}")
        if found is not None:
            return found
        seen = seen.__cause__ or seen.__context__
    return None


def parse(text: str) -> Shortage | None:
    """Returns what the text of an error says about missing memory, or None; `text` begins with the error's type."""
    if not _MEMORY.search(text) or (_OTHER.search(text) and not _TENSOR.search(text)):
        return None
    found: dict[str, Any] = {}
    tensor, array, allocation = _TENSOR.search(text), _ARRAY.search(text), _ALLOCATION.search(text)
    program = next((match for pattern in _PROGRAM if (match := pattern.search(text))), None)
    asked = next((match for pattern in _ASKED if (match := pattern.search(text))), None)
    if program:
        found.update(place="TPU", program=size(program.group(1)), there=size(program.group(2)))
    elif allocation:
        found.update(place="TPU", asked=size(allocation.group(1)), free=size(allocation.group(2)))
    elif tensor:
        shape, dtype, device = tensor.groups()
        sizes = [int(n) for n in shape.split(",") if n]
        name = DTYPES.get(dtype or "", dtype or "")
        found.update(array=f"{name}[{', '.join(map(str, sizes))}]", asked=math.prod(sizes) * _BYTES.get(dtype or "", 4))
        found.update(place=_place(device or text))
    elif array:
        found.update(place="CPU", asked=size(array.group(1)), array=f"{array.group(3)}[{array.group(2).strip(' ,')}]")
    elif asked:
        found.update(asked=size(asked.group(1)), place=_place(text))
    else:
        found.update(place="CPU" if re.search(r"bad_alloc|MemoryError|annot allocate memory", text) else _place(text))
    node = _NODE.search(text)
    if node:
        found.update(layer=node.group(1) or node.group(2))
    return Shortage(**found)


def _place(text: str) -> str:
    if re.search(r"device:TPU|\bhbm\b|TPU_\d", text, re.IGNORECASE):
        return "TPU"
    if re.search(r"device:GPU|GPU_\d|CUDA|device ordinal", text):
        return "GPU"
    return "CPU" if re.search(r"device:CPU|by allocator (cpu|mklcpu)|XLA_CPU", text) else ""


def size(text: str) -> int:
    """Returns the bytes of "15.48G", "385.25M", "3.00 GiB" or "4770354232"."""
    number, unit = re.match(r"([\d.]+) ?([KMGT]?)", text).groups()  # type: ignore[union-attr]
    return round(float(number.rstrip(".")) * 1024 ** " KMGT".index(unit or " "))


def of_device(kind: str) -> int | None:
    """Returns the memory of one device in bytes as far as it can be known: a GPU's allocator limit, the host's RAM.

    On the host the smallest of RAM, the container's limit and the process's own limit counts.
    """
    if kind == "CPU":
        return of_host()
    if kind == "GPU":
        try:
            from tensorflow.python.client import device_lib

            sizes = [d.memory_limit for d in device_lib.list_local_devices() if d.device_type == "GPU"]
            return min(sizes) if sizes else None
        except Exception:  # only a figure for a message
            return None
    return None


def of_host() -> int | None:
    """Returns how much memory this process can have at most, in bytes."""
    found = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # no such file, or "max"
            found.append(int(file.read()))
    with contextlib.suppress(ImportError, ValueError):
        import resource

        limits = [resource.getrlimit(name)[0] for name in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        found += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(found) if found else None
