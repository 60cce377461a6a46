"""Checkpoints: everything that training continues from, strict, verified, never half written.

A checkpoint is a folder `checkpoints/<step>/` with `state.npz` (every array by name) and `manifest.json` (shapes,
dtypes, the hash of the arrays' file, and what the caller adds: step, config, versions). It is written beside its
place under a temporary name, flushed to disk and renamed, so a folder with a number for a name is complete; its hash
says whether it still is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from vit_tpu.errors import UserError, nearest
from vit_tpu.optim.loss_scale import LossScale

FORMAT = 1


def variables_of(model: Any) -> dict[str, tf.Variable]:
    """Returns every variable that a compiled model's training depends on, by a name that says what it is."""
    found = {f"parameters/{p.path}": p.variable for p in model.parameters()}
    if isinstance(model.optimizer, LossScale):
        found.update({f"loss_scale/{name}": v for name, v in model.optimizer.state_variables().items()})
    optimizer = model.inner_optimizer
    found["optimizer/applied_updates"] = optimizer.iterations
    for slot, entries in optimizer.slots.items():
        found.update({f"optimizer/{slot}/{path}": variable for path, variable in entries.items()})
    if model.averages is not None:
        found["ema/updates"] = model.averages.updates
        for parameter, average in zip(model.trained, model.averages.averages):
            found[f"ema/{parameter.path}"] = average
    for name in ("steps", "skipped", "in_a_row", "bad_step", "bad_gradient"):
        found[f"counters/{name}"] = getattr(model.counters, name)
    return found


def save(
    model: Any, folder: str | os.PathLike[str], step: int, extra: Mapping[str, Any], keep: int = 2
) -> pathlib.Path:
    """Writes the checkpoint of `step` and removes all but the newest `keep`; returns its folder.

    Args:
      model: compiled.
      folder: the run's `checkpoints` folder.
      step: training steps taken.
      extra: plain values for the manifest, such as the config.
      keep: complete checkpoints to leave.

    Raises:
      UserError: the disk is full or not writable; nothing half-written stays.
      FloatingPointError: the state is not finite; nothing is written.
    """
    root = pathlib.Path(folder)
    arrays = {name: _to_storage(variable) for name, variable in variables_of(model).items()}
    for name, (array, _) in arrays.items():
        if name.startswith("parameters/") and not np.isfinite(array).all():
            raise FloatingPointError(f"step {step}: {name} is not finite, so no checkpoint was written")
    target, temporary = root / f"{step:08d}", root / f".{step:08d}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with open(temporary / "state.npz", "wb") as file:
            np.savez(file, **{name: array for name, (array, _) in arrays.items()})  # type: ignore[arg-type]
            _flush(file)
        manifest = {
            "format": FORMAT, "step": step, "sha256": _sha256(temporary / "state.npz"),
            "arrays": {name: [list(array.shape), dtype] for name, (array, dtype) in arrays.items()}, **extra,
        }  # fmt: skip
        with open(temporary / "manifest.json", "w") as file:
            json.dump(manifest, file, indent=1)
            _flush(file)
        if target.exists():  # the same step again, for example a final save after a periodic one
            shutil.rmtree(target)
        os.rename(temporary, target)
        _flush_folder(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"the checkpoint of step {step} cannot be written to {root} ({error.strerror}): free space "
            "or choose another workdir"
        ) from None
    for old in _complete(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest(folder: str | os.PathLike[str]) -> tuple[pathlib.Path, dict[str, Any]] | None:
    """Returns the newest checkpoint that is whole, with its manifest; damaged ones are named and passed over."""
    for path in _complete(pathlib.Path(folder)):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            if _sha256(path / "state.npz") == manifest["sha256"]:
                return path, manifest
            reason = "its contents do not match their hash"
        except (OSError, ValueError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
        logging.warning("checkpoint %s is damaged (%s); trying the one before", path, reason)
    return None


def restore(model: Any, path: str | os.PathLike[str]) -> None:
    """Fills a compiled model from a checkpoint; every variable and every array must have its partner.

    Raises:
      UserError: names or shapes differ; nothing has been changed then.
    """
    manifest = json.loads((pathlib.Path(path) / "manifest.json").read_text())
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}: use "
            "init_from for its weights"
        )
    variables, stored = variables_of(model), manifest["arrays"]
    missing, extra = sorted(variables.keys() - stored.keys()), sorted(stored.keys() - variables.keys())
    if missing or extra:
        example = missing[0] if missing else extra[0]
        others = extra if missing else list(variables)
        raise UserError(
            f"checkpoint {path} does not fit: {len(missing)} variables of the model are not in it, "
            f"{len(extra)} of its arrays are not in "
            f"the model; for example {example}{nearest(example, others)}. Start with the configuration "
            "it was written with"
        )
    wrong = [name for name, variable in variables.items() if list(variable.shape) != stored[name][0]]
    if wrong:
        name = wrong[0]
        raise UserError(
            f"checkpoint {path} does not fit: {name} is {stored[name][0]} there and {list(variables[name].shape)} here"
        )
    with np.load(pathlib.Path(path) / "state.npz") as arrays:
        for name, variable in variables.items():
            variable.assign(_from_storage(arrays[name], stored[name][1]))


def _to_storage(variable: tf.Variable) -> tuple[np.ndarray, str]:
    """NumPy files know no bfloat16, so its bits are stored as uint16."""
    value = tf.convert_to_tensor(variable)
    array = value.numpy()
    return (array.view(np.uint16), "bfloat16") if value.dtype == tf.bfloat16 else (array, value.dtype.name)


def _from_storage(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.view(tf.bfloat16.as_numpy_dtype) if dtype == "bfloat16" else array


def _complete(root: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoint folders, the newest first."""
    found = [path for path in root.glob("[0-9]*") if path.is_dir() and path.name.isdigit()] if root.is_dir() else []
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
