"""From the data section of a config to sources and pipelines."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data import (
    array_records,
    arrays,
    cache,
    class_names,
    digits,
    exif,
    folders,
    labels,
    manifests,
    pipeline,
    samples,
    synthetic,
    tfds,
    tfrecords,
)
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.decode import Decode
from vit_tpu.data.examples import IMAGE_KEY, LABEL_KEY, TEXT_KEY, Keys
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.settings import Config


def open_source(config: Config, split: str) -> Source:
    """Returns the "train" or "validation" split that `config.data` names.

    Raises:
      UserError: it is not there, is empty or cannot be read; says where and what to do.
    """
    data = config.data
    names = class_names.read(data.class_names) if data.class_names else None
    source = _open(config, split, names)
    if names is not None and data.class_names:
        source = class_names.apply(source, names, data.class_names)
    if split == "train":
        if config.model.num_classes is None:
            labels.check_start(source)
        labels.tell_unseen(source, config.model.num_classes)
    return source


def _open(config: Config, split: str, names: tuple[str, ...] | None) -> Source:
    data = config.data
    if data.source == "digits":
        return digits.digits(split)
    if data.source == "synthetic":
        size = config.model.image_size
        return synthetic.synthetic(data.size, image_size=size, num_classes=data.classes, channels=data.channels or 3)
    parts: dict[str, Any] = {"validation_share": data.validation_fraction}
    if data.source == "folder":
        return folders.from_folders(_path(data.path), split, **parts)
    parts["label_offset"] = data.label_offset
    if data.source == "npz":
        return arrays.from_npz(_path(data.path), split, **parts)
    parts |= {"train_name": data.split, "validation_name": data.validation_split, "names": names,
              "multi_label": data.multi_label}  # fmt: skip
    if data.source == "tfds":
        return tfds.from_tfds(data.path, data.name, split, image_key=data.image_key, label_key=data.label_key, **parts)
    if data.source == "manifest":
        return manifests.from_manifest(
            _path(data.path), split, image_key=data.image_key or "image", label_key=data.label_key or "label", **parts
        )
    # The names of classes beside the labels are ImageNet's habit; a key of one's own stands alone.
    keys = Keys(data.image_key or IMAGE_KEY, data.label_key or LABEL_KEY, None if data.label_key else TEXT_KEY)
    opener = tfrecords.from_tfrecords if data.source == "tfrecord" else array_records.from_array_records
    return opener(_path(data.path), split, keys=keys, **parts)


def _path(path: str | None) -> str:
    if path is None:
        raise UserError("data.path is missing: say where the images are")
    return path


def decode_options(config: Config) -> Decode:
    """Returns how files become pixels."""
    return Decode(background=config.data.background, exif=config.data.exif)


def ready(config: Config, source: Source, broken: BrokenRecords) -> Source:
    """Returns the source with its files or pixels in memory where `data.cache` says so, else as it is.

    Decoding small files again in every epoch costs more than the step; random crops need the whole files. Says how
    many files a camera marked as turned.
    """
    data = config.data
    turned = exif.sentence(source, data.exif)
    if turned:
        print(turned, flush=True)
    kind = "none" if data.data_service and source.encoded else data.cache
    held, sentence = cache.hold(
        source, kind, config.model.image_size, channels=channels(config, source), crop=data.crop,
        decode=decode_options(config), broken=broken, folder=data.cache_dir,
    )  # fmt: skip
    if sentence:
        print(sentence, flush=True)
    return held


def num_classes(config: Config, source: Source, head: int | None = None) -> int:
    """Returns the size of the head: `head`, the config's, or as many as the data has.

    Every label is checked against it: give the training data's number as `head` for the validation data, whose labels
    may run further.

    Raises:
      UserError: a label that does not fit, naming its record.
    """
    classes = head or config.model.num_classes or source.num_classes
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


def train_data(
    config: Config, source: Source, start_step: int, broken: BrokenRecords, num_hosts: int = 1, host: int = 0
) -> tf.data.Dataset:
    """Returns the endless training batches from `start_step` on, or a host's share of them; unreadable files are added
    to `broken`."""
    data, training = config.data, config.training
    return pipeline.train_pipeline(
        source,
        num_hosts=num_hosts,
        host=host,
        batch_size=training.batch_size,
        image_size=config.model.image_size,
        seed=training.seed,
        start_step=start_step,
        channels=channels(config, source),
        crop=data.crop,
        crop_area=data.crop_area,
        flip=data.flip,
        shift=data.shift,
        policy=data.policy,
        policy_layers=data.policy_layers,
        policy_magnitude=data.policy_magnitude,
        jitter=data.jitter,
        erasing=data.erasing,
        erasing_count=data.erasing_count,
        repeats=data.repeats,
        mixup=data.mixup,
        cutmix=data.cutmix,
        label_format="onehot" if data.mixup or data.cutmix else "int",
        num_classes=num_classes(config, source),
        deterministic=True,
        decode=decode_options(config),
        broken=broken,
        services=data.data_service,
    )


def eval_data(
    config: Config, source: Source, broken: BrokenRecords, num_hosts: int = 1, host: int = 0
) -> tf.data.Dataset:
    """Returns batches (images, labels, weights) that hold every example exactly once, or a host's share of them;
    unreadable files are added to `broken`."""
    size = config.training.batch_size
    return pipeline.eval_pipeline(
        source,
        num_hosts=num_hosts,
        host=host,
        batch_size=size,
        image_size=config.model.image_size,
        channels=channels(config, source),
        num_classes=num_classes(config, source),
        crop=eval_crop(config),
        decode=decode_options(config),
        broken=broken,
    )


def eval_crop(config: Config) -> str:
    """Returns how evaluation brings an image to the model's size: as published for runs that train on random crops."""
    return "central" if config.data.crop == "inception" else "resize"


def sample(config: Config, source: Source, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns up to `count` examples spread over the source, as the evaluation sees them: images uint8 [n, H, W, C]
    and labels [n]."""
    found = samples.sample_images(
        source, count, image_size=config.model.image_size, channels=channels(config, source), crop=eval_crop(config),
        decode=decode_options(config),
    )  # fmt: skip
    return np.asarray(found["image"]), np.asarray(found["label"])


def steps_per_epoch(config: Config, source: Source) -> float:
    """Returns examples / batch; the order runs through epoch boundaries, so an epoch need not be whole steps."""
    if source.num_examples < 1:
        raise UserError(f"{source.name} has no examples")
    return source.num_examples / config.training.batch_size


def identity(train: Source, validation: Source) -> dict[str, Any]:
    """Returns what all hosts must have alike: numbers of examples, and a hash of the labels in their order."""
    found: dict[str, Any] = {}
    for role, source in (("training", train), ("validation", validation)):
        found[f"{role} examples"] = source.num_examples
        digest = hashlib.sha256(np.ascontiguousarray(source.labels).tobytes()).hexdigest()[:12]
        found[f"{role} labels (their hash)"] = digest
    return found


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
