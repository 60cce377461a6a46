"""The folder of a run: where it is, whose it is, and what is continued from it."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Mapping
from typing import Any

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
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
        """Returns the folder, not made yet; if none is asked for, an unfinished run of this config under runs/, or a
        free name.

        Raises:
          UserError: it holds something else, or a run with another configuration.
        """
        folder = cls(path) if path is not None else cls._unfinished_or_free(f"runs/{config.data.source}", config)
        if folder.path.exists():
            folder._check_same_run(config)
        return folder

    @classmethod
    def _unfinished_or_free(cls, base: str, config: Config) -> Workdir:
        number, folder = 1, cls(base)
        while folder.path.exists():
            if (
                folder.interrupted()
                and configs.differences(configs.load_config(folder.path / "config.yaml"), config) == []
            ):
                return folder
            number += 1
            folder = cls(f"{base}-{number}")
        return folder

    def interrupted(self) -> bool:
        """Whether the folder holds a run that was stopped and can go on."""
        return self.summary().get("status") == "interrupted"

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json says, or nothing."""
        written = self.path / "summary.json"
        return json.loads(written.read_text()) if written.exists() else {}

    def make(self, config: Config) -> None:
        """Makes the folder, locks it for this run and writes the config into it.

        Raises:
          UserError: it cannot be made or written to, or another run is at work in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._write("config.yaml", configs.to_yaml(config))
        except OSError as error:
            raise UserError(
                f"workdir {self.path} cannot be written to ({error.strerror}): choose another with --workdir"
            ) from None

    def _lock(self) -> None:
        self.lock = open(self.path / ".lock", "a+")  # noqa: SIM115  (held until the run ends; the system frees it if we die)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            owner = self.lock.read().strip() or "another process"
            raise UserError(f"workdir {self.path} is in use by {owner}: wait for it, or choose another") from None
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.lock.flush()

    def release(self) -> None:
        """Lets other runs use the folder."""
        self.lock.close()
        (self.path / ".lock").unlink(missing_ok=True)

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
