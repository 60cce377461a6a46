"""One run, from a config to a folder with a trained model: the function behind `python -m vit_tpu.train`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from vit_tpu import config as configs
from vit_tpu import devices, losses, precision
from vit_tpu.config import Config
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.models.vit import ViT
from vit_tpu.optim import LossScale, build, decay
from vit_tpu.training import callbacks, display, inputs, peak, plots, profiling, schedule
from vit_tpu.training.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run did; `summary.json` holds the same.

    Attributes:
      status: "done", or "interrupted" (run the same command again to go on).
      steps: training steps taken; examples_seen: steps x batch.
      applied_updates, skipped_updates: skipped are steps whose gradient was not finite.
      train: the last logged figures; validation: {"accuracy", "loss", "count"} of the last evaluation; best: of the best one.
      images_per_second: training only, without compilation.
      mfu: share of the devices' peak that the model's FLOPs use, or None; peak says what it was compared with.
      compilations: how often the training step was traced and compiled.
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


def run(config: Config, workdir: str | os.PathLike[str] | None = None) -> Summary:
    """Trains as `config` says and returns what came of it; the folder holds config, metrics, logs, checkpoints and pictures.

    An unfinished run in the same folder is continued, exactly.

    Args:
      config: from `load_config`.
      workdir: the run's folder; `config.workdir`, or a free name under runs/, if None.

    Raises:
      UserError: what cannot work; nothing has been trained then.
      NonFiniteError: the loss or the gradients went bad; the last good checkpoint stays.
    """
    config = configs.validate(config)
    began = time.perf_counter()
    _seed(config)
    here = devices.choose(config.strategy, config.tpu)
    folder = Workdir.open(workdir or config.workdir, config)
    train, validation = inputs.open_source(config, "train"), inputs.open_source(config, "validation")
    classes = inputs.num_classes(config, train)
    inputs.num_classes(config, validation)
    broken, valid_broken = inputs.budget(config, train), BrokenRecords(0)
    train, validation = inputs.ready(config, train, broken), inputs.ready(config, validation, valid_broken)
    plan = schedule.plan(config, train.num_examples)
    model = build_model(config, here, classes, inputs.channels(config, train), plan)
    start = folder.resume(model)
    print(summary_text(config, here, model, train, validation, plan, folder, start), flush=True)
    if start >= plan.total_steps:
        raise UserError(f"{folder.path} has trained {start:,} steps already and {plan.total_steps:,} are asked for: nothing to do")
    window = None
    if config.training.profile is not None:
        window = profiling.ProfileWindow(
            folder.path / "logs", config.training.profile, steps_per_execution=plan.steps_per_execution, start=start,
            total_steps=plan.total_steps,
        )  # fmt: skip
    folder.make(config)
    top, where = peak.of_devices(here.kind, here.replicas, config.precision != "float32")
    data = inputs.train_data(config, train, start, broken)
    valid = inputs.eval_data(config, validation, valid_broken)
    progress = display.Progress(plan.total_steps, start)
    logger = callbacks.Logger(
        folder.path, plan.log_every, batch_size=config.training.batch_size, total_steps=plan.total_steps, start=start,
        progress=progress, examples_per_epoch=train.num_examples,
    )  # fmt: skip
    stop = callbacks.StopOnRequest()
    evaluator = callbacks.Evaluator(
        valid, plan.evaluate_every, logger, start=start, averaged=config.training.evaluate_ema, check=valid_broken.check,
        skip=stop,
    )  # fmt: skip
    extra = {"config": configs.to_dict(config), "versions": versions()}
    saver = callbacks.Checkpointer(folder.checkpoints, plan.checkpoint_every, start=start, extra=extra, clock=logger.clock)
    watchers = [logger, evaluator, saver, stop, *([window] if window else [])]
    try:
        with stop.on_signals(progress.say), _numerics_checked(config.training.check_numerics):
            model.fit(data, epochs=1, steps_per_epoch=plan.total_steps - start, verbose=0, callbacks=watchers)
    except Exception:
        broken.check()  # an unreadable file inside tf.data arrives as an obscure error: say which file
        valid_broken.check()
        raise
    finally:
        progress.close()
        logger.close()
    summary = _summarise(config, here, model, folder, logger, evaluator, stop.requested, began, top, where)
    folder.write_summary(dataclasses.asdict(summary))
    if summary.status == "done":
        _draw(config, model, validation, folder)
    print(_ending(summary), flush=True)
    return summary


def build_model(config: Config, here: devices.Devices, classes: int, channels: int, plan: schedule.Plan) -> ViT:
    """Returns the model that `config` describes, compiled, in the strategy's scope."""
    settings = dataclasses.asdict(config.model) | {"num_classes": classes, "channels": channels}
    t = config.training
    with here.scope(), precision.scope(config.precision):
        model = ViT(settings.pop("variant"), **settings)
        if config.init_from:
            from vit_tpu import weights

            print(weights.load_weights(model, config.init_from))
        loss = losses.LOSSES[t.loss](label_smoothing=t.label_smoothing)
        model.compile(
            build_optimizer(config, plan), loss, ["accuracy"], grad_clip_norm=t.grad_clip_norm,
            accumulation_steps=t.accumulation_steps, ema=t.ema, steps_per_execution=plan.steps_per_execution,
            jit_compile=False if t.check_numerics else t.jit, seed=t.seed, freeze=config.optimizer.freeze,
            layer_decay=config.optimizer.layer_decay, max_skipped=t.max_skipped,
        )  # fmt: skip
    return model


