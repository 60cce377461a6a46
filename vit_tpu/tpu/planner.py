"""`make_plan`: one config, one chip, the compiler's answer; and the searches built on it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from vit_tpu import config as configs
from vit_tpu import settings
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.tpu import compiler, report, search, topologies
from vit_tpu.tpu.topologies import Chip
from vit_tpu.tpu.tracer import Tracer

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the TPU compiler says of one training step.

    Attributes:
      config: what was planned.
      chip, cores, batch_per_core: where.
      parameters, forward_flops, tokens: of the model.
      memory: what lies in the HBM of one core.
      cycles: estimated cost of a step, or None if it was not asked for or does not fit.
      largest_batch: largest batch per core that fits, or None if it was not asked for (0: not even one image).
      advice: sentences, each about a change that was compiled.
      versions: of libtpu, its interface, TensorFlow and this package.
      seconds: CPU seconds of tracing and compiling.
      host_bytes: peak memory of the tracing process.
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
    advice: tuple[Any, ...]
    versions: dict[str, str]
    seconds: float
    host_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as --json writes them."""
        values = dataclasses.asdict(dataclasses.replace(self, config=settings.Config()))
        values["config"] = configs.to_dict(self.config)
        values["memory"]["buffers"] = values["memory"]["buffers"][:40]
        return {**values, "fits": self.fits, "estimated_not_measured": True}

    def __str__(self) -> str:
        from vit_tpu.tpu import show

        return show.table(self)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Writes the bar picture of the memory to a PNG file."""
        from vit_tpu.tpu import show

        show.picture([self], path)


def make_plan(
    config: Config,
    chip: str = "v3",
    cores: int = 1,
    batch_per_core: int | str | None = None,
    *,
    cycles: bool = False,
    advice: bool = False,
    limit: float = 1800.0,
    cache: str | os.PathLike[str] | None = None,
    say: Say = lambda line: None,
) -> Plan:
    """Compiles the training step of `config` for a TPU and says what it needs and, on request, what it costs.

    Args:
      config: from `load_config`; nothing of it is trained, and neither data nor weights are read.
      chip: "v2", "v3", "v4", "v5e", "v5p", "v6e" or "v7x".
      cores: cores that share a batch; gradients are summed over them inside the program.
      batch_per_core: images a step on each core; None for training.batch_size / cores, "auto" for the most that fit.
      cycles: also ask for the compiler's estimate of a step's time (minutes).
      advice: if it does not fit, try changes until it does.
      limit: seconds that one compilation may take.
      cache: folder of the compiler's answers; None for the user's own.
      say: gets a line about each compilation.

    Returns:
      The plan; `print(plan)` shows it.

    Raises:
      UserError: unknown chip, a batch that cannot be, libtpu missing.
      CompilerError: the compiler failed. Out of memory is an answer: `plan.fits` is False.
    """
    return make_plans(
        config, [chip], cores, batch_per_core, cycles=cycles, advice=advice, limit=limit, cache=cache, say=say
    )[0]


def make_plans(
    config: Config,
    chips: Sequence[str],
    cores: int = 1,
    batch_per_core: int | str | None = None,
    *,
    cycles: bool = False,
    advice: bool = False,
    limit: float = 1800.0,
    cache: str | os.PathLike[str] | None = None,
    say: Say = lambda line: None,
) -> list[Plan]:
    """`make_plan` for several chips, from one trace."""
    targets = [topologies.chip(chip) for chip in chips]
    config = configs.validate(config)
    batch = _batch(config, cores, batch_per_core)
    compiler.library()
    plans = []
    with Tracer(config, cores, cache) as tracer:
        for target in targets:
            job = Job(config, target, cores, tracer, limit, cache, say)
            largest = None
            if batch is None:
                largest = search.largest_batch(job)
            plan = job.plan(batch or largest or config.training.accumulation_steps, "cycles" if cycles else "memory")
            plans.append(dataclasses.replace(plan, largest_batch=largest))
    if advice:
        from vit_tpu.tpu import advise

        plans = [
            p if p.fits else dataclasses.replace(p, advice=tuple(advise.until_it_fits(p, limit, cache, say)))
            for p in plans
        ]
    return plans


@dataclasses.dataclass
class Job:
    """A config being planned on a chip; `plan` compiles one batch size."""

    config: Config
    chip: Chip
    cores: int
    tracer: Tracer
    limit: float
    cache: str | os.PathLike[str] | None
    say: Say

    def plan(self, batch: int, stage: str = "memory") -> Plan:
        hlo, facts = self.tracer.trace(batch)
        compiled = compiler.compile_hlo(
            hlo, self.chip, replicas=self.cores, stage=stage, limit=self.limit, cache=self.cache
        )
        steps = self.config.training.accumulation_steps
        memory = report.memory(compiled, facts["arguments"], self.chip, steps)
        verdict = "fits" if memory.fits else "does not fit"
        self.say(f"{self.chip.name}, {batch} images a core: {memory.total / 2**30:.2f} GiB, {verdict}")
        cost = None
        if stage == "cycles" and compiled.finished:
            cost = report.cycles(compiled, self.chip, batch, facts["forward_flops"])
        return Plan(
            config=self.config,
            chip=self.chip,
            cores=self.cores,
            batch_per_core=batch,
            parameters=facts["parameters"],
            forward_flops=facts["forward_flops"],
            tokens=facts["tokens"],
            memory=memory,
            cycles=cost,
            largest_batch=None,
            advice=(),
            versions=versions() | compiled.versions,
            seconds=self.tracer.cpu_seconds + compiled.cpu_seconds,
            host_bytes=facts["peak_host_bytes"],
        )


def _batch(config: Config, cores: int, batch_per_core: int | str | None) -> int | None:
    if cores < 1:
        raise UserError(f"cores={cores} is not a positive whole number")
    if batch_per_core == "auto":
        return None
    if batch_per_core is None:
        if config.training.batch_size % cores:
            raise UserError(
                f"training.batch_size {config.training.batch_size} does not divide by {cores} cores: set batch_per_core"
            )
        return config.training.batch_size // cores
    try:
        batch = int(batch_per_core)
    except ValueError:
        batch = 0
    if not 0 < batch <= search.LARGEST_BATCH:
        raise UserError(
            f'batch_per_core is "{batch_per_core}": give a number from 1 to {search.LARGEST_BATCH:,}, or auto'
        )
    return batch


def versions() -> dict[str, str]:
    from importlib import metadata

    import vit_tpu

    return {"vit_tpu": vit_tpu.__version__, "tensorflow": metadata.version("tensorflow")}
