"""What a run says of itself: before it starts, when it ends, and in summary.json."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from vit_tpu import devices
from vit_tpu.data.source import Source
from vit_tpu.layers import sharding
from vit_tpu.models.vit import ViT
from vit_tpu.optim import decay
from vit_tpu.settings import Config
from vit_tpu.training import checking, display, gauges, inputs, peak, profiling, schedule
from vit_tpu.training.callbacks import Evaluator
from vit_tpu.training.logger import Logger
from vit_tpu.training.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run did; `summary.json` holds the same.

    Attributes:
      status: "done", or "interrupted" (run the same command again to go on).
      steps: training steps taken; examples_seen: steps x batch.
      applied_updates, skipped_updates: skipped are steps whose gradient was not finite.
      train: the last logged figures; validation: {"accuracy", "loss", "count"} of the last evaluation; best: of the
        best one.
      images_per_second: training only, without compilation.
      mfu: share of the devices' peak that the model's FLOPs use, or None; peak says what it was compared with.
      compilations: how often the training step was traced and compiled.
      rollbacks: how often the run went back because of a loss that was not finite, passing over the data.
      micro_steps: forward and backward passes, accumulation_steps of them a step.
      stop_seconds: from the signal to everything saved, if the run was interrupted.
      checkpoint: the folder of the last state.
      unreadable: training records that were skipped, and why.
    """

    status: str
    workdir: str
    steps: int
    examples_seen: int
    applied_updates: int
    skipped_updates: int
    train: dict[str, Any]
    validation: dict[str, Any]
    best: dict[str, Any]
    images_per_second: float | None
    mfu: float | None
    peak: str
    peak_host_bytes: int
    seconds: float
    versions: dict[str, str]
    devices: str
    precision: str
    compilations: int
    rollbacks: int = 0
    micro_steps: int = 0
    stop_seconds: float | None = None
    checkpoint: str | None = None
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)


def read(values: Mapping[str, Any]) -> Summary:
    """Returns the summary that a summary.json holds; what another version wrote beside it is left out."""
    names = {field.name for field in dataclasses.fields(Summary)}
    found = {name: value for name, value in values.items() if name in names}
    for name in {"train", "validation", "best"} & found.keys():  # JSON has no NaN
        found[name] = {key: float("nan") if value is None else value for key, value in (found[name] or {}).items()}
    return Summary(**found)


def opening(
    config: Config, here: devices.Devices, model: ViT, train: Source, validation: Source, plan: schedule.Plan,
    folder: Workdir, start: int, notes: Sequence[str] = (), dry: bool = False,
) -> str:  # fmt: skip
    """Returns the start-up summary: what will run, on what, for how long, and how each parameter is treated.

    `dry`: nothing will run, so nothing can be asked of the process.
    """
    t, v = config.training, model.variant
    parameters = sum(int(np.prod(p.variable.shape)) for p in model.parameters())
    inner = model.inner_optimizer
    slots = sum(
        variable.dtype.size * int(np.prod(variable.shape)) for s in inner.slots.values() for variable in s.values()
    )
    size = "x".join(map(str, model.image_size))
    jit = _jit(model, here)
    batch = f"{t.batch_size}" + (f" in {t.accumulation_steps} micro-batches" if t.accumulation_steps > 1 else "")
    if here.replicas > 1:
        batch += f" over {here.replicas} replicas"
    clip = f"clipped at global norm {t.grad_clip_norm:g}" if t.grad_clip_norm else "not clipped"
    scale = getattr(model.optimizer, "loss_scale", None)
    rows = [
        ("workdir", str(folder.path) + (f", continued from step {start:,}" if start else "")),
        ("devices", here.line),
        (
            "precision",
            f"{config.precision}, loss scale {'off' if scale is None else f'{float(scale):g}'}, XLA {jit}"
            + checking.sentence(config, model),
        ),
        ("data", inputs.describe(train, "train") + "\n" + inputs.describe(validation, "validation")),
        (
            "model",
            f"ViT {v.depth} blocks, width {v.width}, MLP {v.mlp_dim}, {v.num_heads} heads, patch "
            f"{v.patch_size}, pool {model.pool}, "
            f"image {size}, {model.num_patches} patches",
        ),
        (
            "size",
            f"{parameters:,} parameters, {model.flops() / 1e9:.3g} GFLOPs an image (forward), "
            f"optimizer state {slots / 2**20:,.1f} MiB, weights {parameters * 4 / 2**20:,.1f} MiB",
        ),
        (
            "length",
            f"{plan.total_steps:,} steps of {batch}, {plan.total_steps / plan.steps_per_epoch:,.1f} epochs; "
            f"{plan.steps_per_execution} {'step' if plan.steps_per_execution == 1 else 'steps'} per execution",
        ),
        (
            "rhythm",
            f"log every {plan.log_every:,}, evaluate every {plan.evaluate_every:,} steps; {_saving(plan)}; a stop "
            "waits for one execution at most",
        ),
        (
            "optimizer",
            f"{config.optimizer.name}, peak learning rate {config.optimizer.learning_rate:g}, "
            f"{config.schedule.name}, "
            f"warm-up {config.schedule.warmup}, gradient {clip}",
        ),
        (
            "groups",
            decay.table(
                model.groups,
                weight_decay=inner.weight_decay,
                head_weight_decay=inner.head_weight_decay,
                trust_ratio=config.optimizer.name == "lamb",
            ),
        ),
    ]
    if model.mesh is not None:
        rows.append(("sharding", sharding.table(model.groups, inner, t.ema is not None, model.mesh)))
    if not dry:
        known = gauges.device_bytes() is not None
        rows.append((
            "watch",
            f"kill -USR1 {os.getpid()} records the next {profiling.STEPS} steps, a number in "
            f"{folder.path}/{profiling.REQUEST} as many" + ("" if known else "\nno device reports its memory: n/a"),
        ))  # fmt: skip
    if plan.changed:
        rows.append(("changed", "\n".join(plan.changed)))
    if notes:
        rows.insert(1, ("continued", "\n".join(notes)))
    return "vit_tpu run\n" + display.table(rows)


