"""Reads the compiler's programs as text: instructions with layer names and estimated cycles, loops with trip counts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_HEADER = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_CALLED = re.compile(r"(calls|body|condition|to_apply|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_OPERAND = re.compile(r"%([\w.\-]+)")
_DIRECTION = re.compile(r"direction=(\w+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name, opcode: as printed ("fusion.3", "fusion").
      shape: with layout ("bf16[64,196]{1,0:T(8,128)}"), a tuple in parentheses.
      operands: names of the operands, or of a constant its value.
      op_name: the TensorFlow operation it came from ("blocks/3/mlp/MatMul"), or "".
      cycles: the compiler's estimate for one run of it, 0 where it gives none.
      called: computations it runs, by role ("body", "condition", "calls").
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    op_name: str
    cycles: int
    called: dict[str, tuple[str, ...]]
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name; `entry` names the one that runs."""

    computations: dict[str, list[Instruction]]
    entry: str

    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for body in self.computations.values() for i in body}

    def walk(self) -> Iterator[tuple[Instruction, int]]:
        """Yields what runs, with how often: bodies of loops by their trip count. Loops themselves are not yielded.

        Raises:
          ValueError: a loop whose trip count is not in the program.
        """
        yield from self._walk(self.entry, 1)

    def _walk(self, computation: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations[computation]:
            if instruction.opcode == "while":
                trips = self.trip_count(instruction)
                for role in ("condition", "body"):
                    yield from self._walk(instruction.called[role][0], times * trips)
            elif instruction.opcode in ("call", "conditional"):
                for names in instruction.called.values():
                    for name in names:
                        yield from self._walk(name, times)
            else:
                yield instruction, times

    def trip_count(self, loop: Instruction) -> int:
        """Returns how often a loop runs: the constant that its condition compares the counter (from 0) with."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text)
        if known:
            return int(known.group(1))
        names = [loop.called["condition"][0]]
        limits: list[int] = []
        compared = False
        while names:
            for instruction in self.computations[names.pop()]:
                names += [name for group in instruction.called.values() for name in group]
                if instruction.opcode == "compare":
                    direction = _DIRECTION.search(instruction.text)
                    compared = compared or (direction is not None and direction.group(1) in ("LT", "GT"))
                if instruction.opcode == "constant" and instruction.shape.startswith(("s32", "s64", "u32")):
                    limits.append(int(instruction.operands[0]))
        if not compared or len(set(limits)) != 1:
            raise ValueError(f"the trip count of the loop {loop.name} is not in the program")
        return limits[0]

    def cycles(self) -> int:
        """Returns the sum of the estimates over everything that runs."""
        return sum(instruction.cycles * times for instruction, times in self.walk())


def parse(text: str) -> Program:
    """Returns the program of a `*.after_*.txt` dump."""
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        header = _HEADER.match(line) if not line.startswith(" ") else None
        if header:
            body = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif line.startswith("  ") and " = " in line:
            body.append(_instruction(line))
    if not entry:
        raise ValueError("no ENTRY computation in the compiler's program")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, rest = right[:end], right[end:].lstrip()
    open_at = rest.index("(")
    close_at = _closing(rest, open_at)
    inside, tail = rest[open_at + 1 : close_at], rest[close_at:]
    operands = tuple(_OPERAND.findall(inside)) or ((inside,) if inside else ())
    op_name, cycles = _OP_NAME.search(tail), _CYCLES.search(tail)
    called: dict[str, tuple[str, ...]] = {}
    for role, several, one in _CALLED.findall(tail):
        called[role] = tuple(_OPERAND.findall(several)) if several else (one,)
    return Instruction(
        left.lstrip("%"),
        rest[:open_at],
        shape,
        operands,
        op_name.group(1) if op_name else "",
        int(cycles.group(1)) if cycles else 0,
        called,
        line,
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"unbalanced parentheses in the compiler's program: {text[:80]}")
