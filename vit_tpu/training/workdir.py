"""The folder of a run: where it is, whose it is, and what is continued from it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_tpu import config as configs
from vit_tpu.config import Config
from vit_tpu.errors import UserError
from vit_tpu.training import state

# What may differ between the parts of one run: nothing here changes the mathematics of a step already taken.
FREE = (
    "workdir",
    "training.epochs",
    "training.steps",
    "training.log_every",
    "training.evaluate_every",
    "training.checkpoint_every",
    "training.steps_per_execution",
    "training.jit",
    "training.profile",
    "training.max_skipped",
    "training.evaluate_ema",
    "strategy",
    "tpu",
    "data.max_broken",
)


class Workdir:
    """Paths of a run's folder.

    Attributes:
      path: the folder. checkpoints: its checkpoint folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, config: Config) -> Workdir:
        """Returns the folder, not made yet; a free name under runs/ if none is asked for.

        Raises:
          UserError: it holds something else, or a run with another configuration.
        """
        folder = cls(path if path is not None else _free(f"runs/{config.data.source}"))
        if folder.path.exists():
            folder._check_same_run(config)
        return folder

    def make(self, config: Config) -> None:
        """Makes the folder and writes the config into it.

        Raises:
          UserError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write("config.yaml", configs.to_yaml(config))
        except OSError as error:
            raise UserError(
                f"workdir {self.path} cannot be written to ({error.strerror}): choose another with --workdir"
            ) from None

    def _check_same_run(self, config: Config) -> None:
        written = self.path / "config.yaml"
        if not self.path.is_dir():
            raise UserError(f"workdir {self.path} is a file: choose a folder")
        if not written.exists():
            if any(self.path.iterdir()):
                raise UserError(f"workdir {self.path} holds files that are not a run's: choose an empty or new folder")
            return
        before = configs.load_config(written)
        changed = [line for line in configs.differences(before, config) if line.split(":")[0] not in FREE]
        if changed:
            raise UserError(
                f"workdir {self.path} belongs to a run with another configuration "
                f"({'; '.join(changed[:4])}): choose another workdir"
            )

    def resume(self, model: Any) -> int:
        """Fills the model from the newest whole checkpoint, if there is one; returns the steps it has taken."""
        found = state.newest(self.checkpoints)
        if found is None:
            return 0
        path, manifest = found
        state.restore(model, path)
        return int(manifest["step"])

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(values, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(text)
        os.replace(temporary, self.path / name)


def _free(base: str) -> str:
    """Returns `base`, or `base-2`, `base-3` ... if there is something already."""
    number, candidate = 1, base
    while pathlib.Path(candidate).exists():
        number += 1
        candidate = f"{base}-{number}"
    return candidate