def _jit(model: ViT, here: devices.Devices) -> str:
    """Returns what XLA compiles, and why where the devices decide it."""
    if here.kind == "TPU":
        return "whole step, by the TPU's runtime"
    if not model.jit:
        return "off"
    return "whole step" if here.replicas == 1 else "forward and backward, as the weights lie on several devices"


def _saving(plan: schedule.Plan) -> str:
    every = f"every {plan.checkpoint_every:,} steps, " if plan.checkpoint_every < plan.total_steps else ""
    keep, best = plan.keep, "at the best validation and " if plan.keep.best else ""
    often = f" and every {keep.every:,} steps'" if keep.every else ""
    return f"save {every}{best}at the end (the newest {keep.last}{often} stay)"


def versions() -> dict[str, str]:
    """Returns the versions that a run's numbers depend on."""
    import vit_tpu

    return {
        "vit_tpu": vit_tpu.__version__, "python": sys.version.split()[0], "tensorflow": tf.__version__,
        "tf_keras": keras.__version__, "numpy": np.__version__,
    }  # fmt: skip


def summarise(
    config: Config, here: devices.Devices, model: ViT, folder: Workdir, logger: Logger,
    evaluator: Evaluator, interrupted: bool, began: float,
    top: float | None, where: str,
) -> Summary:  # fmt: skip
    """Returns the facts of a finished or interrupted run."""
    rate = logger.images_per_second()
    again, _ = peak.of_devices(here.kind, here.replicas, config.precision != "float32")
    top = max(top or 0.0, again or 0.0) or None  # a measured peak is a lower bound: other work may have been going on
    counters = model.counters.values()
    return Summary(
        status="interrupted" if interrupted else "done",
        workdir=str(folder.path),
        steps=counters["steps"],
        examples_seen=counters["steps"] * config.training.batch_size,
        applied_updates=int(model.optimizer.iterations.numpy()),
        skipped_updates=counters["skipped"],
        train=logger.latest,
        validation=evaluator.result,
        best=evaluator.best,
        images_per_second=rate,
        mfu=3 * model.flops() * rate / top if rate and top else None,
        peak=where,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=time.perf_counter() - began,
        versions=versions(),
        devices=here.line,
        precision=config.precision,
        compilations=model.compilations(),
    )


def ending(summary: Summary) -> str:
    """Returns what a run prints last: results, speed, where to look."""
    rows = [
        (
            "steps",
            f"{summary.steps:,} ({summary.applied_updates:,} updates applied, {summary.skipped_updates:,} skipped)",
        )
    ]
    if summary.validation:
        best = summary.best
        rows.append(
            (
                "validation",
                f"accuracy {100 * summary.validation['accuracy']:.2f}%, loss "
                f"{summary.validation['loss']:.4f}, "
                f"{summary.validation['count']:,} examples (best "
                f"{100 * best['accuracy']:.2f}% at step {best['step']:,})",
            )
        )
    if summary.images_per_second:
        share = f", {100 * summary.mfu:.1f}% of peak ({summary.peak})" if summary.mfu else ""
        rows.append(("speed", f"{summary.images_per_second:,.0f} images/s{share}"))
    rows.append(
        (
            "time",
            f"{display.duration(summary.seconds)}, peak host memory "
            f"{summary.peak_host_bytes / 2**30:.2f} GiB, "
            f"{summary.compilations} compilation(s) of the step",
        )
    )
    if summary.rollbacks:
        rows.append(("rollbacks", f"{summary.rollbacks}: the loss was not finite, and some data were passed over"))
    if summary.skipped_updates > 0.1 * max(summary.steps, 1):
        rows.append((
            "warning",
            f"{summary.skipped_updates:,} of {summary.steps:,} updates were skipped, because their gradient was not "
            "finite: lower the learning rate, or train in mixed_bfloat16 or float32",
        ))  # fmt: skip
    if summary.unreadable:
        shown = [f"{record} ({why})" for record, why in list(summary.unreadable.items())[:20]]
        left = [f"and {len(summary.unreadable) - 20} more, see summary.json"] if len(summary.unreadable) > 20 else []
        rows.append(("unreadable", "\n".join([*shown, *left])))
    rows.append(("folder", summary.workdir))
    if summary.status == "done":
        rows.append(
            ("look at", f"{summary.workdir}/plots/learning_curves.png\ntensorboard --logdir {summary.workdir}/logs")
        )
    else:
        served = f" {summary.stop_seconds:.1f} s after the signal" if summary.stop_seconds is not None else ""
        saved = f"; all is saved in {summary.checkpoint}" if summary.checkpoint else ""
        rows.append(
            (
                "continue",
                f"stopped{served}{saved}; the same command goes on there (with --workdir={summary.workdir})",
            )
        )
    return f"{summary.status}\n" + display.table(rows)
