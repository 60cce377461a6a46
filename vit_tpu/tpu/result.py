"""What a plan holds: figures only. `planner.Plan` is one that shows itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_tpu import config as configs
from vit_tpu import settings
from vit_tpu.settings import Config
from vit_tpu.tpu import report
from vit_tpu.tpu.topologies import Chip


@dataclasses.dataclass(frozen=True)
class Advice:
    """One change on top of those before it, compiled.

    Attributes:
      change: "model.remat=block".
      total: bytes with it and all before it.
      saved: bytes against the step before.
      fits: whether that is enough.
      kept: False if it saved nothing and so is not in force for those after it.
    """

    change: str
    total: int
    saved: int
    fits: bool
    kept: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """What the TPU compiler says of one training step.

    Attributes:
      config: what was planned.
      chip, cores, batch_per_core: where.
      parameters, forward_flops, tokens: of the model.
      memory: what lies in the HBM of one core.
      cycles: estimated cost of a step, or None if it was not asked for or does not fit.
      largest_batch: largest batch per core that fits, or None if it was not asked for (0: not even one image).
      advice: changes that were compiled to make it fit.
      versions: of libtpu, its interface, TensorFlow and this package.
      seconds: CPU seconds of tracing and compiling.
      host_bytes: peak memory of the tracing process.
      layout: how weights and their state are divided over a mesh, a table; "" without one.
    """

    config: Config
    chip: Chip
    cores: int
    batch_per_core: int
    parameters: int
    forward_flops: int
    tokens: int
    memory: report.Memory
    cycles: report.Cycles | None
    largest_batch: int | None
    advice: tuple[Advice, ...]
    versions: dict[str, str]
    seconds: float
    host_bytes: int
    layout: str = ""

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as --json writes them."""
        values = dataclasses.asdict(dataclasses.replace(self, config=settings.Config()))
        values["config"] = configs.to_dict(self.config)
        values["memory"]["buffers"] = values["memory"]["buffers"][:40]
        return {**values, "fits": self.fits, "estimated_not_measured": True}
