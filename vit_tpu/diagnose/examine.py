"""`examine`: all checks of the doctor, in order."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable

from vit_tpu import config as configs
from vit_tpu import devices
from vit_tpu import mesh as meshes
from vit_tpu.diagnose import environment, memory, run, workers
from vit_tpu.diagnose.findings import Finding
from vit_tpu.diagnose.machine import Machine, look
from vit_tpu.errors import UserError
from vit_tpu.settings import Config


@dataclasses.dataclass(frozen=True)
class Needs:
    """The memory of a config's step: `needs`, and `measure`, which gives it for a changed config."""

    needs: memory.Breakdown
    measure: Callable[[Config], memory.Breakdown]


def needs(config: Config, hardware: str | None = None, replicas: int | None = None) -> Needs:
    """Returns the memory of a step; data is opened only where the config does not say how many classes there are.

    Args:
      config: checked.
      hardware: "CPU", "GPU" or "TPU"; None: what is here.
      replicas: devices that share a batch; None: what is here.

    Raises:
      UserError: the batch does not divide; names batches that do.
    """
    import tensorflow as tf

    from vit_tpu.tpu import trace

    counts = {kind: len(tf.config.list_physical_devices(kind)) for kind in ("TPU", "GPU")}
    here = "TPU" if config.strategy == "tpu" or config.tpu else next((kind for kind, n in counts.items() if n), "CPU")
    kind = hardware or here
    shared = replicas or (max(counts.get(here, 1), 1) if kind == here and config.strategy != "cpu" else 1)
    mesh = meshes.parse(config.mesh, config.shard)
    devices.check_batch(
        config.training.batch_size,
        mesh.data if mesh and mesh.partitioned else shared,
        config.training.accumulation_steps,
    )
    classes, channels = trace.data_shape(config)
    measure = functools.partial(
        memory.breakdown, classes=classes, channels=channels, replicas=shared, hardware=kind
    )  # fmt: skip
    return Needs(measure(config), measure)


def examine(
    config: str | pathlib.Path | Config | None = None,
    overrides: Iterable[str] = (),
    *,
    workdir: str | None = None,
    hardware: str | None = None,
    replicas: int | None = None,
    machine: Machine | None = None,
) -> list[Finding]:
    """Returns what is right and wrong with this machine and, if one is given, with a run.

    Args:
      config: a YAML file or a Config; None: the machine alone.
      overrides: as for `load_config`.
      workdir: the folder that the run would have.
      hardware: "CPU", "GPU" or "TPU" for the shapes; None: what is here.
      replicas: devices that share a batch; None: what is here.
      machine: a snapshot; None: taken now.
    """
    machine = machine or look()
    here = "TPU" if machine.tpus else "GPU" if machine.gpus else "CPU"
    asked = config is not None or bool(list(overrides)) or workdir is not None
    if not asked:
        return environment.check(machine)
    given = [*overrides, *([f"workdir={workdir}"] if workdir else [])]
    try:
        loaded = config if isinstance(config, Config) else configs.load_config(config, given)
        configs.validate(loaded)
    except UserError as error:
        return [*environment.check(machine), Finding("error", "config", str(error))]
    if hardware is None:
        hardware = "TPU" if loaded.strategy == "tpu" or loaded.tpu else here
    if replicas is None:
        several = loaded.strategy in ("auto", "mirrored", "multi_worker", "tpu")
        replicas = max(machine.tpus, len(machine.gpus), 1) if several else 1
        replicas *= workers.count(loaded, machine.environment)
    policy = loaded.precision if hardware == here else None
    return [
        *environment.check(machine, policy),
        *workers.check(loaded, machine.environment),
        *run.check(loaded, machine, replicas, hardware),
    ]
