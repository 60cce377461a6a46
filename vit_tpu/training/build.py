"""From a config to a compiled model."""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_tpu import devices, losses, precision
from vit_tpu.models.vit import ViT
from vit_tpu.optim import Ema, LossScale
from vit_tpu.optim import build as build_by_name
from vit_tpu.settings import Config
from vit_tpu.training import schedule


def build_model(
    config: Config, here: devices.Devices, classes: int, channels: int, plan: schedule.Plan, reports: list | None = None
) -> ViT:
    """Returns the model that `config` describes, compiled, in the strategy's scope.

    Args:
      config: of the run.
      here: devices.
      classes, channels: what the data has.
      plan: lengths, for the schedule.
      reports: the report on `config.init_from` is added to it.
    """
    settings = dataclasses.asdict(config.model) | {"num_classes": classes, "channels": channels}
    t = config.training
    with here.scope(), precision.scope(config.precision):
        model = ViT(settings.pop("variant"), **settings)
        if config.init_from:
            from vit_tpu import weights

            report = weights.load_weights(model, config.init_from, allow=config.init_allow, resize=config.init_resize)
            if reports is not None:
                reports.append(report)
        loss = losses.LOSSES[t.loss](label_smoothing=t.label_smoothing)
        model.compile(
            build_optimizer(config, plan), loss, ["accuracy"], grad_clip_norm=t.grad_clip_norm,
            accumulation_steps=t.accumulation_steps, ema=averaging(config, plan),
            steps_per_execution=plan.steps_per_execution,
            # TensorFlow's own check of every operation cannot be compiled; with jit the step's own check has to do.
            jit_compile=t.jit if t.jit or not t.check_numerics else False, check_numerics=t.check_numerics,
            seed=t.seed, freeze=config.optimizer.freeze,
            layer_decay=config.optimizer.layer_decay, max_skipped=t.max_skipped,
        )  # fmt: skip
    return model


def averaging(config: Config, plan: schedule.Plan) -> float | Ema | None:
    """Returns what `model.compile(ema=...)` takes: a decay, or the mean that the paper fine-tunes ViT-G with."""
    if config.training.ema == "polyak":
        return Ema(decay=None, start_step=schedule.learning_rate(config, plan).warmup_steps)
    return config.training.ema  # type: ignore[return-value]  # texts other than polyak are refused


def build_optimizer(config: Config, plan: schedule.Plan) -> Any:
    """Returns the optimizer with its schedule, wrapped in a loss scale if the config or float16 asks for one."""
    options = {name: value for name, value in dataclasses.asdict(config.optimizer).items() if value is not None}
    for name in ("name", "learning_rate", "freeze", "layer_decay"):
        options.pop(name, None)
    rate = schedule.learning_rate(config, plan)
    optimizer = build_by_name(config.optimizer.name, rate, **options)
    scale = config.loss_scale
    mode = scale.mode
    if mode == "auto":
        mode = "dynamic" if config.precision == "mixed_float16" else "off"
    if mode == "off":
        return optimizer
    return LossScale(
        optimizer,
        initial_scale=scale.initial,
        dynamic=mode == "dynamic",
        growth_steps=scale.growth_steps,
        min_scale=scale.minimum,
    )
