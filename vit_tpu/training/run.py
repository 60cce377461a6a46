"""One run, from a config to a folder with a trained model: the function behind `python -m vit_tpu.train`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu import cluster as clusters
from vit_tpu import config as configs
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.diagnose import memory, oom, shortage
from vit_tpu.errors import OutOfMemoryError, UserError, WorkerError
from vit_tpu.models.guard import NonFiniteError, StepGuard
from vit_tpu.models.vit import ViT
from vit_tpu.settings import Config
from vit_tpu.tpu import lint
from vit_tpu.training import (
    board,
    build,
    callbacks,
    checking,
    checkpoints,
    display,
    failure,
    gauges,
    guest,
    hosts,
    inputs,
    peak,
    plots,
    profiling,
    remote,
    resume,
    rollback,
    schedule,
    storage,
    summary,
)
from vit_tpu.training.logger import Logger
from vit_tpu.training.stopping import StopOnRequest
from vit_tpu.training.summary import Summary
from vit_tpu.training.workdir import Workdir

ASK_THE_COMPILER = (
    "the TPU compiler's own answer, fits or not: python -m vit_tpu.plan with the same --config and settings"
)


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
      OutOfMemoryError: a step does not fit; says by how much and what to change; the last checkpoint stays.
    """
    config = configs.validate(config)
    if config.model.pool == "none":
        raise UserError("model.pool=none gives one output for each patch, which no label fits: take tok, gap or map")
    remote.check_paths(config, workdir)
    cluster = clusters.find(config.workers, config.worker)
    with hosts.together(cluster, hosts.facts(config), config.worker_timeout) as team:
        _seed(config)
        folder = guest.open_folder(team, lambda: Workdir.open(workdir or config.workdir, config))
        return _guarded(config, folder, team)


def _guarded(config: Config, folder: Workdir, team: hosts.Team) -> Summary:
    stop, request, known = StopOnRequest(team=team), profiling.Request(), dict[str, Any]()
    try:
        with stop.on_signals(), request.on_signal(), team.explained():
            return _run(config, folder, team, stop, request, known)
    except (UserError, FloatingPointError, WorkerError):
        raise
    except Exception as error:
        unsupported = lint.explain(error)
        if unsupported is not None:
            raise UserError(unsupported) from error
        told = oom.message(error, config, **known, kept=_kept(folder))
        if told is None:
            raise
        raise OutOfMemoryError(told) from error
    finally:
        folder.release()


def _kept(folder: Workdir) -> str:
    found = checkpoints.steps(folder.checkpoints)
    return f"the checkpoint of step {found[0]:,} is whole: the run continues from it" if found else ""


