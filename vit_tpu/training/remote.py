"""What a run on a TPU needs to hold, checked before anything is compiled: paths, data, number formats."""

from __future__ import annotations

import os
from typing import Any

from vit_tpu.data import service
from vit_tpu.data.source import Source
from vit_tpu.devices import Devices
from vit_tpu.errors import UserError
from vit_tpu.settings import Config

LOCAL = ("local", "")


def is_remote(config: Config) -> bool:
    """Whether the run is on a TPU whose hosts are other machines, which do not see this one's disks."""
    return config.strategy in ("auto", "tpu") and config.tpu is not None and config.tpu not in LOCAL


def check_paths(config: Config, workdir: str | os.PathLike[str] | None = None) -> None:
    """Raises UserError for paths on this machine's disks in a run on a TPU elsewhere; says what to use instead."""
    if not is_remote(config):
        return
    paths: dict[str, Any] = {
        "data.path": config.data.path, "data.cache_dir": config.data.cache_dir, "init_from": config.init_from,
        "resume": None if config.resume in ("auto", "never") else config.resume,
        "workdir": workdir or config.workdir or f"runs/{config.data.source}",
    }  # fmt: skip
    local = [f"{key}={path}" for key, path in paths.items() if path and "://" not in str(path)]
    if local:
        raise UserError(
            f"{', '.join(local)}: the hosts of the TPU {config.tpu} do not see this machine's disk; use "
            "gs://BUCKET/PATH for each, or run this command on the TPU VM itself with tpu=local, where they are right"
        )


def check(config: Config, here: Devices, *sources: Source) -> list[str]:
    """Returns what there is to say about a run on a TPU, nothing on other devices.

    Raises:
      UserError: data that the TPU's hosts cannot read, or a number format that TPUs do not have.
    """
    if here.kind != "TPU":
        return []
    if config.precision == "mixed_float16":
        raise UserError("TPUs have no float16: use precision=mixed_bfloat16, which needs no loss scale")
    for source in sources if is_remote(config) else ():
        if source.encoded and service.needs_python(source):
            raise UserError(
                f"{source.name} is read by Python, which the hosts of the TPU {config.tpu} do not run for us: write it "
                "as TFRecords, or train on a single TPU VM with tpu=local"
            )
    notes = []
    if config.precision == "float32":
        notes.append(
            "float32 on a TPU: mixed_bfloat16 is recommended, its matrix units multiply in bfloat16 and activations "
            "take half the memory (--precision=mixed_bfloat16)"
        )
    if config.training.steps_per_execution == 1:
        notes.append("steps_per_execution=1 returns to Python after each step, while the TPU waits: leave it out")
    return notes
