"""`export_model`: a model as a folder that others can run, checked before it gets its name."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu._version import __version__
from vit_tpu.errors import UserError, nearest
from vit_tpu.evaluation import loading
from vit_tpu.evaluation.loading import Trained
from vit_tpu.exporting import card, formats
from vit_tpu.exporting.servable import Recipe, Servable
from vit_tpu.models.rebuild import float32_copy
from vit_tpu.models.vit import ViT
from vit_tpu.training import inputs

# Largest difference to the float32 model, as a share of max(1, largest output): other kernels add in another order.
LIMITS = {"saved_model": 1e-5, "onnx": 1e-4, "tflite": 1e-4}
ALIKE = 0.9  # an artefact that names the model's class less often is said to
FAR = 0.2  # so is one whose outputs differ by more, in root mean square


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What was written and how far it is from the model.

    Attributes:
      folder: of the artefact.
      format: as asked for.
      bytes: of all its files.
      examples: images compared.
      difference: largest absolute difference of its outputs to the float32 model's.
      training_difference: the same to the model as it was trained, under its own policy.
      agreement: share of images for which both models name the same class; None without classes.
      relative: root mean square of the difference to the float32 model, as a share of its outputs'.
    """

    folder: str
    format: str
    bytes: int
    examples: int
    difference: float
    training_difference: float
    agreement: float | None
    relative: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.format} in {self.folder}, {self.bytes:,} bytes"]
        lines.append(f"  largest difference to the float32 model    {self.difference:.2g} ({self.examples} images)")
        lines.append(f"  largest difference to the training model   {self.training_difference:.2g}")
        if self.agreement is not None:
            lines.append(f"  same class as the float32 model            {self.agreement:.1%}")
        if self.agreement is not None and self.agreement < ALIKE:
            lines.append("  warning: it often names another class; calibrate on more images, or export tflite")
        elif self.relative > FAR:
            lines.append(
                f"  warning: its outputs are {self.relative:.0%} off; calibrate on more images, or export tflite (some "
                "models have activations that 8 bits cannot hold)"
            )
        return "\n".join(lines)


