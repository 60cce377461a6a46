"""What a load or a save did, to read and to store."""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_tpu.weights.layout import shown


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    Attributes:
      path: the file.
      source: the family it was recognised as, and by what.
      loaded: our paths whose values are the file's.
      resized: our path -> how it was resized.
      new: our path -> what it was set to instead.
      unused: the file's names that went nowhere because `allow` says so.
      ignored: the file's names that have no part in a forward pass (optimizer state, mask tokens).
      notes: what could not be checked.
      bytes: size of the file.
      sha256: of the file.
    """

    path: str
    source: str
    loaded: tuple[str, ...]
    resized: dict[str, str]
    new: dict[str, str]
    unused: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    bytes: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for config.yaml and summary.json."""
        return _plain(dataclasses.asdict(self))

    def __str__(self) -> str:
        lines = [f"weights {self.path}", f"  source   {self.source}", f"  loaded   {len(self.loaded)} tensors"]
        lines += [f"  resized  {path}: {how}" for path, how in self.resized.items()]
        lines += _grouped("new", self.new)
        lines += [f"  unused   {shown(self.unused)}"] if self.unused else []
        lines += [f"  ignored  {len(self.ignored)}: {shown(self.ignored, 3)}"] if self.ignored else []
        lines += [f"  note     {note}" for note in self.notes]
        return "\n".join([*lines, f"  file     {self.bytes:,} bytes, sha256 {self.sha256}"])


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What `save_weights` or `convert` wrote.

    Attributes:
      path: the weight file.
      format: its family.
      tensors: how many.
      parameters: how many numbers.
      bytes, sha256: of the file.
      config: the config.json of that family, or {}.
      notes: what a reader of the file must know.
    """

    path: str
    format: str
    tensors: int
    parameters: int
    bytes: int
    sha256: str
    config: dict[str, Any]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    def __str__(self) -> str:
        lines = [
            f"saved {self.path}",
            f"  format   {self.format}",
            f"  tensors  {self.tensors}, {self.parameters:,} parameters",
        ]
        lines += [f"  note     {note}" for note in self.notes]
        return "\n".join([*lines, f"  file     {self.bytes:,} bytes, sha256 {self.sha256}"])


def _grouped(title: str, reasons: dict[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        by_reason.setdefault(reason, []).append(path)
    return [f"  {title:<8} {shown(paths)} = {reason}" for reason, paths in by_reason.items()]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
