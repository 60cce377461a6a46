"""What a run does about a step that was not finite: keep its batch, find the layer."""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.diagnose import memory, shortage
from vit_tpu.errors import UserError
from vit_tpu.models import numerics
from vit_tpu.settings import Config
from vit_tpu.training import inputs, storage

NAME = "failed_step.npz"


def look(
    folder: str | os.PathLike[str], config: Config, model: Any, train: Source, batch: int, step: int, replicas: int,
    weights: int | None = None,
) -> str:  # fmt: skip
    """Reads the batch of a bad step again, keeps it in the run's folder and takes the step once more, layer by layer.

    Args:
      folder: of the run.
      config: of the run.
      model: with the weights from before the step, which the latched step has kept.
      train: the training data.
      batch: number of the batch in the stream.
      step: number of the step, from 1.
      replicas: with several, or on a TPU, the step is only kept.
      weights: the step after which the weights were those of this one; the one before if None.

    Returns:
      One sentence for the user.
    """
    images, labels = next(iter(inputs.train_data(config, train, batch, BrokenRecords(train.num_examples))))
    path = storage.join(os.fspath(folder), NAME)
    packed = io.BytesIO()  # an object store takes a file in one go
    after = step - 1 if weights is None else weights
    np.savez(packed, images=images.numpy(), labels=labels.numpy(), step=step, weights=after, classes=model.num_classes)
    with storage.writing(path) as file:
        file.write(packed.getvalue())
    kept = f"its batch is in {path}"
    if config.training.on_nonfinite == "stop":  # a rollback does not keep the weights from before it
        kept += f"; python -m vit_tpu.doctor --replay={os.fspath(folder)} takes it again"
    if replicas > 1:
        return f"step {step}: {kept}"
    large = _too_large(config, model, images.shape[-1])
    if large:
        return f"step {step}: {large}; {kept}"
    try:
        taken = numerics.walk(model, images, labels, step, config.precision)
    except Exception as error:  # a GPU's memory, for example; the batch is kept whatever it was
        return f"step {step}: not taken again here ({type(error).__name__}: {storage.reason(error)}); {kept}"
    found = taken[-1].culprit
    where = f"first not finite: {found}" if found else "taken again without XLA, layer by layer, it is finite"
    return f"step {step}: {where}; {kept}"


def _too_large(config: Config, model: Any, channels: int) -> str:
    """Returns why the host's memory is too small for a step layer by layer, which keeps all activations, or ""; a host
    that runs out of memory kills the process, while a GPU raises an error."""
    if tf.config.list_logical_devices("GPU"):
        return ""
    kept = dataclasses.replace(config.model, remat="none", scan=False)
    needs = memory.breakdown(dataclasses.replace(config, model=kept), model.num_classes, channels, hardware="CPU")
    there = shortage.of_host()
    if there is None or needs.total <= there:
        return ""
    return (
        f"layer by layer it would take about {memory.size_text(needs.total)}, and this process may have "
        f"{memory.size_text(there)}: not taken again here"
    )


@dataclasses.dataclass(frozen=True)
class Failed:
    """A step that was not finite.

    Attributes:
      images, labels: its batch. step: its number, from 1.
      weights: the step after which the weights were those of this one. classes: of the head.
    """

    images: np.ndarray
    labels: np.ndarray
    step: int
    weights: int
    classes: int


def read(folder: str | os.PathLike[str]) -> Failed | None:
    """Returns the failed step kept in a run's folder, or None.

    Raises:
      UserError: its file is damaged.
    """
    path = storage.join(os.fspath(folder), NAME)
    if not storage.exists(path):
        return None
    try:
        with storage.reading(path) as file, np.load(io.BytesIO(file.read())) as arrays:
            numbers = {name: int(arrays[name]) for name in ("step", "weights", "classes")}
            return Failed(arrays["images"], arrays["labels"], **numbers)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged or of another version ({storage.reason(error)})") from None
