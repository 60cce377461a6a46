"""Checkpoint folders: written whole or not at all, verified by hash, kept by a rule.

A checkpoint is a folder `<step>/` with `model.safetensors` (the weights, by their own names), `training.safetensors`
(all else) and `manifest.json` (files with sizes and hashes, arrays with shapes and dtypes, and what the caller adds).
Arrays beyond `SHARD_BYTES` go into several files, `model-00001-of-00003.safetensors` and so on. On a local disk the
folder appears under its name by a rename; in a store without rename the manifest, written last, makes it complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from absl import logging

from vit_tpu.errors import UserError
from vit_tpu.training import arrays_file, storage

FORMAT = 2
SHARD_BYTES = 1 << 30
MANIFEST = "manifest.json"
WEIGHTS = "parameters/"
Arrays = Mapping[str, tuple[np.ndarray, str]]  # name -> (array, dtype name)


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints stay.

    Attributes:
      last: the newest so many.
      every: and those of steps that are its multiples; 0 for none.
      best: and the one with the best validation accuracy.
    """

    last: int = 2
    every: int = 0
    best: bool = True


def never() -> bool:
    return False


def write(
    root: str, step: int, arrays: Arrays, manifest: Mapping[str, Any], abandoned: Callable[[], bool] = never,
    metadata: Mapping[str, str] | None = None, shard_bytes: int = SHARD_BYTES,
) -> str:  # fmt: skip
    """Writes the checkpoint of `step`; returns its folder.

    Args:
      root: the run's `checkpoints` folder.
      step: training steps taken.
      arrays: the state; names below "parameters/" are the weights.
      manifest: plain values to write down with it.
      abandoned: asked now and then; True gives up and leaves nothing.
      metadata: texts for the header of the weight files.
      shard_bytes: largest file, unless one array alone is larger.

    Raises:
      UserError: the disk is full or not writable; nothing half-written stays.
      FloatingPointError: an array is not finite; nothing is written.
      AbandonedError: as asked.
    """
    for name, (array, dtype) in arrays.items():
        if not _finite(array, dtype):
            raise FloatingPointError(f"step {step}: {name} is not finite, so no checkpoint was written")
    target = storage.join(root, f"{step:08d}")
    place = None
    try:
        if not storage.is_local(target):
            storage.remove(storage.join(target, MANIFEST))
        place = storage.begin(target)
        weights = {name.removeprefix(WEIGHTS): v for name, v in arrays.items() if name.startswith(WEIGHTS)}
        rest = {name: v for name, v in arrays.items() if not name.startswith(WEIGHTS)}
        files = write_shards(place, "model", weights, abandoned, metadata or {}, shard_bytes)
        files |= write_shards(place, "training", rest, abandoned, {}, shard_bytes)
        record = {
            "format": FORMAT, "step": step, **manifest, "files": files,
            "arrays": {name: [list(array.shape), dtype] for name, (array, dtype) in arrays.items()},
        }  # fmt: skip
        with storage.writing(storage.join(place, MANIFEST)) as file:
            file.write(json.dumps({**record, "checksum": _checksum(record)}, indent=1).encode())
        storage.commit(place, target)
    except arrays_file.AbandonedError:
        storage.remove(place or target)
        raise
    except storage.FAILURES as error:
        if place is not None:
            storage.remove(place)
        raise UserError(
            f"the checkpoint of step {step} cannot be written to {root} ({storage.reason(error)}): free space or "
            "choose another workdir; the checkpoints before it are whole"
        ) from None
    return target