def _run(
    config: Config, folder: Workdir, team: hosts.Team, stop: StopOnRequest, request: profiling.Request,
    known: dict[str, Any],
) -> Summary:  # fmt: skip
    """`known` gets what is found out about devices and data, for an error's message."""
    began = time.perf_counter()
    here = build.choose_devices(config, team.cluster)
    team.collectives = team.size > 1
    stop.keep_signals()
    known.update(hardware=here.kind, replicas=here.replicas)
    train, validation = inputs.open_source(config, "train"), inputs.open_source(config, "validation")
    classes = inputs.num_classes(config, train)
    known.update(classes=classes, channels=inputs.channels(config, train))
    inputs.num_classes(config, validation, classes)
    broken, valid_broken = inputs.budget(config, train), BrokenRecords(0)
    train, validation = inputs.ready(config, train, broken), inputs.ready(config, validation, valid_broken)
    team.compare("data", inputs.identity(train, validation))
    plan = schedule.plan(config, train.num_examples)
    stop.steps_per_execution = plan.steps_per_execution
    start = guest.agree_start(team, lambda: resume.find(config, folder.checkpoints))
    reports: list[Any] = []
    # A checkpoint holds the weights already; a run that begins takes those of init_from.
    first = dataclasses.replace(
        config, init_from=resume.weights_at(config.init_from) if config.init_from and not start.path else None
    )
    model = build.build_model(first, here, classes, inputs.channels(config, train), plan, reports)
    start = resume.load(start, model, config)
    batch, moved = resume.first_batch(start, config.training.batch_size // config.data.repeats)
    start = dataclasses.replace(start, notes=(*start.notes, *moved))
    notes = (*start.notes, *remote.check(config, here, train, validation))
    print(summary.opening(config, here, model, train, validation, plan, folder, start.step, notes), flush=True)
    print("".join(f"{line}\n" for line in oom.warning(config, **known)), end="", flush=True)
    if start.step >= plan.total_steps and folder.summary().get("status") == "done":
        result = dataclasses.replace(summary.read(folder.summary()), workdir=str(folder.path))  # it may have moved
        print(f"{folder.path} is finished already: nothing to do\n{summary.ending(result)}", flush=True)
        return result
    if start.step >= plan.total_steps:
        raise UserError(
            f"{folder.path} has trained {start.step:,} steps already and {plan.total_steps:,} are asked for: nothing "
            "to do"
        )
    profiler = profiling.Profiler(
        folder.path, config.training.profile, steps_per_execution=plan.steps_per_execution, start=start.step,
        total_steps=plan.total_steps, request=request,
    )  # fmt: skip
    guest.make_folder(team, folder, config)
    for report in reports:
        folder.write_json("init_report.json", report.to_dict())
    top, where = peak.of_devices(here.kind, here.replicas, config.precision != "float32")
    progress = display.Progress(plan.total_steps, start.step)
    profiler.say, stop.say = progress.say, progress.say if team.chief else team.say
    metrics = start.manifest.get("metrics", {})
    logger = Logger(
        folder.path, plan.log_every, batch_size=config.training.batch_size, total_steps=plan.total_steps,
        start=start.step, progress=progress, examples_per_epoch=train.num_examples, metrics=metrics, peak=top,
        gauges=gauges.of_run(config, model, validation, progress.say, plan.total_steps),
    )  # fmt: skip
    profiler.clock = logger.clock
    forgotten = logger.forget_after(start.step)
    if forgotten:
        print(
            f"{folder.path}: {forgotten} line(s) of metrics.jsonl beyond "
            f"{f'the checkpoint of step {start.step:,}' if start.path else 'the start, as there is no checkpoint,'} "
            "removed: those steps are taken again",
            flush=True,
        )
    logger.open()
    facts = {key: configs.get(config, key) for key in configs.all_keys()}
    board.hyperparameters(logger.writers["train"], facts, configs.to_yaml(config))
    evaluator = callbacks.Evaluator(
        here.batches(functools.partial(inputs.eval_data, config, validation, valid_broken), config.training.batch_size),
        plan.evaluate_every, logger, start=start.step,
        averaged=config.training.evaluate_ema, check=valid_broken.check, stop=stop, metrics=metrics,
        steps=math.ceil(validation.num_examples / config.training.batch_size),
    )  # fmt: skip
    saver = callbacks.Checkpointer(
        folder.checkpoints, plan.checkpoint_every, start=start.step, keep=plan.keep, clock=logger.clock,
        evaluator=evaluator, weights=folder.weights if config.training.save_weights else None,
        averaged=config.training.evaluate_ema, owned=folder.still_ours, stop=stop, writes=team.chief,
    )  # fmt: skip
    at = rollback.Position(start, batch, config, train.num_examples, train.class_names)
    saver.extra = lambda step: at.manifest(step, model, logger, evaluator, here.replicas)
    # The logger looks for what the guard would, and waits for the device no more often than it is told to.
    watchers = [profiler, logger, evaluator, saver, stop, StepGuard(every=2**62)]
    if config.training.board == "full" and team.chief:
        # After the saver: pictures can wait, a save before a preemption cannot.
        watchers.insert(4, board.Board(logger, plan.evaluate_every, _samples(config, validation),
                                       total_steps=plan.total_steps, start=start.step))  # fmt: skip
    try:
        while not stop.requested:
            data = here.batches(
                functools.partial(inputs.train_data, config, train, at.batch, broken), config.training.batch_size
            )
            steps = plan.total_steps - at.start.step
            try:
                with checking.every_operation(model, wanted=checking.possible(config, model)):
                    model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=watchers)
                break
            except NonFiniteError as error:
                if team.chief:
                    progress.say(_where(folder, config, model, train, at, here.replicas))
                rollback.after(error, at, model, saver, logger, evaluator, watchers, team)  # or raises
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):
            saver.writer.take_over()
        found = checkpoints.steps(folder.checkpoints)
        kept = f"the checkpoint of step {found[0]:,} is whole" if found else "nothing had been saved yet"
        progress.say(f"stopped at once: {kept}")
        raise
    except Exception:
        broken.check()  # an unreadable file inside tf.data arrives as an obscure error: say which file
        valid_broken.check()
        raise
    finally:
        with contextlib.suppress(Exception):  # the error on its way says more
            saver.writer.wait()
        progress.close()
        logger.close()
    served = stop.seconds_since()
    # A signal after the last step interrupts nothing.
    interrupted = stop.requested and model.counters.values()["steps"] < plan.total_steps
    result = summary.summarise(config, here, model, folder, logger, evaluator, interrupted, began, top, where)
    result = dataclasses.replace(
        result, rollbacks=at.start.rollbacks, micro_steps=at.micro_steps(result.steps),
        stop_seconds=served if interrupted else None,
        checkpoint=checkpoints.folder_of(folder.checkpoints, result.steps) if result.steps else None,
        unreadable=dict(broken.reasons),
    )  # fmt: skip
    folder.write_json("summary.json", dataclasses.asdict(result))
    team.meet("end")
    if result.status == "done" and team.chief:
        with _local(folder) as place:
            _draw(config, model, validation, place)
    print(summary.ending(result), flush=True)
    return result