def export_model(
    model: ViT | Trained | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    format: str = "saved_model",
    *,
    class_names: Sequence[str] | None = None,
    crop: str | None = None,
    loss: str | None = None,
    averaged: bool = False,
    calibration: Iterable[np.ndarray] = (),
    samples: np.ndarray | None = None,
    facts: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Writes `model` as a folder with the model, labels.txt, preprocessing.json, export.json and a model card.

    The model is built anew in float32 and its outputs are compared before the folder gets its name; a failed export
    leaves nothing.

    Args:
      model: trained, under any policy; or what `load_trained` returned, or a run's folder.
      folder: must not exist.
      format: "saved_model", "onnx", "tflite" or "tflite_int8".
      class_names: one for each class; None: the run's own, "0", "1", ... of a model.
      crop: "resize" or "central": how images of other sizes are prepared (of the evaluation that was reported). None:
        as the run evaluates, "resize" for a model.
      loss: "softmax" or "sigmoid": how probabilities come from logits. None: the run's, "softmax" for a model.
      averaged: export the moving average of the weights.
      calibration: batches of float32 images in [-1, 1], for tflite_int8.
      samples: float32 images [B, H, W, C] in [-1, 1] for the comparison; noise if None.
      facts: what the card shows besides, such as {"config": ..., "results": ...}.

    Returns:
      The report; also in export.json.

    Raises:
      UserError: unknown format, missing package, occupied folder, or names that do not fit the head.
      FloatingPointError: the artefact does not compute what the model computes.
    """
    if format not in formats.FORMATS:
        raise UserError(f'format "{format}"{nearest(format, formats.FORMATS)}: use {", ".join(formats.FORMATS)}')
    if not isinstance(model, ViT):
        trained = loading.as_trained(model)
        model, config = trained.model, trained.config
        class_names = trained.names if class_names is None else class_names
        crop = crop or inputs.eval_crop(config)
        loss = loss or config.training.loss
    target = pathlib.Path(folder)
    if os.path.lexists(target):
        raise UserError(f"{target} exists: choose a new folder, or remove it first")
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(model.num_classes)))
    recipe = Recipe(names, crop or "resize", loss or "softmax")
    servable = Servable(float32_copy(model, averaged), recipe)
    images = _noise(model) if samples is None else np.asarray(samples, np.float32)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        run = formats.write(servable, temporary, format, calibration)
        report = _compare(model, servable, run, images, format, str(target), averaged)
        if format == "saved_model":
            _check_signatures(servable, temporary)
        _describe(temporary, model, recipe, dataclasses.replace(report, bytes=_size(temporary)), facts or {})
        report = dataclasses.replace(report, bytes=_size(temporary))
        os.rename(temporary, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}): free space or choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


def _noise(model: ViT) -> np.ndarray:
    shape = (4, *model.image_size, model.channels)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def _compare(
    model: ViT, servable: Servable, run: formats.Runner, images: np.ndarray, format_: str, folder: str, averaged: bool
) -> ExportReport:
    found = run(images)
    wanted = servable.forward(tf.constant(images)).numpy()
    if averaged:
        with model.averaged_weights():
            trained = model(images, training=False).numpy()
    else:
        trained = model(images, training=False).numpy()
    difference = float(np.abs(found - wanted).max())
    limit = LIMITS.get(format_, np.inf) * max(1.0, float(np.abs(wanted).max()))
    if not difference <= limit:  # also refuses NaN
        raise FloatingPointError(
            f"the exported {format_} differs from the model by {difference:.3g} (limit {limit:.3g}): nothing was kept"
        )
    same = float((found.argmax(-1) == wanted.argmax(-1)).mean()) if servable.has_classes else None
    relative = float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-12))
    return ExportReport(
        folder, format_, 0, len(images), difference, float(np.abs(found - trained).max()), same, relative
    )


def _check_signatures(servable: Servable, folder: pathlib.Path) -> None:
    """The signatures for pixels and files of another size must give what the evaluation's preprocessing gives."""
    size = [side + 5 for side in servable.image_size]
    pixels = np.random.default_rng(1).integers(0, 256, (2, *size, servable.channels), np.uint8)
    prepared = np.stack([servable.prepare(tf.constant(image)).numpy() for image in pixels])
    wanted = servable.forward(tf.constant(prepared / 127.5 - 1.0, tf.float32)).numpy()
    loaded = tf.saved_model.load(str(folder / "1"))
    files = tf.stack([tf.io.encode_png(image) for image in pixels])
    for name, values in {"pixels": {"pixels": tf.constant(pixels)}, "files": {"files": files}}.items():
        outputs = loaded.signatures[name](**values)
        difference = float(np.abs(formats.main_output(outputs).numpy() - wanted).max())
        if not difference <= 1e-4 * max(1.0, float(np.abs(wanted).max())):
            raise FloatingPointError(
                f"the signature {name} differs from the model by {difference:.3g}: nothing was kept"
            )


def _describe(folder: pathlib.Path, model: ViT, recipe: Recipe, report: ExportReport, facts: Mapping[str, Any]) -> None:
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in recipe.class_names))
    preprocessing = {
        "image_size": list(model.image_size), "channels": model.channels, "crop": recipe.crop,
        "resize": "bilinear, half-pixel centres, fractions cut off", "range": [-1, 1],
        "probabilities": recipe.loss,
    }  # fmt: skip
    if recipe.crop == "central":
        preprocessing["smaller_side"] = round(max(model.image_size) * 8 / 7)
    (folder / "preprocessing.json").write_text(json.dumps(preprocessing, indent=1) + "\n")
    versions = {"vit_tpu": __version__, "tensorflow": tf.__version__}
    for package in ("tf2onnx", "onnx", "onnxruntime") if report.format == "onnx" else ():
        versions[package] = metadata.version(package)
    written = dataclasses.asdict(report) | {"versions": versions}
    (folder / "export.json").write_text(json.dumps(written, indent=1) + "\n")
    (folder / "README.md").write_text(card.model_card(model, recipe.class_names, preprocessing, written, facts))


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
