"""What a run does about a step that was not finite: keep its batch, find the layer."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np

from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.models import numerics
from vit_tpu.settings import Config
from vit_tpu.training import inputs, storage

NAME = "failed_step.npz"


def look(
    folder: str | os.PathLike[str], config: Config, model: Any, train: Source, batch: int, step: int, replicas: int
) -> str:
    """Reads the batch of a bad step again, keeps it in the run's folder and takes the step once more, layer by layer.

    Args:
      folder: of the run.
      config: of the run.
      model: with the weights from before the step, which the latched step has kept.
      train: the training data.
      batch: number of the batch in the stream.
      step: number of the step, from 1.
      replicas: with several, or on a TPU, the step is only kept.

    Returns:
      One sentence for the user.
    """
    images, labels = next(iter(inputs.train_data(config, train, batch, BrokenRecords(train.num_examples))))
    path = storage.join(os.fspath(folder), NAME)
    packed = io.BytesIO()  # an object store takes a file in one go
    np.savez(packed, images=images.numpy(), labels=labels.numpy(), step=step)
    with storage.writing(path) as file:
        file.write(packed.getvalue())
    kept = f"its batch is in {path}; python -m vit_tpu.doctor --replay={os.fspath(folder)} takes it again"
    if replicas > 1:
        return f"step {step}: {kept}"
    taken = numerics.walk(model, images, labels, step, config.precision)
    found = taken[-1].culprit
    where = f"first not finite: {found}" if found else "taken again without XLA, layer by layer, it is finite"
    return f"step {step}: {where}; {kept}"


def read(folder: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Returns images, labels and number of the failed step kept in a run's folder, or None."""
    path = storage.join(os.fspath(folder), NAME)
    if not storage.exists(path):
        return None
    with storage.reading(path) as file, np.load(io.BytesIO(file.read())) as arrays:
        return arrays["images"], arrays["labels"], int(arrays["step"])
