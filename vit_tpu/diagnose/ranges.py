"""Which numbers a step holds, layer by layer, and which of them half precision would lose: on request, for a run or a
config, on real data."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu import devices
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.errors import UserError
from vit_tpu.evaluation import run_folder
from vit_tpu.models import numerics
from vit_tpu.settings import Config, LossScale
from vit_tpu.training import build, inputs, resume, schedule, state

EXAMPLES = 32  # enough for ranges; a layer-by-layer step holds everything at once


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The numbers of one training step.

    Attributes:
      step: it is the one after this; 0 for a config that has not trained.
      precision: of the config; the step itself is taken in float32, so that nothing is rounded before it is looked at.
      taken: the step.
    """

    step: int
    precision: str
    taken: numerics.Step

    def lost(self, name: str) -> list[str]:
        """Returns sentences on what `name` ("float16", "bfloat16") would overflow or make zero, the worst first."""
        rows = []
        for where, found in self.taken.ranges():
            over, zero = found.lost(name)
            if over or zero > MUCH:
                what = f"{over:.1%} overflow" if over else f"{zero:.1%} become zero"
                rows.append((over > 0, max(over, zero), f"{where}: {what}"))
        return [text for _, _, text in sorted(rows, reverse=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as --json writes them."""
        ranges = [
            {"where": where, **dataclasses.asdict(found), "float16": found.lost("float16"),
             "bfloat16": found.lost("bfloat16")}
            for where, found in self.taken.ranges()
        ]  # fmt: skip
        lost = {name: self.lost(name) for name in numerics.LIMITS}
        return {"step": self.step, "precision": self.precision, "loss": self.taken.loss, "ranges": ranges, "lost": lost}

    def __str__(self) -> str:
        lines = [
            f"the step after {self.step:,}, taken in float32 on {EXAMPLES} examples at most, without a loss scale; "
            f"dtype: what the layer computes in under {self.precision}",
            self.taken.table(),
            "",
        ]
        if not any(stage.backward and stage.backward.high > stage.backward.low for stage in self.taken.stages[:-1]):
            lines.append("a classifier that starts at zero passes no gradient on yet: look at a run after some steps")
        for name in numerics.LIMITS:
            found = self.lost(name)
            lines.append(
                f"{name} would lose {'in ' + str(len(found)) + ' places:' if found else 'nothing that matters'}"
            )
            lines += [f"  {text}" for text in found[:8]]
            if len(found) > 8:
                lines.append(f"  and {len(found) - 8} more (--json has all)")
        if any("zero" in text for text in self.lost("float16")):
            lines.append("gradients that become zero in float16 are what a loss scale is for: it multiplies them first")
        return "\n".join(lines)


MUCH = 0.01  # share of a tensor's numbers that may become zero before it is worth a word


def of_run(folder: str) -> Ranges:
    """Returns the ranges of the step after a run's newest checkpoint, on its own next batch.

    Raises:
      UserError: the folder holds no run, or no checkpoint.
    """
    config = run_folder.config_of(folder)
    return _ranges(config, run_folder.find(folder))


def of_config(config: Config) -> Ranges:
    """Returns the ranges of the first step of a config, from its initial weights."""
    return _ranges(config, None)


def _ranges(config: Config, found: tuple[str, dict[str, Any]] | None) -> Ranges:
    t = config.training
    train = inputs.open_source(config, "train")
    batch = min(t.batch_size, EXAMPLES, train.num_examples)
    small = dataclasses.replace(t, batch_size=batch, accumulation_steps=1)
    config = dataclasses.replace(config, training=small)
    classes, channels = inputs.num_classes(config, train), inputs.channels(config, train)
    keras.utils.set_random_seed(t.seed)
    plan = schedule.plan(config, train.num_examples)
    begin = resume.weights_at(config.init_from) if config.init_from and found is None else None
    plain = dataclasses.replace(config, precision="float32", loss_scale=LossScale(mode="off"), init_from=begin)
    here = devices.choose("auto" if config.strategy in ("mirrored", "multi_worker", "tpu") else config.strategy)
    model = build.build_model(plain, here, classes, channels, plan)
    if found is not None:
        state.restore(model, *found)
    step = int(model.counters.values()["steps"])
    images, labels = next(iter(inputs.train_data(plain, train, step, BrokenRecords(train.num_examples))))
    taken = numerics.walk(model, tf.constant(images), tf.constant(labels), step + 1, "float32")[0]
    dtype = config.precision.removeprefix("mixed_")
    stages = tuple(
        stage if stage.name in ISLANDS else dataclasses.replace(
            stage, forward=dataclasses.replace(stage.forward, dtype=dtype)
        )
        for stage in taken.stages
    )  # fmt: skip
    if not taken.stages:
        raise UserError("the model has no layers to look at")
    return Ranges(step, config.precision, dataclasses.replace(taken, stages=stages))


ISLANDS = ("norm", "pooling", "map", "pre_logits", "head")  # float32 under every policy