def build_optimizer(config: Config, plan: schedule.Plan) -> Any:
    """Returns the optimizer with its schedule, wrapped in a loss scale if the config or float16 asks for one."""
    options = {name: value for name, value in dataclasses.asdict(config.optimizer).items() if value is not None}
    for name in ("name", "learning_rate", "freeze", "layer_decay"):
        options.pop(name, None)
    rate = schedule.learning_rate(config, plan)
    optimizer = build(config.optimizer.name, rate, **options)
    scale = config.loss_scale
    mode = scale.mode
    if mode == "auto":
        mode = "dynamic" if config.precision == "mixed_float16" else "off"
    if mode == "off":
        return optimizer
    return LossScale(
        optimizer, initial_scale=scale.initial, dynamic=mode == "dynamic", growth_steps=scale.growth_steps, min_scale=scale.minimum
    )


def summary_text(
    config: Config, here: devices.Devices, model: ViT, train: Source, validation: Source, plan: schedule.Plan,
    folder: Workdir, start: int,
) -> str:  # fmt: skip
    """Returns the start-up summary: what will run, on what, for how long, and how each parameter is treated."""
    t, v = config.training, model.variant
    parameters = sum(int(np.prod(p.variable.shape)) for p in model.parameters())
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = sum(variable.dtype.size * int(np.prod(variable.shape)) for s in inner._slots.values() for variable in s.values())
    size = "x".join(map(str, model.image_size))
    jit = "whole step" if model.jit and here.replicas == 1 else "forward and backward" if model.jit else "off"
    batch = f"{t.batch_size}" + (f" in {t.accumulation_steps} micro-batches" if t.accumulation_steps > 1 else "")
    if here.replicas > 1:
        batch += f" over {here.replicas} replicas"
    clip = f"clipped at global norm {t.grad_clip_norm:g}" if t.grad_clip_norm else "not clipped"
    scale = getattr(model.optimizer, "loss_scale", None)
    rows = [
        ("workdir", str(folder.path) + (f", continued from step {start:,}" if start else "")),
        ("devices", here.line),
        ("precision", f"{config.precision}, loss scale {'off' if scale is None else f'{float(scale):g}'}, XLA {jit}"
                      + (", every operation checked for NaN (slow)" if t.check_numerics else "")),
        ("data", inputs.describe(train, "train") + "\n" + inputs.describe(validation, "validation")),
        ("model", f"ViT {v.depth} blocks, width {v.width}, MLP {v.mlp_dim}, {v.num_heads} heads, patch {v.patch_size}, pool {model.pool}, "
                  f"image {size}, {model.num_patches} patches"),
        ("size", f"{parameters:,} parameters, {model.flops() / 1e9:.3g} GFLOPs an image (forward), "
                 f"optimizer state {slots / 2**20:,.1f} MiB, weights {parameters * 4 / 2**20:,.1f} MiB"),
        ("length", f"{plan.total_steps:,} steps of {batch}, {plan.total_steps / plan.steps_per_epoch:,.1f} epochs; "
                   f"{plan.steps_per_execution} steps per execution"),
        ("rhythm", f"log every {plan.log_every:,}, evaluate every {plan.evaluate_every:,} steps"),
        ("optimizer", f"{config.optimizer.name}, peak learning rate {config.optimizer.learning_rate:g}, {config.schedule.name}, "
                      f"warm-up {config.schedule.warmup}, gradient {clip}"),
        ("groups", decay.table(model.groups, weight_decay=inner.weight_decay, head_weight_decay=inner.head_weight_decay,
                               trust_ratio=config.optimizer.name == "lamb")),
    ]  # fmt: skip
    if plan.changed:
        rows.append(("changed", "\n".join(plan.changed)))
    return "vit_tpu run\n" + display.table(rows)


