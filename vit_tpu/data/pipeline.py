"""From a source to the batches that `model.fit` and `model.evaluate` read.

    step -> positions -> record indices -> images uint8 (decode, crop, resize)
         -> batch -> flip, shift -> float32 [-1, 1] -> mixup -> (image, label[, weight])

A step's batch is a function of (seed, step) alone, so starting at step s costs nothing and gives
what an uninterrupted run would have read. Images in memory take a short way: one gather a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_tpu.data import augment, keys, order, preprocess, records
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.decode import Decode
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest

_MIXUP = -1  # where an example's key has its epoch: keeps the step's key apart from all of those


def train_pipeline(
    source: Source,
    *,
    batch_size: int,
    image_size: int | tuple[int, int],
    seed: int = 0,
    start_step: int = 0,
    shuffle: bool = True,
    channels: int | None = None,
    crop: str = "resize",
    crop_area: tuple[float, float] = (0.05, 1.0),
    flip: bool = False,
    shift: int = 0,
    mixup: float = 0.0,
    label_format: str = "int",
    num_classes: int | None = None,
    num_hosts: int = 1,
    host: int = 0,
    deterministic: bool = True,
    decode: Decode | None = None,
    broken: BrokenRecords | None = None,
) -> tf.data.Dataset:
    """Returns an endless dataset of (image, label) batches with static shapes.

    Args:
      source: what to read.
      batch_size: examples in a global batch; this host yields batch_size / num_hosts of them.
      image_size: side or (H, W) in pixels.
      seed: decides order and augmentation.
      start_step: the step whose batch comes first.
      shuffle: False reads the records in order.
      channels: 1 or 3; default: the source's own, 3 for encoded files.
      crop: "resize" squeezes the whole image into image_size; "inception" first cuts a random
        window of a share `crop_area` of the image; "central" as in `eval_pipeline`.
      flip: mirror every other image, at random.
      shift: pixels of padding for a random crop of the finished image (4 is usual for CIFAR).
      mixup: alpha of its Beta distribution, 0 for none; needs label_format "onehot".
      label_format: "int" gives int32 [b]; "onehot" float32 [b, num_classes]. Sources with label
        rows always give their rows.
      num_classes: width of one-hot rows; default: the source's.
      num_hosts, host: which part of each global batch to read.
      deterministic: False lets batches that are ready early overtake others, for speed.
      decode: how files become pixels.
      broken: collects unreadable records; default: with a budget of a thousandth of the records.
        In an unreadable record's place stands the next readable one of its batch.

    Returns:
      A dataset of image float32 [b, H, W, C] in [-1, 1], and label.

    Raises:
      UserError: for a batch that does not divide among the hosts, or an unknown option.
    """
    size = preprocess.height_width(image_size)
    share = order.host_share(batch_size, num_hosts, host)
    channels = _channels(source, channels)
    _choose("label_format", label_format, ("int", "onehot"))
    has_rows = source.labels.ndim == 2
    rows = has_rows or label_format == "onehot"
    if mixup and not rows:
        raise UserError('mixup mixes label rows: set label_format="onehot"')
    width = _row_width(source, num_classes)
    if broken is None:
        broken = BrokenRecords(math.ceil(source.num_examples / 1000))

    def steps(parts: int) -> tf.data.Dataset:
        return tf.data.Dataset.counter(start_step * parts)

    def find(positions: tf.Tensor) -> records.Tensors:
        epoch, index = order.locate(positions, source.num_examples, seed, shuffle)
        return {"index": index, "key": keys.make_key(seed, epoch, index)}

    def own_positions(step: tf.Tensor) -> tf.Tensor:
        return order.host_positions(step, batch_size, num_hosts, host)

    def position_before(step: tf.Tensor) -> tf.Tensor:
        previous = (host * share - 1) % batch_size
        return tf.reshape(tf.cast(step, tf.int64) * batch_size + previous, [1])

    def load(positions: Callable[[tf.Tensor], tf.Tensor], count: int) -> tf.data.Dataset:
        return _load(source, steps, positions, find, count, size, channels, decode or Decode(),
                     crop, crop_area, flip, broken)  # fmt: skip

    def augmented(batch: records.Tensors) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels = batch["image"], batch["label"]
        if flip and _is_short(source, crop):  # the long way has mirrored each record
            images = augment.random_flip(images, batch["key"])
        images = preprocess.to_float(augment.random_shift(images, batch["key"], shift))
        if rows and not has_rows:
            labels = tf.one_hot(labels, width)
        return images, labels

    def finish(
        step: tf.Tensor, batch: records.Tensors, before: records.Tensors | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels = augmented(records.replace_broken(batch) if source.encoded else batch)
        if mixup:
            pair = None
            if before is not None:
                image, label = augmented(before)
                ok = before["ok"][0]
                pair = tf.where(ok, image[0], images[0]), tf.where(ok, label[0], labels[0])
            images, labels = augment.mixup(images, labels, keys.make_key(seed, _MIXUP, step), mixup, pair)
        images = tf.ensure_shape(images, [share, *size, channels])
        return images, tf.ensure_shape(labels, [share, width] if rows else [share])

    parts = [steps(1), load(own_positions, share)]
    if mixup and num_hosts > 1:
        # The first example's partner is the last one of the host before: read it here too, so
        # that the number of hosts does not change the batch.
        parts.append(load(position_before, 1))
    dataset = tf.data.Dataset.zip(tuple(parts)).map(finish, num_parallel_calls=tf.data.AUTOTUNE)
    return _with_options(dataset, deterministic).prefetch(tf.data.AUTOTUNE)


def eval_pipeline(
    source: Source,
    *,
    batch_size: int,
    image_size: int | tuple[int, int],
    channels: int | None = None,
    crop: str = "resize",
    label_format: str = "int",
    num_classes: int | None = None,
    num_hosts: int = 1,
    host: int = 0,
    decode: Decode | None = None,
    broken: BrokenRecords | None = None,
) -> tf.data.Dataset:
    """Returns a dataset of (image, label, weight) with every example once, in order.

    The last global batch is filled up with copies of the last record of weight 0, so all hosts
    have the same number of equal batches and sums of weights count examples.

    Args:
      crop: "resize" squeezes the whole image into image_size; "central" resizes the smaller side
        to 8/7 of image_size and cuts out the middle.
      broken: collects unreadable records, which get weight 0; default: a budget of 0.
      The others are as in `train_pipeline`.

    Returns:
      A dataset of known length: image float32 [b, H, W, C] in [-1, 1], label int32 [b] or float32
      [b, num_classes], weight float32 [b].
    """
    size = preprocess.height_width(image_size)
    share = order.host_share(batch_size, num_hosts, host)
    channels = _channels(source, channels)
    _choose("label_format", label_format, ("int", "onehot"))
    has_rows = source.labels.ndim == 2
    rows = has_rows or label_format == "onehot"
    width = _row_width(source, num_classes)
    num_steps = math.ceil(source.num_examples / batch_size)
    last = source.num_examples - 1

    def find(positions: tf.Tensor) -> records.Tensors:
        index = tf.minimum(positions, last)
        weight = tf.cast(positions <= last, tf.float32)
        return {"index": index, "weight": weight, "key": tf.cast(index, tf.uint64)}

    def own_positions(step: tf.Tensor) -> tf.Tensor:
        return order.host_positions(step, batch_size, num_hosts, host)

    def finish(batch: records.Tensors) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        images, labels = preprocess.to_float(batch["image"]), batch["label"]
        if rows and not has_rows:
            labels = tf.one_hot(labels, width)
        weight = batch["weight"] * tf.cast(batch["ok"], tf.float32)
        images = tf.ensure_shape(images, [share, *size, channels])
        labels = tf.ensure_shape(labels, [share, width] if rows else [share])
        return images, labels, tf.ensure_shape(weight, [share])

    dataset = _load(
        source, lambda parts: tf.data.Dataset.range(num_steps * parts), own_positions, find, share,
        size, channels, decode or Decode(), crop, (1.0, 1.0), False, broken or BrokenRecords(0),
    )  # fmt: skip
    dataset = dataset.map(finish, num_parallel_calls=tf.data.AUTOTUNE)
    return _with_options(dataset, deterministic=True).prefetch(tf.data.AUTOTUNE)


def sample_images(
    source: Source,
    count: int,
    *,
    image_size: int | tuple[int, int],
    channels: int | None = None,
    crop: str = "resize",
    decode: Decode | None = None,
) -> dict[str, np.ndarray | list[str]]:
    """Returns `count` examples, spread evenly over the source, the same ones at every call.

    For picture sheets: {"image": uint8 [n, H, W, C] as `eval_pipeline` sees them before scaling,
    "label": [n] or [n, K], "id": n strings}. n is less than count if the source is small or some
    records cannot be read.
    """
    size = preprocess.height_width(image_size)
    channels = _channels(source, channels)
    count = min(count, source.num_examples)
    chosen = np.arange(count, dtype=np.int64) * source.num_examples // max(count, 1)
    read = records.make_reader(source, size, channels, decode or Decode(), crop)
    images, kept = [], []
    with tf.device("CPU:0"):
        for index in chosen:
            try:
                image = source.get(tf.constant(index, tf.int64))["image"]
                images.append(read(image, tf.constant(0, tf.uint64)).numpy())
                kept.append(int(index))
            except tf.errors.OpError:
                continue  # the pipelines report it
    return {
        "image": np.stack(images) if images else np.zeros((0, *size, channels), np.uint8),
        "label": source.labels[kept],
        "id": [source.name_of(index) for index in kept],
    }


def _is_short(source: Source, crop: str) -> bool:
    return crop == "resize" and not source.encoded


def _load(source, steps, positions, find, count, size, channels, decode, crop, area, flip, broken):
    """Picks the short or the long way; `steps(k)` gives step numbers, each divided in k parts."""
    _choose("crop", crop, ("resize", "inception", "central"))
    if _is_short(source, crop):
        return records.load_from_memory(source, steps(1), lambda step: find(positions(step)), size, channels)
    chunk = records.chunk_size(count)
    parts = count // chunk

    def find_chunk(number: tf.Tensor) -> records.Tensors:
        first = number % parts * chunk
        return find(positions(number // parts)[first : first + chunk])

    read = records.make_reader(source, size, channels, decode, crop, area, flip)
    return records.load_records(source, steps(parts), find_chunk, read, chunk, parts, broken, (*size, channels))


def _with_options(dataset: tf.data.Dataset, deterministic: bool) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = deterministic
    # Hosts are told apart by `host` here; TensorFlow must not divide the records once more.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _channels(source: Source, channels: int | None) -> int:
    if channels is None:
        return source.image_shape[2] if source.image_shape else 3
    if channels not in (1, 3):
        raise UserError(f"channels is {channels}: use 1 (grey) or 3 (colour)")
    return channels


def _row_width(source: Source, num_classes: int | None) -> int:
    if source.labels.ndim == 2:
        return int(source.labels.shape[1])
    return source.num_classes if num_classes is None else num_classes


def _choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f'{option} is "{value}": use {", ".join(allowed)}{nearest(value, allowed)}')
