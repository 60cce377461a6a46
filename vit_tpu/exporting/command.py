"""What `python -m vit_tpu.export` does with a loaded model: finds its data, then `export_model`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.evaluation import loading, run_folder
from vit_tpu.evaluation.loading import Trained
from vit_tpu.exporting.artefact import ExportReport, export_model
from vit_tpu.training import inputs


def export_trained(
    trained: Trained,
    folder: str | os.PathLike[str],
    format: str,
    workdir: str | None,
    calibration: int,
    examples: int,
) -> ExportReport:
    """Exports a loaded model with what its data and its run add; see `vit_tpu.export_model`.

    Args:
      trained: from a run's folder or a weight file.
      folder: to write; must not exist.
      format: as in `export_model`.
      workdir: of the run, for the card; None for a weight file.
      calibration: training images for tflite_int8.
      examples: validation images to compare on; 0 compares on noise.
    """
    batches = list(_images(trained, "train", calibration)) if format == "tflite_int8" else []
    samples = _samples(trained, examples)
    print(f"exporting {trained.weights}", flush=True)
    return export_model(trained, folder, format, calibration=batches, samples=samples, facts=_facts(trained, workdir))


def _samples(trained: Trained, count: int) -> np.ndarray | None:
    if not count:
        return None
    try:
        return np.concatenate(list(_images(trained, "validation", count)))
    except UserError as error:
        print(f"the data of this model is not here, so the comparison is on noise ({error})")
        return None


def _images(trained: Trained, split: str, count: int) -> Iterator[np.ndarray]:
    """Yields float32 batches of `count` images, spread over the split, as the model's evaluation sees them."""
    config = trained.config
    try:
        source = inputs.open_source(config, split)
    except UserError as error:
        if split == "train":
            raise UserError(f"tflite_int8 takes its value ranges from training images, but {error}") from None
        raise
    model = trained.model
    shaped = loading.with_overrides(
        config, {"model.image_size": list(model.image_size), "data.channels": model.channels}
    )
    images, _ = inputs.sample(shaped, source, count)
    if not len(images):
        raise UserError(f"{source.name}: no image of the {split} split can be read")
    yield images.astype(np.float32) / np.float32(127.5) - 1


def _facts(trained: Trained, workdir: str | os.PathLike[str] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"Weights": {"from": trained.weights}}
    if workdir is not None:
        summary = run_folder.summary_of(os.fspath(workdir))
        if summary:
            results = {f"validation {name}": value for name, value in (summary.get("validation") or {}).items()}
            facts["Results"] = {"steps": summary.get("steps"), **results}
        facts["Configuration"] = configs.to_yaml(trained.config)
    return facts
