"""Takes the failed step of a run once more, layer by layer, in the run's precision and in float32."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu import devices
from vit_tpu.errors import UserError
from vit_tpu.evaluation import run_folder
from vit_tpu.models import numerics
from vit_tpu.settings import Config, LossScale
from vit_tpu.training import build, checkpoints, failure, resume, schedule, state, storage

MANY = 10**9  # examples: only the schedule asks, and no learning rate is used here


@dataclasses.dataclass(frozen=True)
class Replay:
    """A failed step taken again.

    Attributes:
      step: its number. precision: of the run.
      run: as the run computed it; float32: in float32 (None if that is the run's own precision).
    """

    step: int
    precision: str
    run: numerics.Step
    float32: numerics.Step | None

    def verdict(self) -> str:
        """Returns what it comes to in one sentence."""
        if self.run.culprit is None:
            return (
                "this time everything is finite: it was not the arithmetic of this step (look at the machine's memory)"
            )
        if self.float32 is not None and self.float32.culprit is None:
            return (
                f"in float32 everything is finite, so {self.precision} is the cause: a lower loss scale, "
                "mixed_bfloat16, or a lower learning rate"
            )
        return "float32 does not help: look at the batch, the learning rate and the warm-up"

    def __str__(self) -> str:
        parts = [f"step {self.step} in {self.precision}, micro-batch {self.run.micro_batch}", self.run.table()]
        parts.append(f"first not finite: {self.run.culprit or 'nothing'}")
        if self.float32 is not None:
            parts += ["", "the same in float32", self.float32.table()]
            parts.append(f"first not finite: {self.float32.culprit or 'nothing'}")
        return "\n".join([*parts, "", self.verdict()])


def replay(folder: str | os.PathLike[str]) -> Replay:
    """Returns the failed step of a run's folder, taken again on this machine's CPU or GPU.

    Raises:
      UserError: the folder keeps no failed step, or not the weights from before it.
    """
    place = os.fspath(folder)
    config = run_folder.config_of(place)
    kept = failure.read(place)
    if kept is None:
        raise UserError(f"{place} keeps no failed step ({failure.NAME}): its steps were finite, or it ran elsewhere")
    step, classes, channels = kept.step, kept.classes, kept.images.shape[-1]
    found = None
    if kept.weights and kept.weights not in checkpoints.steps(storage.join(place, "checkpoints")):
        raise UserError(
            f"step {step} of {place} cannot be taken again: the checkpoint of step {kept.weights}, with the weights it "
            "had, is not kept (the run rolled back or went on since); its batch alone is in " + failure.NAME
        )
    if kept.weights:
        found = run_folder.find(place, kept.weights)
    keras.utils.set_random_seed(config.training.seed)  # without a checkpoint it starts from the initial weights
    begin = resume.weights_at(config.init_from) if config.init_from and not found else None
    model = _model(dataclasses.replace(config, init_from=begin), classes, channels)
    if found:
        state.restore(model, *found)
    batch = tf.constant(kept.images), tf.constant(kept.labels)
    taken = numerics.walk(model, *batch, step, config.precision)[-1]
    if config.precision == "float32":
        return Replay(step, config.precision, taken, None)
    plain = dataclasses.replace(config, precision="float32", loss_scale=LossScale(mode="off"), init_from=None)
    other = _model(plain, classes, channels)
    for ours, theirs in zip(other.parameters(), model.parameters()):
        ours.variable.assign(theirs.variable)
    again = numerics.walk(other, *batch, step, "float32")
    return Replay(step, config.precision, taken, again[min(taken.micro_batch, len(again) - 1)])


def _model(config: Config, classes: int, channels: int) -> Any:
    here = devices.choose("auto" if config.strategy in ("mirrored", "multi_worker", "tpu") else config.strategy)
    return build.build_model(config, here, classes, channels, schedule.plan(config, MANY))
