"""One run, from a config to a folder with a trained model: the function behind `python -m vit_tpu.train`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu import config as configs
from vit_tpu import devices
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.models.vit import ViT
from vit_tpu.settings import Config
from vit_tpu.training import build, callbacks, display, inputs, peak, plots, profiling, schedule, state, summary
from vit_tpu.training.summary import Summary
from vit_tpu.training.workdir import Workdir


def run(config: Config, workdir: str | os.PathLike[str] | None = None) -> Summary:
    """Trains as `config` says and returns what came of it; the folder holds config, metrics, logs, checkpoints and
    pictures.

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
    reports: list[Any] = []
    model = build.build_model(config, here, classes, inputs.channels(config, train), plan, reports)
    start = folder.resume(model)
    print(summary.opening(config, here, model, train, validation, plan, folder, start), flush=True)
    if start >= plan.total_steps and folder.summary().get("status") == "done":
        result = Summary(**folder.summary())
        print(f"{folder.path} is finished already: nothing to do\n{summary.ending(result)}", flush=True)
        return result
    if start >= plan.total_steps:
        raise UserError(
            f"{folder.path} has trained {start:,} steps already and {plan.total_steps:,} are asked for: nothing to do"
        )
    window = None
    if config.training.profile is not None:
        window = profiling.ProfileWindow(
            folder.path / "logs", config.training.profile, steps_per_execution=plan.steps_per_execution, start=start,
            total_steps=plan.total_steps,
        )  # fmt: skip
    folder.make(config)
    for report in reports:
        folder.write_json("init_report.json", report.to_dict())
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
        valid,
        plan.evaluate_every,
        logger,
        start=start,
        averaged=config.training.evaluate_ema,
        check=valid_broken.check,
        skip=stop,
    )
    extra = {"config": configs.to_dict(config), "versions": summary.versions()}
    saver = callbacks.Checkpointer(
        folder.checkpoints, plan.checkpoint_every, start=start, extra=extra, clock=logger.clock
    )
    watchers = [logger, evaluator, saver, stop, *([window] if window else [])]
    try:
        with stop.on_signals(progress.say), _numerics_checked(config.training.check_numerics):
            model.fit(data, epochs=1, steps_per_epoch=plan.total_steps - start, verbose=0, callbacks=watchers)
    except Exception as error:
        if isinstance(error, NonFiniteError):
            _keep_last_good(model, folder, extra)
        broken.check()  # an unreadable file inside tf.data arrives as an obscure error: say which file
        valid_broken.check()
        raise
    finally:
        progress.close()
        logger.close()
        folder.release()
    # A signal after the last step interrupts nothing.
    interrupted = stop.requested and model.counters.values()["steps"] < plan.total_steps
    result = summary.summarise(config, here, model, folder, logger, evaluator, interrupted, began, top, where)
    folder.write_json("summary.json", dataclasses.asdict(result))
    if result.status == "done":
        _draw(config, model, validation, folder)
    print(summary.ending(result), flush=True)
    return result


def _keep_last_good(model: ViT, folder: Workdir, extra: dict[str, Any]) -> None:
    """Writes the state before a non-finite loss: the latched step has changed nothing since."""
    bad = model.counters.values()["bad_step"]
    if bad > 1:
        model.counters.bad_step.assign(0)
        model.counters.steps.assign(bad - 1)
        path = state.save(model, folder.checkpoints, bad - 1, extra)
        print(f"the weights after step {bad - 1} are in {path}", flush=True)


def _draw(config: Config, model: ViT, validation: Source, folder: Workdir) -> None:
    size = "x".join(map(str, model.image_size))
    title = (
        f"{config.data.source}, {model.variant.depth} blocks, width {model.variant.width}, image "
        f"{size}, {config.precision}"
    )
    plots.learning_curves(folder.path, title)
    if validation.labels.ndim == 1:
        images, logits = inputs.predictions(config, model, validation, limit=2048)
        ids = [validation.name_of(i) for i in range(len(images))]
        shares = tf.nn.softmax(logits).numpy() if config.training.loss == "softmax" else tf.sigmoid(logits).numpy()
        plots.prediction_sheet(
            folder.path, images, validation.labels[: len(images)], shares, validation.class_names, ids
        )


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
        text = str(error)
        found = text[text.find("!!! Detected") :] if "!!! Detected" in text else text
        raise FloatingPointError(f"check_numerics: {' '.join(found.split('Graph name')[0].split())[:600]}") from error
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
    model = build.build_model(config, here, inputs.num_classes(config, train), inputs.channels(config, train), plan)
    return summary.opening(
        config, here, model, train, validation, plan, Workdir(config.workdir or "(none: dry run)"), 0
    )
