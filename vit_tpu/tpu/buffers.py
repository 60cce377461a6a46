"""Reads the compiler's buffer assignment: what lies in HBM at the fullest moment, and how much of it is padding."""

from __future__ import annotations

import dataclasses
import math
import re

from vit_tpu.tpu.program import Instruction, Program

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?, page \d+(.*)$")
_PARAMETER = re.compile(r", parameter (\d+)")
_VALUE = re.compile(r" value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"\s+(\S+):(\d+)-(\d+)$")
_SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Value:
    """One value in an allocation: bytes from `offset` on, of the instruction `name` ("fusion.3{0}")."""

    name: str
    size: int
    offset: int
    shape: str


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A piece of memory.

    Attributes:
      kind: "argument", "output", "temporary", "constant" or "local" (inside an operation: scratch memory).
      parameter: position of the argument, or None.
      hbm: whether it lies in HBM, not in a memory of the core.
    """

    kind: str
    size: int
    parameter: int | None
    hbm: bool
    values: tuple[Value, ...]


def parse_assignment(text: str) -> list[Allocation]:
    """Returns the allocations of a `*-buffer-assignment.txt` dump."""
    found: list[tuple[re.Match[str], list[Value]]] = []
    for line in text.splitlines():
        head, value = _ALLOCATION.match(line), _VALUE.match(line)
        if head:
            found.append((head, []))
        elif value and found:
            name, size, offset, shape = value.groups()
            found[-1][1].append(Value(name if name.endswith("}") else name + "{}", int(size), int(offset), shape))
    return [_allocation(head, values) for head, values in found]


def _allocation(head: re.Match[str], values: list[Value]) -> Allocation:
    size, color, rest = head.groups()
    parameter = _PARAMETER.search(rest)
    kinds = {
        "thread-local": "local",
        "preallocated-temp": "temporary",
        "constant": "constant",
        "maybe-live-out": "output",
    }
    kind = "argument" if parameter else next((kind for word, kind in kinds.items() if word in rest), "temporary")
    position = int(parameter.group(1)) if parameter else None
    return Allocation(kind, int(size), position, color in (None, "0"), tuple(values))


def parse_ranges(text: str) -> dict[str, tuple[int, int]]:
    """Returns value name -> first and last moment of its life, from a `*-live-range.txt` dump."""
    _, _, text = text.partition("BufferLiveRange:")
    text, _, _ = text.partition("Live ranges at")
    found = (_RANGE.match(line) for line in text.splitlines())
    return {m.group(1): (int(m.group(2)), int(m.group(3))) for m in found if m}


def with_loops(ranges: dict[str, tuple[int, int]], program: Program) -> dict[str, tuple[int, int]]:
    """Returns the ranges with what loops hold: a loop's variable keeps its place from before it to its last use.

    The compiler lists the value that a round of a loop writes and the result of the loop apart; only the first has
    a place in the assignment.
    """
    found = dict(ranges)
    instructions = program.by_name()
    loops = [i for body in program.computations.values() for i in body if i.opcode == "while"]
    for loop in loops:
        root = next((i for i in program.computations[loop.called["body"][0]] if "ROOT %" in i.text), None)
        start = instructions.get(loop.operands[0])
        if root is None or start is None or root.opcode != "tuple" or start.opcode != "tuple":
            continue
        results = [ranges.get(f"{loop.name}{{{k}}}") for k in range(len(root.operands))]
        after = max((r[0] for r in results if r), default=0)
        for written, given, result in zip(root.operands, start.operands, results):
            first = found.get(_value_of(given, instructions))
            if first is None:
                continue
            whole = (first[0], max(result[1] if result else after, first[1]))
            for name in (_value_of(written, instructions), f"{loop.name}{{{root.operands.index(written)}}}"):
                old = found.get(name, whole)
                found[name] = (min(old[0], whole[0]), max(old[1], whole[1]))
    return found


def _value_of(name: str, instructions: dict[str, Instruction]) -> str:
    """Returns the value behind an operand: the element, for the reading of a tuple's element."""
    found = instructions.get(name)
    while found is not None and found.opcode in ("bitcast", "copy-done"):
        name = found.operands[0]
        found = instructions.get(name)
    if found is not None and found.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", found.text)
        return f"{found.operands[0]}{{{index.group(1) if index else 0}}}"
    return name + "{}"


def fullest(temporary: Allocation, ranges: dict[str, tuple[int, int]]) -> list[Value]:
    """Returns the values that share the temporary memory at its fullest moment, one for each place.

    Values that lie at the same place (a loop's variable before, in and after the loop) count once.
    """
    events: list[tuple[int, int, Value]] = []
    for value in temporary.values:
        if value.name in ranges:
            start, end = ranges[value.name]
            events += [(start, 1, value), (end + 1, -1, value)]
    events.sort(key=lambda event: (event[0], event[1]))
    live: dict[tuple[int, int], int] = {}
    now = best = 0
    moment = -1
    for time, change, value in events:
        place = (value.offset, value.size)
        before = live.get(place, 0)
        live[place] = before + change
        if before == 0 and change == 1:
            now += value.size
        elif live[place] == 0 and change == -1:
            now -= value.size
        if now > best:
            best, moment = now, time
    places: dict[tuple[int, int], Value] = {}
    for value in temporary.values:
        start, end = ranges.get(value.name, (0, -1))
        if start <= moment <= end:
            old = places.get((value.offset, value.size))
            if old is None or raw_bytes(value.shape) > raw_bytes(old.shape):
                places[value.offset, value.size] = value
    return _disjoint(sorted(places.values(), key=lambda v: (v.offset, -v.size)))


def _disjoint(values: list[Value]) -> list[Value]:
    """Drops what lies inside another value (a view of it), so that no byte counts twice."""
    kept: list[Value] = []
    end = -1
    for value in values:
        if value.offset + value.size <= end:
            continue
        kept.append(value)
        end = max(end, value.offset + value.size)
    return kept


def dims(shape: str) -> tuple[int, ...]:
    """Returns the sizes of an array shape ("bf16[64,196]{1,0:T(8,128)}"), () for a scalar or a tuple."""
    found = None if shape.startswith("(") else _SHAPE.match(shape)
    return tuple(int(size.lstrip("<=")) for size in found.group(2).split(",") if size) if found else ()


def dtype(shape: str) -> str:
    found = _SHAPE.match(shape)
    return found.group(1) if found else ""


def raw_bytes(shape: str) -> int:
    """Returns the bytes of an array's elements without padding; 0 for a tuple (a table of addresses)."""
    found = None if shape.startswith("(") else _SHAPE.match(shape)
    return math.prod(dims(shape)) * _bits(found.group(1)) // 8 if found else 0


def padded_bytes(shape: str) -> int:
    """Returns the bytes of an array as its layout tiles it: "f32[3,200]{1,0:T(8,128)}" takes 8 x 256 floats."""
    found = None if shape.startswith("(") else _SHAPE.match(shape)
    if not found:
        return 0
    order = [int(axis) for axis in (found.group(3) or "").split(",") if axis]
    sizes = [dims(shape)[axis] for axis in reversed(order)] or [1]  # most major first
    tile = re.match(r"T\(([\d,]+)\)", found.group(4) or "")
    if tile:
        edges = [int(edge) for edge in tile.group(1).split(",")]
        if len(edges) > len(sizes):
            sizes = [1] * (len(edges) - len(sizes)) + sizes
        for axis, edge in zip(range(len(sizes) - len(edges), len(sizes)), edges):
            sizes[axis] = math.ceil(sizes[axis] / edge) * edge
    return math.prod(sizes) * _bits(found.group(1)) // 8


def _bits(name: str) -> int:
    if name in _BITS:
        return _BITS[name]
    digits = re.search(r"\d+", name)
    return int(digits.group()) if digits else 0
