"""The folder of a run as a reader sees it: its config, its checkpoints, their weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import yaml

from vit_tpu import config as configs
from vit_tpu.errors import UserError, nearest
from vit_tpu.models.vit import ViT
from vit_tpu.settings import Config
from vit_tpu.training import checkpoints, resume, storage

WEIGHTS, EMA = "parameters/", "ema/"  # of the arrays in a checkpoint
_REPAIR = "write it again (the manifest.json of each checkpoint has the config, too), or train again"


def config_of(folder: str) -> Config:
    """Returns the config of a run; keys that this version no longer has are passed over.

    Raises:
      UserError: it is no run's folder, or its config.yaml is damaged.
    """
    written = storage.join(folder, "config.yaml")
    if not storage.exists(written):
        beside = pathlib.Path(folder).parent
        siblings = [str(path.parent) for path in beside.glob("*/config.yaml")] if beside.is_dir() else []
        what = "it has no config.yaml" if storage.exists(folder) else "there is no such folder"
        raise UserError(f"{folder} is not the folder of a run: {what}{nearest(folder, siblings)}")
    try:
        content = yaml.safe_load(storage.read_text(written))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{written} is damaged ({' '.join(str(error).split())[:120]}): {_REPAIR}") from None
    except OSError as error:
        raise UserError(f"{written} cannot be read ({error.strerror or error})") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{written} is damaged (it holds no settings): {_REPAIR}")
    return configs.from_dict(resume.known(content), written)


def summary_of(folder: str) -> dict[str, Any]:
    """Returns summary.json of a run, {} if the run has not ended.

    Raises:
      UserError: it is damaged.
    """
    path = storage.join(folder, "summary.json")
    if not storage.exists(path):
        return {}
    try:
        found = json.loads(storage.read_text(path))
    except ValueError as error:  # also of bytes that are no text
        raise UserError(f"{path} is damaged ({error}): delete it, or train again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    return found if isinstance(found, dict) else {}


def find(folder: str, wanted: str | int = "newest") -> tuple[str, dict[str, Any]]:
    """Returns path and manifest of a checkpoint whose every byte was verified.

    Args:
      folder: of the run.
      wanted: "newest", "best" (of the highest validation accuracy) or a step.

    Raises:
      UserError: there is no such checkpoint, or it is damaged.
    """
    root = storage.join(folder, "checkpoints")
    steps = checkpoints.steps(root)
    if not steps:
        raise UserError(
            f"{folder} has no checkpoint: the run stopped before it wrote one; run the same command again to train it"
        )
    if wanted == "newest":
        found = checkpoints.newest(root)
        if found is None:
            raise UserError(f"{folder}: all {len(steps)} of its checkpoints are damaged; train it again")
        return found
    text = str(wanted)
    if text == "best":
        best = summary_of(folder).get("best")
        text = str(best["step"]) if best else text
    if not text.isdecimal() or int(text) not in steps:
        raise UserError(f'{folder} keeps no checkpoint "{wanted}"; it has newest, {", ".join(map(str, steps))}')
    path = checkpoints.folder_of(root, int(text))
    try:
        return path, checkpoints.verified(path)
    except ValueError as error:
        raise UserError(f"checkpoint {path} is damaged ({error}): take another") from None


def fill(model: ViT, path: str, manifest: Mapping[str, Any], averaged: bool) -> None:
    """Fills a model with the weights of a checkpoint, or with their average; nothing else is kept in memory.

    Raises:
      UserError: names or shapes differ; nothing has been changed then.
    """
    if manifest.get("format") != checkpoints.FORMAT:
        raise UserError(
            f"checkpoint {path} has format {manifest.get('format')}, this version reads {checkpoints.FORMAT}: evaluate "
            "it with the version that wrote it"
        )
    variables = {parameter.path: parameter.variable for parameter in model.parameters()}
    stored = manifest["arrays"]
    # Frozen parameters have no average: they are their own.
    source = {
        name: f"{EMA}{name}" if averaged and f"{EMA}{name}" in stored else f"{WEIGHTS}{name}" for name in variables
    }
    wrong = [name for name in variables if stored.get(source[name], [None])[0] != list(variables[name].shape)]
    extra = [name for name in stored if name.startswith(WEIGHTS) and name.removeprefix(WEIGHTS) not in variables]
    if wrong or extra:
        name = wrong[0] if wrong else extra[0].removeprefix(WEIGHTS)
        there = stored.get(f"{WEIGHTS}{name}", ["nothing"])[0]
        here = list(variables[name].shape) if name in variables else "nothing"
        raise UserError(
            f"checkpoint {path} does not fit its config: {name} is {there} there and {here} here, "
            f"{len(wrong) + len(extra)} parameters in all; leave out what changes the model's shape"
        )
    wanted = {name: variables[path_] for path_, name in source.items()}
    for name, array, _ in checkpoints.read(path, manifest):
        if name in wanted:
            wanted[name].assign(array)