def write_shards(
    folder: str, stem: str, arrays: Arrays, abandoned: Callable[[], bool] = never,
    metadata: Mapping[str, str] | None = None, shard_bytes: int = SHARD_BYTES,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Writes arrays to `<stem>.safetensors`, or to several with an index; returns {file: {"bytes", "sha256"}}."""
    shards: list[dict[str, tuple[np.ndarray, str]]] = [{}]
    used = 0
    for name, (array, dtype) in arrays.items():
        if shards[-1] and used + array.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = (array, dtype)
        used += array.nbytes
    files: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{part}.safetensors"
        files[name] = arrays_file.write(storage.join(folder, name), shard, metadata or {}, abandoned)
        places |= dict.fromkeys(shard, name)
    if len(shards) > 1:  # other programs find the parts by it
        text = json.dumps({"metadata": dict(metadata or {}), "weight_map": places}, indent=1).encode()
        name = f"{stem}.safetensors.index.json"
        with storage.writing(storage.join(folder, name)) as file:
            file.write(text)
        files[name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    return files


def write_weights(
    root: str, step: int, arrays: Arrays, averaged: bool, metadata: Mapping[str, str],
    abandoned: Callable[[], bool] = never,
) -> str:  # fmt: skip
    """Writes the weights of a state alone, as `vit_tpu.load_weights` and other programs read them.

    Args:
      root: the run's `weights` folder.
      step: names the folder in it.
      arrays: the state.
      averaged: the moving average where there is one for a parameter.
      metadata: texts for the header.
      abandoned: asked now and then.
    """
    chosen = {}
    for name, value in arrays.items():
        if name.startswith(WEIGHTS):
            path = name.removeprefix(WEIGHTS)
            chosen[path] = arrays.get(f"ema/{path}", value) if averaged else value
    target = folder_of(root, step)
    try:
        place = storage.begin(target)
        write_shards(place, "model", chosen, abandoned, metadata)
        storage.commit(place, target)
    except storage.FAILURES as error:
        raise UserError(
            f"the weights of step {step} cannot be written to {root} ({storage.reason(error)}): free space or choose "
            "another workdir; the checkpoint of this step is whole"
        ) from None
    return target


def steps(root: str) -> list[int]:
    """Returns the steps of the checkpoint folders, the newest first; on a store without rename only complete ones."""
    found = [int(name) for name in storage.names(root) if name.isdigit()]
    if not storage.is_local(root):
        found = [step for step in found if storage.exists(storage.join(folder_of(root, step), MANIFEST))]
    return sorted(found, reverse=True)


def folder_of(root: str, step: int) -> str:
    return storage.join(root, f"{step:08d}")


def newest(root: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the newest checkpoint that is whole, with its manifest; damaged ones are named and passed over."""
    for step in steps(root):
        path = folder_of(root, step)
        try:
            return path, verified(path)
        except ValueError as error:
            logging.warning("checkpoint %s is damaged (%s) and passed over", path, error)
    return None


def read_manifest(path: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
      ValueError: there is none, or it is damaged.
    """
    try:
        manifest = json.loads(storage.read_text(storage.join(path, MANIFEST)))
    except storage.FAILURES as error:
        raise ValueError(f"{MANIFEST}: {storage.reason(error)}") from None
    except ValueError:
        raise ValueError(f"{MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("step"), int):
        raise ValueError(f"{MANIFEST} names no step")
    if manifest.get("format") == FORMAT:
        record = {name: value for name, value in manifest.items() if name != "checksum"}
        if manifest.get("checksum") != _checksum(record):
            raise ValueError(f"{MANIFEST} does not match its checksum")
    return manifest


def verified(path: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose every byte has been read and matches its hash.

    Raises:
      ValueError: what is damaged.
    """
    manifest = read_manifest(path)
    files = manifest.get("files", {})
    if manifest.get("format") == 1:
        files = {"state.npz": {"sha256": manifest.get("sha256")}}
    for look in (_size_differs, _hash_differs):  # the cheap look at all files first
        for name, facts in files.items():
            try:
                wrong = look(storage.join(path, name), facts)
            except storage.FAILURES as error:
                wrong = storage.reason(error)
            if wrong:
                raise ValueError(f"{name}: {wrong}")
    return manifest


def _size_differs(path: str, facts: Mapping[str, Any]) -> str | None:
    size = storage.size(path)
    expected = facts.get("bytes", size)
    return None if size == expected else f"it has {size:,} bytes, not {expected:,}"


def _hash_differs(path: str, facts: Mapping[str, Any]) -> str | None:
    return None if arrays_file.sha256(path) == facts["sha256"] else "it does not match its hash"


def read(path: str, manifest: Mapping[str, Any]) -> Iterable[tuple[str, np.ndarray, str]]:
    """Yields (name, array, dtype name) of a checkpoint, one array in memory at a time."""
    for name in manifest["files"]:
        if name.endswith(".safetensors"):
            prefix = WEIGHTS if name.startswith("model") else ""
            for key, array in arrays_file.read(storage.join(path, name)):
                yield prefix + key, array, manifest["arrays"][prefix + key][1]


def prune(
    root: str, keep: Keep, step: int, best: int | None = None, foreign: Collection[int] = ()
) -> list[str]:  # fmt: skip
    """Removes the checkpoints before `step` that the rule does not keep; returns the folders that went.

    Later ones and `foreign` ones are no part of this run's past (damaged, or not yet reached again): they do not count.
    """
    past = [s for s in steps(root) if s <= step and s not in foreign]
    stay = set(past[: max(keep.last, 1)])
    stay |= {s for s in past if keep.every and s % keep.every == 0}
    stay |= {s for s in past if keep.best and s == best}
    gone = [folder_of(root, s) for s in past if s not in stay]
    for path in gone:
        if not storage.is_local(path):
            storage.remove(storage.join(path, MANIFEST))
        storage.remove(path)
    return gone


def sweep(root: str) -> int:
    """Removes what a killed writer left under `root`; returns how many. Call it when no other run is at work there."""
    left = storage.leftovers(root) if storage.is_local(root) else []
    if not storage.is_local(root):
        complete = {f"{step:08d}" for step in steps(root)}
        left = [name for name in storage.names(root) if name.isdigit() and name not in complete]
    for name in left:
        path, target = storage.join(root, name), storage.join(root, name.lstrip(".").split(".")[0])
        if name.endswith(".old") and not storage.exists(target):  # killed between the two renames of a replacement
            storage.rename(path, target)
        storage.remove(path)
    return len(left)


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _finite(array: np.ndarray, dtype: str) -> bool:
    if dtype == "bfloat16":  # its bits: all ones in the exponent are infinity or NaN
        return not bool(((array & 0x7F80) == 0x7F80).any())
    if array.dtype.kind != "f":
        return True
    flat = array.reshape(-1)
    for start in range(0, flat.size, 1 << 22):  # in parts: no mask as large as the array
        part = flat[start : start + (1 << 22)]
        with np.errstate(over="ignore", invalid="ignore"):
            quick = np.isfinite(part.sum())  # a sum is not finite if one term is not; the reverse needs a look
        if not quick and not np.isfinite(part).all():
            return False
    return True
