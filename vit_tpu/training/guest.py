"""What a worker that does not write takes for the run's folder, and for what worker 0 decides about it."""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from typing import Any

from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.training import checkpoints, resume, storage
from vit_tpu.training.hosts import Team
from vit_tpu.training.workdir import Workdir

_TOKEN = ".workers"  # worker 0 leaves it for the others to find


class Guest(Workdir):
    """The folder of worker 0, read only; what this worker logs itself goes to a temporary folder.

    Args:
      path: the folder of worker 0.
    """

    def __init__(self, path: str):
        self.temporary = tempfile.TemporaryDirectory(prefix="vit_tpu-worker-")
        super().__init__(self.temporary.name)
        self.home = Workdir(path)
        self.checkpoints = self.home.checkpoints

    def make(self, config: Config) -> None:
        """Does nothing: worker 0 makes the folder."""

    def summary(self) -> dict[str, Any]:
        return self.home.summary()

    def release(self) -> None:
        self.temporary.cleanup()


def open_folder(team: Team, opened: Callable[[], Workdir]) -> Workdir:
    """Returns the folder that worker 0 opens, or this worker's view of it."""
    if team.size == 1:
        return opened()
    folder = opened() if team.chief else None

    def place() -> str:
        assert folder is not None
        return os.path.abspath(folder.path) if storage.is_local(folder.path) else folder.path

    path = team.agree("workdir", place)
    return folder if folder is not None else Guest(path)


def make_folder(team: Team, folder: Workdir, config: Config) -> None:
    """Makes the folder on worker 0 and checks that all the others see it.

    Raises:
      UserError: a worker does not; worker 0 gets a `WorkerError` that says so.
    """
    folder.make(dataclasses.replace(config, worker=None))
    if team.size == 1:
        return
    token = secrets.token_hex(8)
    if team.chief:
        storage.write_text(folder.path_of(_TOKEN), token)
    token = team.agree("folder", lambda: token)
    if isinstance(folder, Guest):
        _seen(team, folder.home.path, lambda: folder.home.file(_TOKEN) == token)
    team.meet("the folder")


def agree_start(team: Team, found: Callable[[], resume.Start]) -> resume.Start:
    """Returns what worker 0 found to continue from, once this worker sees it, too."""
    values = team.agree("checkpoint", lambda: dataclasses.asdict(found()))
    start = resume.Start(**{**values, "notes": tuple(values["notes"])})
    if start.path and not team.chief:
        _checkpoint_seen(team, start.path)
    return start


def agree_checkpoint(team: Team, folder: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the newest whole checkpoint with its manifest, as worker 0 finds it."""
    found = team.agree("newest checkpoint", lambda: checkpoints.newest(folder))
    if found is None:
        return None
    if not team.chief:
        _checkpoint_seen(team, found[0])
    return found[0], found[1]


def _checkpoint_seen(team: Team, path: str) -> None:
    _seen(team, path, lambda: storage.exists(storage.join(path, checkpoints.MANIFEST)))


def _seen(team: Team, path: str, look: Callable[[], bool]) -> None:
    until = time.monotonic() + team.timeout / 5  # network file systems show new files late
    while not look():
        if time.monotonic() > until:
            raise UserError(
                f"it does not see {path}, which worker 0 writes to and all read from: use a folder on a disk that all "
                "workers share under one path, or in a store such as gs://bucket/run"
            )
        time.sleep(0.1)
