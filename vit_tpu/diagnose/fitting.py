"""Whether a step fits into memory, and what of it is kept where it need not be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vit_tpu import config as configs
from vit_tpu.diagnose import savings
from vit_tpu.diagnose.findings import Finding
from vit_tpu.diagnose.machine import Machine
from vit_tpu.diagnose.memory import Breakdown, size_text
from vit_tpu.errors import UserError
from vit_tpu.settings import Config

LARGE_STATE = 2**30  # bytes that are worth sharding


def check(
    config: Config, machine: Machine, measure: savings.Measure, replicas: int = 1, hardware: str = "CPU"
) -> Iterator[Finding]:
    """Yields findings on the memory of a step, all of them estimates from the shapes.

    Args:
      config: checked.
      machine: from `machine.look()`.
      measure: the breakdown of a config.
      replicas: devices that share a batch.
      hardware: "CPU", "GPU" or "TPU".
    """
    needs, there = measure(config), _there(machine, hardware)
    share = replicas if hardware == "CPU" else 1  # devices that are really one host share its memory
    whole, state = needs.total * share, needs.state * share
    where = "this host has" if hardware == "CPU" else f"a {hardware} has"
    biggest = max((name for name in needs.parts), key=lambda name: needs.parts[name])
    if there and state > there:
        yield Finding(
            "error", "memory", f"weights and optimizer state take {size_text(state)} (estimated), and {where} "
            f"{size_text(there)}", _state_cure(config, measure, there // share),
        )  # fmt: skip
    elif there and whole > there:
        yield Finding(
            "error", "memory", f"a step needs about {size_text(whole)} (estimated; {biggest} "
            f"{size_text(share * needs.parts[biggest])}), and {where} {size_text(there)}",
            _cure(config, measure, there // share),
        )  # fmt: skip
    else:
        of = f" of {size_text(there)}" if there else ""
        yield Finding(
            "ok", "memory", f"a step needs about {size_text(whole)}{of} (estimated): {biggest} "
            f"{size_text(share * needs.parts[biggest])}",
        )  # fmt: skip
        yield from _activations(config, measure, needs, there)
    for remark in needs.remarks():
        yield Finding("warning", "memory", remark, "training.accumulation_steps=1, or a larger batch")
    yield from _unsharded(config, measure, needs, replicas, hardware)


def _there(machine: Machine, hardware: str) -> int | None:
    if hardware == "CPU":
        return machine.memory_bytes
    sizes = [gpu.memory for gpu in machine.gpus if gpu.memory]
    return min(sizes) if hardware == "GPU" and sizes else None


def _state_cure(config: Config, measure: savings.Measure, there: int) -> str:
    fits = [s for s in savings.alone(config, measure, there) if measure(s.config).state <= there]
    return f"{fits[0].change}, a smaller model, or a larger host" if fits else "a smaller model, or a larger host"


def _cure(config: Config, measure: savings.Measure, there: int) -> str:
    enough = [s for s in savings.alone(config, measure, there) if s.total <= there]
    if enough:
        return f"{enough[0].change} leaves {size_text(enough[0].total)} ({enough[0].costs}); --memory lists more"
    steps = savings.together(config, measure, there)
    if steps:
        return f"{' '.join(s.change for s in steps)} leaves {size_text(steps[-1].total)}; --memory lists each"
    return "a smaller model, or more devices"


def _activations(config: Config, measure: savings.Measure, needs: Breakdown, there: int | None) -> Iterator[Finding]:
    large = needs.parts["activations"]
    if not there or large < there / 2 or config.model.remat != "none" or config.model.scan:
        return
    less = measure(configs.replace(config, "model.remat", "block")).total
    if less < 0.8 * needs.total:
        most = next(iter(needs.by("kind")))
        yield Finding(
            "note", "memory", f"activations take {size_text(large)} of {size_text(there)}, most of it {most}",
            f"model.remat=block saves {size_text(needs.total - less)} for a third more computing",
        )  # fmt: skip


def _unsharded(
    config: Config, measure: savings.Measure, needs: Breakdown, replicas: int, hardware: str
) -> Iterator[Finding]:
    if hardware != "TPU" or replicas < 2 or config.shard != "none" or needs.state < LARGE_STATE:
        return
    mesh = config.mesh or f"data={replicas}"
    try:
        less = measure(configs.validate(dataclasses.replace(config, mesh=mesh, shard="state"))).state
    except UserError:
        return
    if less < 0.9 * needs.state:
        yield Finding(
            "note", "memory", f"each of {replicas} cores holds the whole state, {size_text(needs.state)}",
            f"mesh={mesh} shard=state leaves {size_text(less)} on each, for more exchange between them",
        )  # fmt: skip
