"""`examine`: all checks of the doctor, in order."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from vit_tpu import config as configs
from vit_tpu.diagnose import environment, run
from vit_tpu.diagnose.findings import Finding
from vit_tpu.diagnose.machine import Machine, look
from vit_tpu.errors import UserError
from vit_tpu.settings import Config


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
        replicas = max(machine.tpus, len(machine.gpus), 1) if loaded.strategy in ("auto", "mirrored", "tpu") else 1
    policy = loaded.precision if hardware == here else None
    return [*environment.check(machine, policy), *run.check(loaded, machine, replicas, hardware)]
