"""Checks of one run before it starts: data, batch arithmetic, memory, disk, folder."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from vit_tpu.data import decode, records
from vit_tpu.data.source import Source
from vit_tpu.diagnose import fitting, memory, shapes
from vit_tpu.diagnose.findings import Finding
from vit_tpu.diagnose.machine import Machine
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.training import inputs, schedule
from vit_tpu.training.workdir import Workdir

SAMPLED = 64  # records decoded: the first, the last and others at random


def check(config: Config, machine: Machine, replicas: int = 1, hardware: str = "CPU") -> list[Finding]:
    """Returns findings on the run that `config` describes; nothing is written and no model is built.

    Args:
      config: checked.
      machine: from `machine.look()`.
      replicas: devices that share a batch.
      hardware: "CPU", "GPU" or "TPU".
    """
    findings = [*_paths(config), *_arithmetic(config, replicas), *_folder(config)]
    sources: dict[str, Source] = {}
    for split in ("train", "validation"):
        try:
            sources[split] = inputs.open_source(config, split)
        except UserError as error:
            found = Finding("error", "data", str(error))
            findings += [found] if found not in findings else []  # a missing folder is missing for both splits
    for split, source in sources.items():
        findings += _data(config, source, split)
    if "train" in sources:
        train = sources["train"]
        classes = config.model.num_classes or train.num_classes
        findings += _length(config, train)
        shape = shapes.of_config(config, classes, replicas)
        findings += shapes.check(shape, hardware, config.model.pool)
        channels = inputs.channels(config, train)
        measure = functools.partial(
            memory.breakdown, classes=classes, channels=channels, replicas=replicas, hardware=hardware
        )
        findings += fitting.check(config, machine, measure, replicas, hardware)
        findings += _disk(config, measure(config))
    return findings


def _paths(config: Config) -> Iterator[Finding]:
    if not config.tpu or config.tpu == "local":
        return
    for key, path in (("data.path", config.data.path), ("workdir", config.workdir)):
        if path and "://" not in path:
            yield Finding(
                "error", "paths", f"{key}={path} is a path of this machine, but the TPU {config.tpu} is another one",
                "put it on gs://, or run on the TPU VM itself with tpu=local",
            )  # fmt: skip


def _arithmetic(config: Config, replicas: int) -> Iterator[Finding]:
    t = config.training
    unit = replicas * t.accumulation_steps
    if t.batch_size % unit:
        lower = t.batch_size // unit * unit
        near = " or ".join(str(size) for size in (lower, lower + unit) if size)
        yield Finding(
            "error", "batch", f"{t.batch_size} examples do not divide into {replicas} replicas of "
            f"{t.accumulation_steps} micro-batches", f"training.batch_size {near}",
        )  # fmt: skip
    else:
        yield Finding(
            "ok", "batch", f"{t.batch_size} = {replicas} replicas x {t.accumulation_steps} micro-batches x "
            f"{t.batch_size // unit} examples",
        )  # fmt: skip


def _length(config: Config, train: Source) -> Iterator[Finding]:
    try:
        schedule.learning_rate(config, schedule.plan(config, train.num_examples))
    except UserError as error:
        yield Finding("error", "length", str(error))


def _data(config: Config, source: Source, split: str) -> Iterator[Finding]:
    broken = []
    chosen = np.unique(np.r_[
        0, source.num_examples - 1, np.random.default_rng(0).integers(0, source.num_examples, SAMPLED)
    ])  # fmt: skip
    channels = inputs.channels(config, source)
    read = records.make_reader(source, (8, 8), channels, decode.Decode(), "resize")
    for index in chosen:
        try:
            record = source.get(tf.constant(index, tf.int64))
            read(record["image"], tf.constant(0, tf.uint64))
        except tf.errors.OpError:
            broken.append(source.name_of(int(index)))
    if broken:
        named = ", ".join(broken[:3]) + (", ..." if len(broken) > 3 else "")
        yield Finding(
            "error" if split == "validation" or len(broken) > 1 else "warning", "data",
            f"{len(broken)} of {len(chosen)} {split} records looked at cannot be read: {named}",
            "repair or remove them, or set data.max_broken",
        )  # fmt: skip
    try:
        inputs.num_classes(config, source)
    except UserError as error:
        yield Finding("error", "labels", str(error))
        return
    if source.labels.ndim == 1:
        counts = np.bincount(source.labels, minlength=source.num_classes)
        empty = np.flatnonzero(counts == 0)
        if (counts > 0).sum() == 1:
            yield Finding(
                "error", "labels", f"all {split} examples are of one class", "give it something to tell apart"
            )
        elif len(empty):
            names = ", ".join(source.class_names[i] for i in empty[:5])
            yield Finding("warning", "labels", f"{len(empty)} classes have no {split} example: {names}")
        elif split == "train" and counts.max() > 100 * counts.min():
            yield Finding(
                "note", "labels", f"the largest class has {counts.max():,} examples, the smallest {counts.min():,}"
            )
    if not broken:
        yield Finding(
            "ok",
            "data",
            f"{split}: {source.num_examples:,} examples of {source.num_classes} classes, {len(chosen)} decoded",
        )


def _disk(config: Config, needs: memory.Breakdown) -> Iterator[Finding]:
    if "://" in (config.workdir or ""):
        return
    folder = pathlib.Path(config.workdir or "runs")
    parent = next((p for p in (folder, *folder.absolute().parents) if p.exists()), pathlib.Path("/"))
    free, needed = shutil.disk_usage(parent).free, 3 * needs.state  # two kept and one being written
    if free < needed:
        yield Finding(
            "error", "disk", f"three checkpoints take up to {_gib(needed)}, and {parent} has {_gib(free)} free",
            "free space, or another --workdir",
        )  # fmt: skip
    else:
        yield Finding("ok", "disk", f"{_gib(free)} free, checkpoints need up to {_gib(needed)}")


def _folder(config: Config) -> Iterator[Finding]:
    if config.workdir is None or "://" in config.workdir:
        return
    folder = pathlib.Path(config.workdir)
    parent = next((p for p in (folder, *folder.absolute().parents) if p.exists()), pathlib.Path("/"))
    if not parent.is_dir():
        yield Finding("error", "folder", f"{parent} is a file", "another --workdir")
    elif not os.access(parent, os.W_OK):
        yield Finding("error", "folder", f"{parent} cannot be written to", "another --workdir, or its permissions")
    elif other := _other_run(config):
        yield Finding("error", "folder", other)
    else:
        yield Finding("ok", "folder", f"{folder} can be written")


def _other_run(config: Config) -> str | None:
    if config.workdir and os.path.lexists(config.workdir):
        try:
            Workdir(config.workdir).check_same_run(config)
        except UserError as error:
            return str(error)
    return None


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