@contextlib.contextmanager
def _local(folder: Workdir) -> Iterator[str]:
    """Gives a folder on disk that pictures can be drawn into: the run's own, or one whose plots are copied there."""
    if storage.is_local(folder.path):
        yield folder.path
        return
    with tempfile.TemporaryDirectory() as place:
        storage.write_text(storage.join(place, "metrics.jsonl"), folder.file("metrics.jsonl") or "")
        yield place
        storage.make_folder(folder.path_of("plots"))
        for name in storage.names(storage.join(place, "plots")):
            with storage.reading(storage.join(place, "plots", name)) as source:
                drawn = source.read()
            with storage.writing(storage.join(folder.path, "plots", name)) as target:
                target.write(drawn)


def _where(folder: Workdir, config: Config, model: ViT, train: Source, at: rollback.Position, replicas: int) -> str:
    """Keeps the batch of the step that was not finite and returns what can be said of it."""
    counters = model.counters.values()
    bad = counters["bad_step"] or counters["steps"]
    good = bad - 1 if counters["bad_step"] else bad  # many skipped gradients changed nothing, but those steps count
    batch = at.batch + bad - 1 - at.start.step
    try:
        return failure.look(folder.path, config, model, train, batch, bad, replicas, good)
    except Exception as error:  # no memory for it, a full disk, unreadable data: what follows matters more
        return f"step {bad}: it could not be looked at or kept ({type(error).__name__}: {storage.reason(error)})"


def _samples(config: Config, validation: Source) -> board.Samples | None:
    """Validation examples for TensorBoard's pictures and projector; a thousand are enough to see structure."""
    if validation.labels.ndim != 1:
        return None
    return board.Samples(*inputs.sample(config, validation, 1000), validation.class_names)


def _draw(config: Config, model: ViT, validation: Source, folder: str) -> None:
    size = "x".join(map(str, model.image_size))
    title = (
        f"{config.data.source}, {model.variant.depth} blocks, width {model.variant.width}, image "
        f"{size}, {config.precision}"
    )
    plots.learning_curves(folder, title)
    if validation.labels.ndim == 1:
        images, logits = inputs.predictions(config, model, validation, limit=2048)
        ids = [validation.name_of(i) for i in range(len(images))]
        shares = tf.nn.softmax(logits).numpy() if config.training.loss == "softmax" else tf.sigmoid(logits).numpy()
        plots.prediction_sheet(folder, images, validation.labels[: len(images)], shares, validation.class_names, ids)


def _seed(config: Config) -> None:
    keras.utils.set_random_seed(config.training.seed)
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()


def dry_run(config: Config) -> str:
    """Returns the start-up summary of a run and an estimate of its memory, without training or writing anything."""
    config = configs.validate(config)
    here = build.choose_devices(config, clusters.find(config.workers, config.worker), dry=True)
    train, validation = inputs.open_source(config, "train"), inputs.open_source(config, "validation")
    plan = schedule.plan(config, train.num_examples)
    classes = inputs.num_classes(config, train)
    inputs.num_classes(config, validation, classes)
    known: dict[str, Any] = {"classes": classes, "channels": inputs.channels(config, train), "hardware": here.kind}
    needs = memory.breakdown(config, **known, replicas=here.replicas)
    warning = oom.warning(config, **known, replicas=here.replicas)
    memory_text = "\n".join([str(needs), *warning, ASK_THE_COMPILER])
    if here.kind == "CPU" and needs.state > (shortage.of_host() or math.inf):
        return memory_text  # building the model, as the rest asks for, would end this process
    model = build.build_model(config, here, classes, inputs.channels(config, train), plan)
    folder = Workdir(config.workdir or "(none: dry run)")
    opening = summary.opening(config, here, model, train, validation, plan, folder, 0, dry=True)
    return f"{opening}\n\n{memory_text}"
