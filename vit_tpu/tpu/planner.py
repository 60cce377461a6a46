"""`make_plan`: one config, one chip, the compiler's answer; and the searches built on it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from vit_tpu import config as configs
from vit_tpu import mesh as meshes
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.tpu import advise, compiler, report, result, search, show, topologies
from vit_tpu.tpu.topologies import Chip
from vit_tpu.tpu.tracer import Tracer

Say = Callable[[str], None]


class Plan(result.Result):
    """What the TPU compiler says of one training step (see `result.Result`); `print(plan)` shows the table."""

    def __str__(self) -> str:
        return show.table(self)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Writes the bar picture of the memory to a PNG file."""
        show.picture([self], path)


@dataclasses.dataclass(frozen=True)
class Options:
    """How plans are made.

    Attributes:
      cycles: also ask for the compiler's estimate of a step's time (minutes).
      advice: if it does not fit, try changes until it does.
      limit: seconds that one compilation may take.
      cache: folder of the compiler's answers; None for the user's own.
      say: gets a line before and after each compilation.
    """

    cycles: bool = False
    advice: bool = False
    limit: float = 1800.0
    cache: str | os.PathLike[str] | None = None
    say: Say = lambda line: None


def make_plan(
    config: Config,
    chip: str = "v3",
    cores: int | None = None,
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
      config: from `load_config`; nothing of it is trained, and neither data nor weights are read. With config.mesh the
        step is divided over its cores.
      chip: "v2", "v3", "v4", "v5e", "v5p", "v6e" or "v7x".
      cores: cores that share a batch; gradients are summed over them inside the program. None for those of the mesh,
        or one.
      batch_per_core: images a step on each core; None for training.batch_size / cores, "auto" for the most that fit.
      cycles, advice, limit, cache, say: see `Options`.

    Returns:
      The plan; `print(plan)` shows it.

    Raises:
      UserError: unknown chip, a batch that cannot be, libtpu missing.
      CompilerError: the compiler failed. Out of memory is an answer: `plan.fits` is False.
    """
    return make_plans(config, [chip], cores, batch_per_core, Options(cycles, advice, limit, cache, say))[0]


def make_plans(
    config: Config,
    chips: Sequence[str],
    cores: int | None = None,
    batch_per_core: int | str | None = None,
    options: Options = Options(),
) -> list[Plan]:
    """`make_plan` for several chips, from one trace."""
    targets = [topologies.chip(chip) for chip in chips]
    config = configs.validate(config)
    mesh = meshes.parse(config.mesh, config.shard)
    cores = (mesh.cores if mesh else 1) if cores is None else cores
    if mesh is not None:
        meshes.check_cores(mesh, cores)
    batch = _batch(config, cores, batch_per_core)
    for target in targets:
        compiler.check_cores(target, cores)
    compiler.library()
    stage = "cycles" if options.cycles else "memory"
    unit = config.training.accumulation_steps
    plans = []
    partitions = cores if mesh is not None and mesh.partitioned else 1
    with Tracer(config, cores // partitions, options.cache) as tracer:
        for target in targets:
            job = Job(config, target, cores, partitions, tracer, options)
            largest = None
            if batch is None:
                largest = search.largest_batch(job.memory, target.hbm_bytes, unit)
            plan = job.plan(batch or largest or unit, stage)
            plans.append(dataclasses.replace(plan, largest_batch=largest))
    return [_advised(plan, options) if options.advice and not plan.fits else plan for plan in plans]


def _advised(plan: Plan, options: Options) -> Plan:
    only_memory = dataclasses.replace(options, cycles=False, advice=False)

    def memory(config: Config, batch: int) -> report.Memory:
        return make_plans(config, [plan.chip.name], plan.cores, batch, only_memory)[0].memory

    return dataclasses.replace(plan, advice=tuple(advise.until_it_fits(plan, memory)))


@dataclasses.dataclass
class Job:
    """A config being planned on a chip; `plan` compiles one batch size."""

    config: Config
    chip: Chip
    cores: int
    partitions: int
    tracer: Tracer
    options: Options

    def memory(self, batch: int) -> report.Memory:
        return self.plan(batch).memory

    def plan(self, batch: int, stage: str = "memory") -> Plan:
        self.options.say(f"{self.chip.name}, {batch} images a core: compiling, minutes for a large model ...")
        hlo, facts = self.tracer.trace(batch)
        compiled = compiler.compile_hlo(
            hlo, self.chip, replicas=self.cores // self.partitions, partitions=self.partitions, stage=stage,
            limit=self.options.limit, cache=self.options.cache,
        )  # fmt: skip
        steps = self.config.training.accumulation_steps
        memory = report.memory(compiled, facts["arguments"], self.chip, steps)
        verdict = "fits" if memory.fits else "does not fit"
        self.options.say(f"{self.chip.name}, {batch} images a core: {memory.total / 2**30:.2f} GiB, {verdict}")
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
            layout=facts.get("layout", ""),
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
