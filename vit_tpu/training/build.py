"""From a config to a compiled model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from vit_tpu import devices, losses, mesh, precision
from vit_tpu.cluster import Cluster
from vit_tpu.layers import sharding
from vit_tpu.models.vit import ViT
from vit_tpu.optim import Ema, LossScale
from vit_tpu.optim import build as build_by_name
from vit_tpu.settings import Config
from vit_tpu.training import schedule


def choose_devices(config: Config, cluster: Cluster | None, dry: bool = False) -> devices.Devices:
    """Returns the devices that `config` asks for, whose number the batch divides by.

    Args:
      config: of the run.
      cluster: its workers, or None.
      dry: take those of this worker alone: nobody else need be there.
    """
    devices.check_together(config.strategy, config.tpu, config.virtual_devices, cluster)
    count = len(cluster.addresses) if cluster is not None and dry else 1
    here = devices.choose(
        "auto" if count > 1 else config.strategy, config.tpu, virtual=config.virtual_devices,
        workers=cluster if count == 1 else None, mesh=mesh.parse(config.mesh, config.shard),
    )  # fmt: skip
    t = config.training
    devices.check_batch(t.batch_size, here.replicas * count, t.accumulation_steps, config.data.repeats)
    return here if count == 1 else dataclasses.replace(here, line=f"each of {count} workers: {here.line}")


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
    over = divided(config)
    if over is not None and here.kind == "TPU":
        mesh.check_batch(over, t.batch_size // here.replicas, t.accumulation_steps)
    with here.scope(), precision.scope(config.precision), _dividing(over, here):
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
            mesh=over, record_updates=t.board != "scalars",
        )  # fmt: skip
    return model


def divided(config: Config) -> mesh.Mesh | None:
    """Returns the mesh that the program is divided over, or None where each core runs a copy of it."""
    found = mesh.parse(config.mesh, config.shard)
    return found if found is not None and found.partitioned else None


@contextlib.contextmanager
def _dividing(over: mesh.Mesh | None, here: devices.Devices) -> Iterator[None]:
    """Inside, variables are made as they are to lie on a mesh of TPU cores."""
    if over is None or here.kind != "TPU":
        yield
        return
    from vit_tpu.tpu import divided

    with sharding.over(over), divided.variables(here.strategy, over):
        yield


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
    if config.optimizer.name == "lamb" and config.training.board != "scalars":
        options["record_trust_ratios"] = True
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
