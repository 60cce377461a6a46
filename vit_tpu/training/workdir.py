"""The folder of a run: where it is, whose it is, and what lies in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

import yaml

from vit_tpu import config as configs
from vit_tpu import plain
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.training import checkpoints, resume, storage

# Two runs of one config may differ in these and still be the same run to continue.
_HOW = (
    "workdir", "resume", "allow_config_change", "training.on_nonfinite", "training.max_rollbacks", "workers", "worker",
    "worker_timeout",
)  # fmt: skip


class Workdir:
    """Paths of a run's folder, on a local disk or in a store such as gs://.

    Attributes:
      path: the folder. checkpoints: its checkpoint folder. weights: its folder of weights alone.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path).rstrip("/") or "/"
        self.checkpoints = storage.join(self.path, "checkpoints")
        self.weights = storage.join(self.path, "weights")
        self.lock: Any = None
        self.owner = f"process {os.getpid()} on {socket.gethostname()}"

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, config: Config) -> Workdir:
        """Returns the folder, not made yet; if none is asked for, an unfinished run of this config under runs/, or a
        free name.

        Raises:
          UserError: it holds something else, or a run with another configuration.
        """
        folder = cls(path) if path is not None else cls._unfinished_or_free(f"runs/{config.data.source}", config)
        if storage.exists(folder.path):
            folder.check_same_run(config)
            if storage.is_local(folder.path):
                with contextlib.suppress(OSError):  # a folder that cannot be written to is a matter for `make`
                    folder._take()
        return folder

    @classmethod
    def _unfinished_or_free(cls, base: str, config: Config) -> Workdir:
        number, folder = 1, cls(base)
        while storage.exists(folder.path):
            if config.resume == "auto" and folder.unfinished(config):
                return folder
            number += 1
            folder = cls(f"{base}-{number}")
        return folder

    def unfinished(self, config: Config) -> bool:
        """Whether the folder holds a run of this config that was interrupted or killed, and nobody is at work in it."""
        try:
            written = self.config()
            if written is None or self.summary().get("status") == "done" or self._in_use():
                return False
            before = configs.from_dict(resume.known(written), self.path)
        except UserError:  # damaged, or of a version whose values this one does not know: not ours to continue
            return False
        return all(line.split(":")[0] in _HOW for line in configs.differences(before, config))

    def path_of(self, name: str) -> str:
        return storage.join(self.path, name)

    def file(self, name: str) -> str | None:
        """Returns the text of a file in the folder, or None."""
        path = self.path_of(name)
        return storage.read_text(path) if storage.exists(path) else None

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json says, or nothing.

        Raises:
          UserError: it is damaged.
        """
        try:
            found = json.loads(self.file("summary.json") or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.path_of('summary.json')} is damaged: delete it, the checkpoints do not need it")
        return found

    def config(self) -> Mapping[str, Any] | None:
        """Returns what config.yaml says, or None if there is none.

        Raises:
          UserError: it is damaged.
        """
        try:
            text = self.file("config.yaml")
            found = None if text is None else yaml.safe_load(text)
        except (yaml.YAMLError, UnicodeDecodeError):
            text, found = "", None
        if text is not None and not isinstance(found, Mapping):
            raise UserError(
                f"{self.path_of('config.yaml')} is damaged: delete it, the same command continues from the checkpoints"
            )
        return found

    def make(self, config: Config) -> None:
        """Makes the folder, takes it for this run, clears what a killed run left half-written, writes the config.

        Raises:
          UserError: it cannot be made or written to, or another run is at work in it.
        """
        try:
            storage.make_folder(self.path)
            self._take()
            self._write("config.yaml", configs.to_yaml(config))
            storage.remove(
                self.path_of("summary.json")
            )  # of the part before: a killed run must not look like a done one
            for name in storage.leftovers(self.path) if storage.is_local(self.path) else ():
                storage.remove(self.path_of(name))
            left = checkpoints.sweep(self.checkpoints) + checkpoints.sweep(self.weights)
        except storage.FAILURES as error:
            raise UserError(
                f"workdir {self.path} cannot be written to ({storage.reason(error)}): choose another with --workdir"
            ) from None
        if left:
            print(f"{self.path}: removed {left} unfinished checkpoint(s) of a run that was killed", flush=True)

    def _take(self) -> None:
        if not storage.is_local(self.path):
            # No locks there: the last one who came has the folder, and the one before notices when it saves.
            self.owner += f" ({secrets.token_hex(4)})"
            self._write(".owner", self.owner)
            return
        if self.lock is not None:
            return
        lock = open(self.path_of(".lock"), "a+")  # noqa: SIM115  (held until the run ends; the system frees it if we die)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise UserError(f"workdir {self.path} is in use by {owner}: wait for it, or choose another") from None
        lock.truncate(0)
        lock.write(self.owner)
        lock.flush()
        self.lock = lock

    def _in_use(self) -> bool:
        path = self.path_of(".lock")
        if not storage.is_local(path) or not os.path.exists(path):
            return False
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def still_ours(self) -> None:
        """Raises UserError if another run has taken a folder in a store meanwhile; a local one cannot be taken."""
        if storage.is_local(self.path):
            return
        now = self.file(".owner")
        if now != self.owner:
            raise UserError(
                f"workdir {self.path} was taken over by {now or 'somebody who removed .owner'}: this run stops so that "
                "the two do not mix; choose another workdir for one of them"
            )

    def release(self) -> None:
        """Lets other runs use the folder."""
        if self.lock is not None:
            # The file stays: removing it could take the lock from under a run that has just opened it.
            self.lock.truncate(0)
            self.lock.close()
            self.lock = None

    def check_same_run(self, config: Config) -> None:
        """Raises UserError if the folder holds something else than a run that this config would continue."""
        if not storage.is_folder(self.path):
            raise UserError(f"workdir {self.path} is a file: choose a folder")
        before = self.config()
        if before is None:
            foreign = [name for name in storage.names(self.path) if name not in (".lock", ".owner")]
            if foreign and not checkpoints.steps(self.checkpoints):
                raise UserError(f"workdir {self.path} holds files that are not a run's: choose an empty or new folder")
            return
        if checkpoints.steps(self.checkpoints):
            resume.compare(before, config, self.path)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a file of the folder.

        Raises:
          UserError: it cannot be written.
        """
        try:
            self._write(name, json.dumps(plain.finite(values), indent=1) + "\n")
        except storage.FAILURES as error:
            raise UserError(
                f"{self.path_of(name)} cannot be written ({storage.reason(error)}): free space; the "
                "checkpoints are whole"
            ) from None

    def _write(self, name: str, text: str) -> None:
        storage.write_text(self.path_of(name), text)
