"""From what the compiler said to what a user asks: does it fit, where do the bytes go, what does a step cost."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from vit_tpu.tpu import buffers
from vit_tpu.tpu.buffers import Value
from vit_tpu.tpu.compiler import Compiled
from vit_tpu.tpu.program import Instruction, Program
from vit_tpu.tpu.topologies import Chip

# Parts of the memory, in the order in which they are shown.
PARTS = (
    "parameters",
    "optimizer",
    "ema",
    "accumulator",
    "gradients",
    "weight copies",
    "activations",
    "batch",
    "other",
    "padding",
    "gaps",
)
WHAT = {
    "parameters": "float32 weights",
    "optimizer": "moments of the optimizer",
    "ema": "moving average of the weights",
    "accumulator": "gradient sum over micro-batches",
    "gradients": "gradients alive at the fullest moment",
    "weight copies": "weights in the compute dtype or another layout",
    "activations": "what the forward pass keeps for the backward pass",
    "batch": "images, labels, weights",
    "other": "counters, outputs, constants",
    "padding": "bytes between the elements of tiled arrays",
    "gaps": "temporary memory the compiler could not fill",
}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in HBM: `bytes` as laid out, `raw_bytes` without padding, `layer` the operation it came from."""

    bytes: int
    raw_bytes: int
    part: str
    shape: str
    layer: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one core at the fullest moment of a step.

    Attributes:
      total: bytes the program needs; parts add up to it.
      available: bytes the compiler grants a program on this chip.
      fits: the compiler's own verdict.
      parts: bytes by what they are for, keys as in PARTS.
      padding: padding bytes by part ("activations": 123), which add up to parts["padding"].
      buffers: the arrays, largest first.
    """

    total: int
    available: int
    fits: bool
    parts: dict[str, int]
    padding: dict[str, int]
    buffers: tuple[Buffer, ...]


def memory(compiled: Compiled, arguments: Sequence[dict[str, Any]], chip: Chip, accumulation_steps: int = 1) -> Memory:
    """Splits the compiler's buffer assignment into parts.

    Args:
      compiled: of any stage.
      arguments: from the trace, one for each argument of the program.
      chip: that it was compiled for.
      accumulation_steps: whether there is a sum of gradients to look for.
    """
    allocations = [a for a in buffers.parse_assignment(compiled.assignment) if a.hbm and a.kind != "local"]
    program = compiled.program()
    ranges = buffers.with_loops(buffers.parse_ranges(compiled.live_ranges), program)
    total = sum(a.size for a in allocations)
    found: list[Buffer] = []
    gaps = 0
    sort = _Sorter(program, arguments, accumulation_steps > 1)
    for allocation in allocations:
        if allocation.parameter is not None:
            argument = arguments[allocation.parameter]
            value = max(allocation.values, key=lambda v: (v.name.startswith("arg"), buffers.raw_bytes(v.shape)))
            found.append(_buffer(allocation.size, value.shape, argument["role"], argument["name"]))
        elif allocation.kind == "temporary":
            live = buffers.fullest(allocation, ranges)
            gaps += allocation.size - sum(value.size for value in live)
            found += [_buffer(value.size, value.shape, *sort(value)) for value in live]
        else:
            shape = allocation.values[0].shape if allocation.values else "()"
            found.append(
                _buffer(allocation.size, shape, "other", sort.layer(allocation.values[0]) if allocation.values else "")
            )
    parts, padding = dict.fromkeys(PARTS, 0), dict[str, int]()
    for buffer in found:
        parts[buffer.part] += buffer.raw_bytes
        parts["padding"] += buffer.bytes - buffer.raw_bytes
        padding[buffer.part] = padding.get(buffer.part, 0) + buffer.bytes - buffer.raw_bytes
    parts["gaps"] = gaps
    fits = compiled.fits and (bool(compiled.stats) or total <= chip.hbm_bytes)
    available = compiled.stated.get("available") or chip.hbm_bytes
    return Memory(total, available, fits, parts, padding, tuple(sorted(found, key=lambda b: -b.bytes)))


def _buffer(size: int, shape: str, part: str, layer: str) -> Buffer:
    raw = buffers.raw_bytes(shape)
    return Buffer(size, min(raw, size) if raw else size, part if part in PARTS else "other", shape, layer)


class _Sorter:
    """Says what a temporary array is: by its shape where it has that of a weight, else by the layer it came from."""

    def __init__(self, program: Program, arguments: Sequence[dict[str, Any]], accumulates: bool):
        self.instructions = program.by_name()
        self.accumulates = accumulates
        known = [one for a in arguments if a["role"] == "parameters" for one in _pieces(a)]
        self.weights = {shape for one in known for shape in _equivalent(one)}
        entry = program.computations[program.entry]
        numbers = {i.name: int(i.operands[0]) for i in entry if i.opcode == "parameter" and i.operands[0].isdigit()}
        self.held = {name for name, number in numbers.items() if arguments[number]["role"] == "parameters"}

    def __call__(self, value: Value) -> tuple[str, str]:
        layer, size = self.layer(value), _significant(buffers.dims(value.shape))
        if not size or math.prod(size) < 1024:
            return "other", layer
        if size in self.weights:
            if self._is_copy(value.name.split("{")[0]):
                return "weight copies", layer
            return ("accumulator" if self.accumulates and buffers.dtype(value.shape) == "f32" else "gradients"), layer
        return "activations", layer

    def layer(self, value: Value) -> str:
        found = self.instructions.get(value.name.split("{")[0])
        return found.op_name if found else ""

    def _is_copy(self, name: str, depth: int = 6) -> bool:
        """Whether an array is computed from weights alone."""
        found = self.instructions.get(name)
        if found is None or depth == 0:
            return False
        if found.name in self.held:
            return True
        arrays = [o for o in found.operands if o in self.instructions and self.instructions[o].opcode != "constant"]
        return found.opcode != "parameter" and bool(arrays) and all(self._is_copy(o, depth - 1) for o in arrays)


def _pieces(argument: dict[str, Any]) -> list[Sequence[int]]:
    """The shapes in which a weight or its gradient lies on one core: whole, divided over a mesh, and, of stacked
    blocks, that of some of them (each loop of `layers.block.stacked_blocks` collects the gradients of its own)."""
    shape = argument["shape"]
    stacked = re.match(r"blocks/(?!\d)", argument.get("name", ""))
    return [shape, *argument.get("pieces", []), *([count, *shape[1:]] for count in range(2, shape[0]) if stacked)]


def _significant(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _equivalent(shape: Sequence[int]) -> set[tuple[int, ...]]:
    """The shapes in which a weight also appears: axes permuted, neighbours merged ([D, H, h] as [D, H * h])."""
    found = {_significant(shape)}
    for start in range(len(shape)):
        for end in range(start + 2, len(shape) + 1):
            found.add(_significant([*shape[:start], math.prod(shape[start:end]), *shape[end:]]))
    if len(shape) > 2:  # stacked over depth: one slice of it
        found |= {found_ for found_ in _equivalent(shape[1:]) if math.prod(found_) >= 1024}
    return {shape for shape in found if math.prod(shape) >= 1024}


@dataclasses.dataclass(frozen=True)
class Cycles:
    """The compiler's estimate of one step on one core. Estimated, not measured; transfers between cores are not in it.

    Attributes:
      total: cycles; seconds at the chip's clock.
      images_per_second: of one core.
      mfu: three times the model's forward FLOPs, over what the core's matrix units could do in that time.
      by_kind: cycles by kind of layer, largest first.
      costliest: {"layer", "opcode", "shape", "runs", "cycles"}, largest first; blocks are summed up.
    """

    total: int
    seconds: float
    images_per_second: float
    mfu: float
    by_kind: dict[str, int]
    costliest: tuple[dict[str, Any], ...]


def cycles(compiled: Compiled, chip: Chip, batch: int, forward_flops: int) -> Cycles:
    """Sums the estimates of the finished program, loops by their trip count.

    Raises:
      ValueError: the program has no estimates, or they say that the chip did more than it can.
    """
    total, kinds, groups = 0, dict[str, int](), dict[tuple[str, str, str], list[int]]()
    for instruction, times in compiled.program().walk():
        if not instruction.cycles:
            continue
        spent = instruction.cycles * times
        total += spent
        kind = kind_of(instruction)
        kinds[kind] = kinds.get(kind, 0) + spent
        group = groups.setdefault(
            (general_name(instruction.op_name), instruction.opcode, bare_shape(instruction.shape)), [0, 0]
        )
        group[0] += spent
        group[1] += times
    if not total:
        raise ValueError("the compiler's program has no cycle estimates")
    seconds = total / chip.clock_hz
    mfu = 3 * forward_flops * batch / seconds / chip.peak_flops
    if mfu > 1:
        raise ValueError(f"the estimate would mean {100 * mfu:.0f} % of {chip.name}'s peak: it is not to be trusted")
    rows = sorted(groups.items(), key=lambda item: -item[1][0])
    costliest = tuple(
        {"layer": name, "opcode": opcode, "shape": shape, "runs": runs, "cycles": spent}
        for (name, opcode, shape), (spent, runs) in rows[:40]
    )
    by_kind = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return Cycles(total, seconds, batch / seconds, mfu, by_kind, costliest)


def kind_of(instruction: Instruction) -> str:
    """Returns attention, softmax, mlp, norm, optimizer, embedding, head, communication, copies or other."""
    name = instruction.op_name
    if instruction.opcode.startswith(("copy", "transpose", "bitcast")):
        return "copies"
    if instruction.opcode.startswith(("all-", "reduce-scatter", "collective")):
        return "communication"
    for kind, words in (
        ("optimizer", ("AdamW", "LAMB", "Adafactor", "SGD", "ema", "AssignVariable")),
        ("softmax", ("softmax",)),
        ("head", ("head/", "map/", "pre_logits", "loss")),
        ("attention", ("attention",)),
        ("mlp", ("mlp",)),
        ("norm", ("norm",)),
        ("embedding", ("embedding", "positions")),
    ):
        if any(word in name for word in words):
            return kind
    return "other"


def general_name(op_name: str) -> str:
    """Returns an operation's name with the block's number and counting suffixes taken off."""
    once = re.sub(r"(gradient_tape/)+", "gradient_tape/", op_name)  # twice where a block is computed again
    return re.sub(r"_\d+(?=/|$)", "", re.sub(r"blocks/\d+", "blocks/N", once))


def bare_shape(shape: str) -> str:
    """Returns a shape without layouts and remarks, shortened."""
    bare = re.sub(r"/\*.*?\*/", "", re.sub(r"\{[^}]*\}", "", shape))
    return bare if len(bare) <= 80 else bare[:77] + "..."