def versions() -> dict[str, str]:
    """Returns the versions that a run's numbers depend on."""
    import vit_tpu

    return {
        "vit_tpu": vit_tpu.__version__, "python": sys.version.split()[0], "tensorflow": tf.__version__,
        "tf_keras": keras.__version__, "numpy": np.__version__,
    }  # fmt: skip


def _summarise(
    config: Config, here: devices.Devices, model: ViT, folder: Workdir, logger: callbacks.Logger,
    evaluator: callbacks.Evaluator, interrupted: bool, began: float,
    top: float | None, where: str,
) -> Summary:  # fmt: skip
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


def _draw(config: Config, model: ViT, validation: Source, folder: Workdir) -> None:
    size = "x".join(map(str, model.image_size))
    title = f"{config.data.source}, {model.variant.depth} blocks, width {model.variant.width}, image {size}, {config.precision}"
    plots.learning_curves(folder.path, title)
    if validation.labels.ndim == 1:
        images, logits = inputs.predictions(config, model, validation, limit=2048)
        ids = [validation.name_of(i) for i in range(len(images))]
        shares = tf.nn.softmax(logits).numpy() if config.training.loss == "softmax" else tf.sigmoid(logits).numpy()
        plots.prediction_sheet(folder.path, images, validation.labels[: len(images)], shares, validation.class_names, ids)


def _ending(summary: Summary) -> str:
    rows = [("steps", f"{summary.steps:,} ({summary.applied_updates:,} updates applied, {summary.skipped_updates:,} skipped)")]
    if summary.validation:
        best = summary.best
        rows.append(("validation", f"accuracy {100 * summary.validation['accuracy']:.2f}%, loss {summary.validation['loss']:.4f}, "
                                   f"{summary.validation['count']:,} examples (best {100 * best['accuracy']:.2f}% at step {best['step']:,})"))  # fmt: skip
    if summary.images_per_second:
        share = f", {100 * summary.mfu:.1f}% of peak ({summary.peak})" if summary.mfu else ""
        rows.append(("speed", f"{summary.images_per_second:,.0f} images/s{share}"))
    rows.append(("time", f"{display.duration(summary.seconds)}, peak host memory {summary.peak_host_bytes / 2**30:.2f} GiB, "
                         f"{summary.compilations} compilation(s) of the step"))  # fmt: skip
    rows.append(("folder", summary.workdir))
    if summary.status == "done":
        rows.append(("look at", f"{summary.workdir}/plots/learning_curves.png\ntensorboard --logdir {summary.workdir}/logs"))
    else:
        rows.append(("continue", "run the same command again: it goes on where it stopped"))
    return f"{summary.status}\n" + display.table(rows)


@contextlib.contextmanager
def _numerics_checked(wanted: bool) -> Iterator[None]:
    """TensorFlow's own check of every operation inside the block; it names the operation and the line that made it."""
    if not wanted:
        yield
        return
    tf.debugging.enable_check_numerics()
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if "inf" not in str(error).lower() and "nan" not in str(error).lower():
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise FloatingPointError(f"check_numerics: {lines[0][:300]}") from error
    finally:
        tf.debugging.disable_check_numerics()


def _seed(config: Config) -> None:
    keras.utils.set_random_seed(config.training.seed)
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()


def dry_run(config: Config) -> str:
    """Returns the start-up summary of a run without training it or writing anything."""
    config = configs.validate(config)
    here = devices.choose(config.strategy, config.tpu)
    train, validation = inputs.open_source(config, "train"), inputs.open_source(config, "validation")
    plan = schedule.plan(config, train.num_examples)
    model = build_model(config, here, inputs.num_classes(config, train), inputs.channels(config, train), plan)
    return summary_text(config, here, model, train, validation, plan, Workdir(config.workdir or "(none: dry run)"), 0)
