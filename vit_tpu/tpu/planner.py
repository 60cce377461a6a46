"""`make_plan`: one config, one chip, the compiler's answer; and the searches built on it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vit_tpu import config as configs
from vit_tpu.config import Config
from vit_tpu.errors import UserError
from vit_tpu.tpu import compiler, report, topologies
from vit_tpu.tpu.compiler import CompilerError
from vit_tpu.tpu.topologies import Chip

_LARGEST_BATCH = 65_536
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
        values = dataclasses.asdict(dataclasses.replace(self, config=configs.Config()))
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


class Tracer:
    """The tracing process of one config; traces each batch size once.

    Args:
      config: what to trace.
      replicas: cores over which gradients are summed.
    """

    def __init__(self, config: Config, replicas: int = 1):
        self._folder = tempfile.TemporaryDirectory(prefix="vit_tpu_trace_")
        self.folder = pathlib.Path(self._folder.name)
        (self.folder / "config.json").write_text(json.dumps({"config": configs.to_dict(config), "replicas": replicas}))
        package = str(pathlib.Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vit_tpu.tpu.trace", str(self.folder / "config.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                # oneDNN's allocator refuses to reserve more than the machine has; the plain one only reserves.
                "TF_ENABLE_ONEDNN_OPTS": "0",
            },
        )
        self._known: dict[int, tuple[bytes, dict[str, Any]]] = {}
        self.cpu_seconds = 0.0

    def trace(self, batch: int) -> tuple[bytes, dict[str, Any]]:
        """Returns the HLO for a batch size, and {"arguments", "parameters", "forward_flops", "tokens", ...}.

        Raises:
          UserError: the config or the batch cannot be.
          CompilerError: TensorFlow could not lower the step.
        """
        if batch in self._known:
            return self._known[batch]
        path = self.folder / f"{batch}.hlo"
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"batch": batch, "hlo": str(path)}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            words = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
            raise CompilerError(f"tracing the step ended with code {self._process.wait()}: {' '.join(words)[:800]}")
        answer = json.loads(line)
        if "wrong" in answer:
            raise UserError(answer["wrong"])
        if "error" in answer:
            raise CompilerError(f"TensorFlow could not lower the training step to XLA: {answer['error'][:1500]}")
        self.cpu_seconds += answer["cpu_seconds"]
        self._known[batch] = (path.read_bytes(), answer)
        path.unlink()
        return self._known[batch]

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()
        self._folder.cleanup()


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
    target = topologies.chip(chip)
    config = configs.validate(config)
    batch = _batch(config, cores, batch_per_core)
    compiler.library()
    largest = None
    with Tracer(config, cores) as tracer:
        job = Job(config, target, cores, tracer, limit, cache, say)
        if batch is None:
            largest = largest_batch(job)
            batch = largest or config.training.accumulation_steps
        plan = job.plan(batch)
        if cycles and plan.fits:
            plan = job.plan(batch, "cycles")
    if advice and not plan.fits:
        from vit_tpu.tpu import advise

        plan = dataclasses.replace(plan, advice=tuple(advise.until_it_fits(plan, limit, cache, say)))
    return dataclasses.replace(plan, largest_batch=largest)


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
                f"training.batch_size {config.training.batch_size} does not divide by {cores} cores: give batch_per_core"
            )
        return config.training.batch_size // cores
    try:
        batch = int(batch_per_core)
    except ValueError:
        batch = 0
    if not 0 < batch <= _LARGEST_BATCH:
        raise UserError(f'batch_per_core is "{batch_per_core}": give a number from 1 to {_LARGEST_BATCH:,}, or auto')
    return batch


def largest_batch(job: Job) -> int:
    """Returns the largest batch per core that fits, 0 if none does.

    Memory grows almost in a straight line with the batch, so the line through the last two answers is tried first.
    The answer is exact below 128 images, then to within a 64th.
    """
    if not job.chip.hbm_bytes:
        raise UserError(f"the compiler never said how much memory a {job.chip.name} core has: give --batch_per_core")
    unit = job.config.training.accumulation_steps
    sizes: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in sizes:
            memory = job.plan(batch).memory
            sizes[batch] = memory.total if memory.fits else max(memory.total, job.chip.hbm_bytes + 1)
        return sizes[batch] <= job.chip.hbm_bytes

    low, high = 0, max(8, unit)
    while fits(high):
        low, high = high, high * 4
        if high > _LARGEST_BATCH:
            return low
    while high - low > max(unit, _step(low)):
        grid = max(unit, _step(low))
        middle = _between(sizes, low, high, job.chip.hbm_bytes)
        middle = min(max(middle // grid * grid, low + grid), high - grid if high - grid > low else high - 1)
        middle = middle // unit * unit
        if middle <= low or middle >= high:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _step(batch: int) -> int:
    return max(1, 2 ** (max(batch, 1).bit_length() - 1) // 64)


def _between(sizes: dict[int, int], low: int, high: int, available: int) -> int:
    """The batch at which the line through the two ends reaches the memory; the middle if an end is not known."""
    if low not in sizes or sizes[high] <= sizes[low]:
        return (low + high) // 2
    share = (available - sizes[low]) / (sizes[high] - sizes[low])
    guess = low + int(share * (high - low))
    quarter = (high - low) // 8  # never creep along one end
    return min(max(guess, low + quarter), high - quarter)


def versions() -> dict[str, str]:
    from importlib import metadata

    import vit_tpu

    return {"vit_tpu": vit_tpu.__version__, "tensorflow": metadata.version("tensorflow")}
