"""The state of a run: every variable that training continues from, copied out and put back, strictly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.errors import UserError, nearest
from vit_tpu.optim.loss_scale import LossScale
from vit_tpu.training import checkpoints

COUNTERS = ("steps", "skipped", "in_a_row", "bad_step", "bad_gradient")


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
    for name in COUNTERS:
        found[f"counters/{name}"] = getattr(model.counters, name)
    return found


def snapshot(model: Any) -> dict[str, tuple[np.ndarray, str]]:
    """Returns name -> (array, dtype name) of the state as it is now, whatever training does afterwards.

    NumPy knows no bfloat16, so its bits come as uint16. On a CPU the arrays are the variables' own memory: TensorFlow
    gives a variable new memory when it changes while someone still looks at the old, so the copy costs nothing until
    then. From other devices it is one copy to the host.
    """
    return {name: _to_host(variable) for name, variable in variables_of(model).items()}


def _to_host(variable: tf.Variable) -> tuple[np.ndarray, str]:
    value = tf.convert_to_tensor(variable)
    dtype = value.dtype.name
    if value.dtype == tf.bfloat16:
        value = tf.bitcast(value, tf.uint16)
    return np.asarray(memoryview(value)) if "CPU:" in value.backing_device else value.numpy(), dtype


def save(
    model: Any,
    folder: str | os.PathLike[str],
    step: int,
    extra: Mapping[str, Any],
    keep: int = 2,
) -> str:
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
    root = os.fspath(folder)
    target = checkpoints.write(root, step, snapshot(model), extra, metadata=settings_of(model))
    checkpoints.prune(root, checkpoints.Keep(keep), step)
    return target


def settings_of(model: Any) -> dict[str, str]:
    """Returns what the header of a weight file says of the model, as `vit_tpu.load_weights` reads it."""
    import json

    from vit_tpu.weights import fit, io

    settings = io._plain_settings(fit.settings_of(model))
    return {"format": "pt", "vit_tpu": json.dumps({"settings": settings, "config": {}})}


def newest(folder: str | os.PathLike[str]) -> tuple[str, dict[str, Any]] | None:
    """Returns the newest checkpoint under a `checkpoints` folder that is whole, with its manifest, or None."""
    return checkpoints.newest(os.fspath(folder))


def restore(
    model: Any, path: str | os.PathLike[str], manifest: Mapping[str, Any] | None = None, *, change: bool = False
) -> list[str]:
    """Fills a compiled model from a checkpoint; every variable and every array must have its partner.

    The loss scale alone may appear or go: it belongs to the precision, which may change between two parts of a run.

    Args:
      model: compiled.
      path: of the checkpoint; verify it first.
      manifest: if it has been read already.
      change: the moving average may appear (it starts as the weights) or go, too.

    Returns:
      Sentences on what was not there or not used.

    Raises:
      UserError: names, shapes or dtypes differ; nothing has been changed then.
    """
    root = os.fspath(path)
    manifest = checkpoints.read_manifest(root) if manifest is None else manifest
    if manifest.get("format") != checkpoints.FORMAT:
        raise UserError(
            f"checkpoint {root} has format {manifest.get('format')}, this version reads {checkpoints.FORMAT}: "
            f"--init_from={root} takes its weights into a new run"
        )
    variables, stored = variables_of(model), dict(manifest["arrays"])
    notes = _optional(variables, stored, change)
    _match(root, variables, stored)
    for name, array, dtype in checkpoints.read(root, manifest):
        if name in stored:
            variables[name].assign(array.view(tf.bfloat16.as_numpy_dtype) if dtype == "bfloat16" else array)
    if model.averages is not None and "ema/updates" not in stored:
        for parameter, average in zip(model.trained, model.averages.averages):
            average.assign(tf.convert_to_tensor(parameter.variable))
    return notes


def _optional(variables: dict[str, tf.Variable], stored: dict[str, Any], change: bool) -> list[str]:
    """Takes groups that only one side has out of both, and says so."""
    notes = []
    for group, made, dropped in (
        (
            "loss_scale/",
            "the checkpoint has no loss scale: it starts at its initial value",
            "the loss scale is dropped",
        ),
        ("ema/", "the checkpoint has no moving average: it starts as the weights", "the moving average is dropped"),
    ):
        here = [name for name in variables if name.startswith(group)]
        there = [name for name in stored if name.startswith(group)]
        if bool(here) == bool(there) or (group == "ema/" and not change):
            continue
        for name in here:
            del variables[name]
        for name in there:
            del stored[name]
        notes.append(made if here else f"{dropped}: this run has none")
    return notes


def _match(path: str, variables: Mapping[str, tf.Variable], stored: Mapping[str, Any]) -> None:
    missing, extra = sorted(variables.keys() - stored.keys()), sorted(stored.keys() - variables.keys())
    if missing or extra:
        example = missing[0] if missing else extra[0]
        others = extra if missing else list(variables)
        raise UserError(
            f"checkpoint {path} does not fit: {len(missing)} of the model's {len(variables)} variables are not in it"
            f"{_some(missing)}, {len(extra)} of its {len(stored)} arrays are not in the model{_some(extra)}; "
            f"for example {example}{nearest(example, others)}. Start with the configuration it was written with, or "
            f"take its weights alone with --init_from={path}"
        )
    for name, variable in variables.items():
        shape, dtype = stored[name]
        if list(variable.shape) != shape or variable.dtype.base_dtype.name != dtype:
            raise UserError(
                f"checkpoint {path} does not fit: {name} is {dtype} {shape} there and "
                f"{variable.dtype.base_dtype.name} {list(variable.shape)} here. Start with the configuration it was "
                f"written with, or take its weights alone with --init_from={path}"
            )


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
