"""Opens weight files without reading them: a dict of `Tensor`s by name. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any

from vit_tpu.errors import UserError, nearest
from vit_tpu.weights.containers import HOW, PICKLED, explained, open_npz, open_safetensors
from vit_tpu.weights.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class Archive:
    """An open weight file.

    Attributes:
      path: as the user wrote it.
      files: what is read; several for a sharded file.
      tensors: by the file's names, after the sub-tree is taken.
      metadata: texts the file carries beside its arrays.
      config: the config.json beside the file, or {}.
      prefix: of the sub-tree ("" for none).
    """

    path: str
    files: tuple[pathlib.Path, ...]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    config: dict[str, Any]
    prefix: str = ""

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def sha256(self) -> str:
        """Returns the digest of the file (of its shards one after the other)."""
        digest = hashlib.sha256()
        for file in self.files:
            with open(file, "rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        return digest.hexdigest()

    def verify(self) -> None:
        """Reads every checksum, so that a damaged file is found before anything changes."""
        for file in self.files:
            if zipfile.is_zipfile(file):
                with explained(file), zipfile.ZipFile(file) as archive:
                    if (bad := archive.testzip()) is not None:
                        raise UserError(f"{file} is damaged: the checksum of {bad} does not match; get the file again")


@contextlib.contextmanager
def opened(path: str) -> Iterator[Archive]:
    """Opens a weight file: .npz, .safetensors, a sharded .safetensors.index.json, or a folder that holds one of them.

    Args:
      path: "file.npz", or "file.npz:img" for the sub-tree "img".

    Raises:
      UserError: no such file, a pickle, or broken; says what to do.
    """
    file, subtree = _split(str(path))
    if file.is_dir():
        file = _inside(file)
    with contextlib.ExitStack() as stack:
        files, tensors, metadata = _open(file, stack)
        prefix = ""
        if subtree:
            prefix, tensors = _subtree(tensors, subtree, file)
        archive = Archive(str(path), files, tensors, metadata, _config_beside(file), prefix)
        try:
            yield archive
        except UserError as error:
            if str(file) in str(error) or str(path) in str(error):
                raise
            raise UserError(f"{path}: {error}") from None


def _open(
    file: pathlib.Path, stack: contextlib.ExitStack
) -> tuple[tuple[pathlib.Path, ...], dict[str, Tensor], dict[str, str]]:
    try:
        with open(file, "rb") as stream:
            head = stream.read(16)
    except OSError as error:
        siblings = [str(p) for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UserError(f"weights {file} cannot be read ({error.strerror}){nearest(str(file), siblings)}") from None
    if file.name.endswith(".index.json"):
        return _open_shards(file, stack)
    if head[:4] == b"PK\x03\x04":
        tensors, metadata = open_npz(file, stack)
    elif len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        tensors, metadata = open_safetensors(file, stack)
    elif head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        raise UserError(f"{file} {PICKLED}; {HOW}")
    elif head[:8] == b"\x89HDF\r\n\x1a\n":
        raise UserError(
            f"{file} is an HDF5 file: load it with model.load_weights, or save it again with vit_tpu.save_weights"
        )
    elif not head:
        raise UserError(f"{file} is empty; get the file again")
    else:
        raise UserError(
            f"{file} is not a weight file: it starts with neither .npz (a zip) nor .safetensors; get it again"
        )
    if not tensors:
        raise UserError(f"{file} holds no arrays")
    return (file,), tensors, metadata


def _split(path: str) -> tuple[pathlib.Path, str]:
    """Splits "file.npz:img" unless a file of the whole name exists."""
    head, colon, tail = path.rpartition(":")
    if colon and len(head) > 1 and not pathlib.Path(path).exists():
        return pathlib.Path(head), tail
    return pathlib.Path(path), ""


def _inside(folder: pathlib.Path) -> pathlib.Path:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).exists():
            return folder / name
    found = sorted([*folder.glob("*.safetensors"), *folder.glob("*.npz")])
    if len(found) == 1:
        return found[0]
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]
    if pickles and not found:
        raise UserError(f"{pickles[0]} {PICKLED}; {HOW}")
    names = ", ".join(p.name for p in found[:5]) or "none"
    raise UserError(
        f"folder {folder} does not hold one weight file (.safetensors, .npz) but {len(found)} ({names}): name it"
    )


def _subtree(tensors: dict[str, Tensor], subtree: str, file: pathlib.Path) -> tuple[str, dict[str, Tensor]]:
    """Takes the tensors below "img", whether the file says "img/", "params/img/" or "img."."""
    for start in ("", "params/", "opt/target/", "model/"):
        for joint in ("/", "."):
            prefix = f"{start}{subtree.strip('/.')}{joint}"
            found = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
            if found:
                return prefix, found
    tops = {"/".join(name.removeprefix("params/").split("/")[:-1]) for name in tensors}
    tops = {part for top in tops for part in (top, top.split("/")[0]) if part}
    raise UserError(f'{file} holds nothing below "{subtree}"{nearest(subtree, tops)}; it starts with {_some(tops)}')


def _some(names: set[str]) -> str:
    shortest = sorted(names, key=lambda name: (name.count("/"), name))[:6]
    return ", ".join(shortest) or "no folders"


def _config_beside(file: pathlib.Path) -> dict[str, Any]:
    path = file.parent / "config.json"
    if not file.name.endswith((".safetensors", ".index.json")) or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}, which describes the weights beside it, is not JSON ({error}): repair or remove it"
        ) from None
    return config if isinstance(config, dict) else {}


def _open_shards(
    index: pathlib.Path, stack: contextlib.ExitStack
) -> tuple[tuple[pathlib.Path, ...], dict[str, Tensor], dict[str, str]]:
    with explained(index):
        places = json.loads(index.read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    files = tuple(index.parent / name for name in sorted(set(places.values())))
    for file in files:
        if not file.is_file():
            raise UserError(f"{index} names the shard {file.name}, which is not beside it; get all of them")
        tensors |= open_safetensors(file, stack)[0]
    missing = sorted(set(places) - set(tensors))
    if missing:
        raise UserError(f"{index} promises {missing[0]}, which no shard holds; get the shards again")
    return files, tensors, {}
