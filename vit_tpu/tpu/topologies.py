"""The TPU generations that libtpu compiles for, as it counts them: by core."""

from __future__ import annotations

import dataclasses

from vit_tpu.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
      name: "v3".
      topology: the smallest slice that the compiler knows by name.
      cores: cores in that slice; one core is what TensorFlow counts as one replica.
      hbm_bytes: what a program may use on one core, as the compiler itself states it.
      clock_hz: cycles a second, deduced from the data sheet's peak and the matrix units' width.
      flops_per_cycle: dense bfloat16 FLOPs one core can do in a cycle; peak = clock_hz * flops_per_cycle.
      note: what a reader of a plan must know about this generation, or "".
    """

    name: str
    topology: str
    cores: int
    hbm_bytes: int
    clock_hz: float
    flops_per_cycle: int
    note: str = ""

    @property
    def peak_flops(self) -> float:
        return self.clock_hz * self.flops_per_cycle


def _gib(size: float) -> int:
    return int(size * 2**30)


_ONE_OF_TWO = "this is one of a v4 chip's two cores; TensorFlow normally joins them, with twice the memory"

# HBM: the "available HBM" of the compiler's out-of-memory message (libtpu 0.0.52).
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v2", "v2:2x2", 8, _gib(7.48), 700e6, 32_768),
        Chip("v3", "v3:2x2", 8, _gib(15.48), 940e6, 65_536),
        Chip("v4", "v4:2x2x1", 8, _gib(15.25), 1050e6, 131_072, _ONE_OF_TWO),
        Chip("v5e", "v5e:2x2", 4, _gib(15.75), 1500e6, 131_072),
        Chip("v5p", "v5p:2x2x1", 4, _gib(95.73), 1750e6, 262_144),
        Chip("v6e", "v6e:2x2", 4, _gib(31.24), 1750e6, 524_288),
        Chip("v7x", "tpu7x:2x2x1", 8, _gib(94.74), 2200e6, 524_288),
    )
}


def chip(name: str) -> Chip:
    """Returns the generation called `name` ("v3").

    Raises:
      UserError: unknown; lists what there is.
    """
    found = CHIPS.get(str(name).lower())
    if found is None:
        raise UserError(f'chip "{name}"{nearest(str(name), CHIPS)} is not one of {", ".join(CHIPS)}')
    return found
