"""From the data section of a config to sources and pipelines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data import arrays, digits, folders, in_memory, labels, pipeline, synthetic
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.settings import Config

MEMORY_LIMIT = 2**30  # bytes of pixels that are kept in memory without being asked


def open_source(config: Config, split: str) -> Source:
    """Returns the "train" or "validation" split that `config.data` names.

    Raises:
      UserError: it is not there, is empty or cannot be read; says where and what to do.
    """
    data = config.data
    if data.source == "digits":
        return digits.digits(split)
    if data.source == "synthetic":
        size = config.model.image_size
        return synthetic.synthetic(data.size, image_size=size, num_classes=data.classes, channels=data.channels or 3)
    assert data.path is not None  # validate() saw to it
    if data.source == "npz":
        return arrays.from_npz(data.path, split)
    return folders.from_folders(data.path, split, validation_share=data.validation_fraction)


def ready(config: Config, source: Source, broken: BrokenRecords) -> Source:
    """Returns the source with its pixels in memory where the config says so or they fit, else as it is.

    Decoding small files again in every epoch costs more than the step; random crops need the whole files.
    """
    data = config.data
    wanted = data.in_memory
    if not source.encoded or wanted is False:
        return source
    size, colours = config.model.image_size, channels(config, source)
    if wanted is None:
        wanted = data.crop == "resize" and in_memory.memory_bytes(source, size, colours) <= MEMORY_LIMIT
    elif data.crop == "inception":
        raise UserError(
            "data.in_memory holds finished images, but data.crop=inception cuts them from the files: leave one out"
        )
    if not wanted:
        return source
    return in_memory.load_into_memory(source, size, channels=colours, limit=2**62, broken=broken)


def num_classes(config: Config, source: Source) -> int:
    """Returns the size of the head: the config's, or as many as the data has; every label is checked against it."""
    classes = config.model.num_classes or source.num_classes
    labels.check_labels(source, classes)
    return classes


def channels(config: Config, source: Source) -> int:
    if config.data.channels:
        return config.data.channels
    return source.image_shape[2] if source.image_shape else 3


def budget(config: Config, source: Source) -> BrokenRecords:
    """Returns the list for unreadable training files and how many it may hold."""
    allowed = config.data.max_broken
    return BrokenRecords(allowed if allowed is not None else math.ceil(source.num_examples / 1000))


def train_data(config: Config, source: Source, start_step: int, broken: BrokenRecords) -> tf.data.Dataset:
    """Returns the endless training batches from `start_step` on; unreadable files are added to `broken`."""
    data, training = config.data, config.training
    return pipeline.train_pipeline(
        source,
        batch_size=training.batch_size,
        image_size=config.model.image_size,
        seed=training.seed,
        start_step=start_step,
        channels=channels(config, source),
        crop=data.crop,
        crop_area=data.crop_area,
        flip=data.flip,
        shift=data.shift,
        mixup=data.mixup,
        label_format="onehot" if data.mixup else "int",
        num_classes=num_classes(config, source),
        deterministic=True,
        broken=broken,
    )


def eval_data(config: Config, source: Source, broken: BrokenRecords) -> tf.data.Dataset:
    """Returns batches (images, labels, weights) that hold every example exactly once; unreadable files are added to
    `broken`."""
    size = config.training.batch_size
    return pipeline.eval_pipeline(
        source,
        batch_size=size,
        image_size=config.model.image_size,
        channels=channels(config, source),
        num_classes=num_classes(config, source),
        crop="central" if config.data.crop == "inception" else "resize",
        broken=broken,
    )


def steps_per_epoch(config: Config, source: Source) -> float:
    """Returns examples / batch; the order runs through epoch boundaries, so an epoch need not be whole steps."""
    if source.num_examples < 1:
        raise UserError(f"{source.name} has no examples")
    return source.num_examples / config.training.batch_size


def describe(source: Source, role: str) -> str:
    kind: Any = "files" if source.encoded else "x".join(map(str, source.image_shape or ())) + " in memory"
    return f"{role}: {source.name}, {source.num_examples:,} examples ({kind}), {source.num_classes} classes"


def predictions(config: Config, model: Any, source: Source, limit: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the first `limit` pictures as uint8 [H, W, C], as the model sees them, and their logits [n, C]."""
    dataset = eval_data(config, source, BrokenRecords(0))
    pictures: list[np.ndarray] = []
    logits: list[np.ndarray] = []
    for images, _, _ in dataset:
        logits.append(model.logits(images).numpy())
        pictures += list(np.rint((images.numpy() + 1.0) * 127.5).astype(np.uint8))
        if len(pictures) >= limit:
            break
    count = min(limit, source.num_examples)
    return pictures[:count], np.concatenate(logits)[:count]
