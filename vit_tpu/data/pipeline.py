"""From a source to the batches that `model.fit` and `model.evaluate` read.

    step -> positions -> record indices -> images uint8 (decode, crop, resize, vary)
         -> batch -> float32 [-1, 1] -> mixup or CutMix -> (image, label[, weight])

A step's batch is a function of (seed, step) alone, so starting at step s costs nothing and gives
what an uninterrupted run would have read. Images in memory take a short way: one gather a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from vit_tpu.data import keys, mixing, order, preprocess, records, service, variation
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.decode import Decode
from vit_tpu.data.source import Source
from vit_tpu.data.variation import Variation
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
    policy: str = "none",
    policy_layers: int = 2,
    policy_magnitude: float = 10.0,
    jitter: float = 0.0,
    erasing: float = 0.0,
    erasing_count: int = 1,
    repeats: int = 1,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_format: str = "int",
    num_classes: int | None = None,
    num_hosts: int = 1,
    host: int = 0,
    deterministic: bool = True,
    decode: Decode | None = None,
    broken: BrokenRecords | None = None,
    services: Sequence[str] = (),
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
      flip, shift, policy, policy_layers, policy_magnitude, jitter, erasing, erasing_count: see
        `variation.Variation`.
      repeats: how often each example stands in its batch, differently varied; see `order.repeated`.
      mixup, cutmix: alphas of their beta distributions, 0 for none; see `mixing.mix`. They need
        label rows: label_format "onehot".
      label_format: "int" gives int32 [b]; "onehot" float32 [b, num_classes]. Sources with label
        rows always give their rows.
      num_classes: width of one-hot rows; default: the source's.
      num_hosts, host: which part of each global batch to read.
      deterministic: False lets batches that are ready early overtake others, for speed.
      decode: how files become pixels.
      broken: collects unreadable records; default: with a budget of a thousandth of the records.
        In an unreadable record's place stands the next readable one of its global batch.
      services: addresses of processes that read and decode in place of this one, see `service`.

    Returns:
      A dataset of image float32 [b, H, W, C] in [-1, 1], and label.

    Raises:
      UserError: for a batch that does not divide among the hosts or copies, or an unknown option.
    """
    size = preprocess.height_width(image_size)
    share = order.host_share(batch_size, num_hosts, host)
    channels = records.choose_channels(source, channels)
    _choose("label_format", label_format, ("int", "onehot"))
    plan = Variation(flip, shift, policy, policy_layers, policy_magnitude, jitter, erasing, erasing_count)
    has_rows = source.labels.ndim == 2
    rows = has_rows or label_format == "onehot"
    _check_mixing(mixup, cutmix, rows, batch_size)
    if repeats < 1 or batch_size % repeats:
        raise UserError(f"batch_size {batch_size} does not hold each example {repeats} times: use a multiple of it")
    width = _row_width(source, num_classes)
    if broken is None:
        broken = BrokenRecords(math.ceil(source.num_examples / 1000))
    short = _is_short(source, crop, plan)
    if services:
        service.check(source, services)

    def find(positions: tf.Tensor) -> records.Tensors:
        distinct, copy = order.repeated(positions, batch_size, repeats)
        epoch, index = order.locate(distinct, source.num_examples, seed, shuffle)
        return {"index": index, "key": keys.make_key(seed, epoch * repeats + copy, index)}

    def own_positions(step: tf.Tensor) -> tf.Tensor:
        return order.host_positions(step, batch_size, num_hosts, host)

    def position_before(step: tf.Tensor) -> tf.Tensor:
        previous = (host * share - 1) % batch_size
        return tf.reshape(tf.cast(step, tf.int64) * batch_size + previous, [1])

    vary = None if short else variation.of_one(plan, size)
    read = records.make_reader(source, size, channels, decode or Decode(), _checked_crop(crop), crop_area, vary)
    tries = None if short else records.attempts(source, read, (*size, channels))

    def load(first: int, stride: int) -> tf.data.Dataset:
        """(step, its records[, the record before them]) for the steps first, first + stride, ..."""

        def part(positions: Callable[[tf.Tensor], tf.Tensor], count: int) -> tf.data.Dataset:
            return _load(source, lambda parts: tf.data.Dataset.counter(),
                         lambda number: find(positions(first + number * stride)), count, tries,
                         (*size, channels))  # fmt: skip

        parts = [tf.data.Dataset.counter(first, stride), part(own_positions, share)]
        if (mixup or cutmix) and num_hosts > 1:
            # The first example's partner is the last one of the host before: read it here too, so
            # that the number of hosts does not change the batch.
            parts.append(part(position_before, 1))
        return tf.data.Dataset.zip(tuple(parts))

    def others(position: tf.Tensor) -> records.Tensors:
        first = position // batch_size * batch_size
        return find(first + (position - first + tf.range(1, batch_size, dtype=tf.int64)) % batch_size)

    def mended(batch: records.Tensors, positions: tf.Tensor) -> records.Tensors:
        if not source.encoded or tries is None:
            return batch
        if services:  # what TensorFlow alone could not decode there is tried here
            batch = records.read_again(batch, tries)
        batch = records.report_broken(batch, source, broken)
        return records.replace_broken(batch, positions, others, tries, broken)

    def finished(batch: records.Tensors) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels = batch["image"], batch["label"]
        if short:
            images = variation.of_batch(plan, images, batch["key"])
        if rows and not has_rows:
            labels = tf.one_hot(labels, width)
        return preprocess.to_float(images), labels

    def finish(
        step: tf.Tensor, batch: records.Tensors, before: records.Tensors | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels = finished(mended(batch, own_positions(step)))
        if mixup or cutmix:
            pair = None
            if before is not None:
                image, label = finished(mended(before, position_before(step)))
                pair = image[0], label[0]
            images, labels = mixing.mix(images, labels, keys.make_key(seed, _MIXUP, step), mixup, cutmix, pair)
        images = tf.ensure_shape(images, [share, *size, channels])
        return images, tf.ensure_shape(labels, [share, width] if rows else [share])

    loaded = service.load(load, services, start_step) if services else load(start_step, 1)
    dataset = loaded.map(finish, num_parallel_calls=tf.data.AUTOTUNE)
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
    channels = records.choose_channels(source, channels)
    _choose("label_format", label_format, ("int", "onehot"))
    has_rows = source.labels.ndim == 2
    rows = has_rows or label_format == "onehot"
    width = _row_width(source, num_classes)
    num_steps = math.ceil(source.num_examples / batch_size)
    last = source.num_examples - 1
    budget = broken or BrokenRecords(0)
    short = _is_short(source, crop, Variation())

    def find(step: tf.Tensor) -> records.Tensors:
        positions = order.host_positions(step, batch_size, num_hosts, host)
        index = tf.minimum(positions, last)
        weight = tf.cast(positions <= last, tf.float32)
        return {"index": index, "weight": weight, "key": tf.cast(index, tf.uint64)}

    def finish(batch: records.Tensors) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if source.encoded:
            batch = records.report_broken(batch, source, budget)
        images, labels = preprocess.to_float(batch["image"]), batch["label"]
        if rows and not has_rows:
            labels = tf.one_hot(labels, width)
        weight = batch["weight"] * tf.cast(batch["ok"], tf.float32)
        images = tf.ensure_shape(images, [share, *size, channels])
        labels = tf.ensure_shape(labels, [share, width] if rows else [share])
        return images, labels, tf.ensure_shape(weight, [share])

    read = records.make_reader(source, size, channels, decode or Decode(), _checked_crop(crop))
    tries = None if short else records.attempts(source, read, (*size, channels))
    dataset = _load(source, lambda parts: tf.data.Dataset.range(num_steps * parts), find, share, tries,
                    (*size, channels))  # fmt: skip
    dataset = dataset.map(finish, num_parallel_calls=tf.data.AUTOTUNE)
    return _with_options(dataset, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _load(
    source: Source,
    steps: Callable[[int], tf.data.Dataset],
    find: Callable[[tf.Tensor], records.Tensors],
    count: int,
    tries: records.Attempts | None,
    shape: tuple[int, int, int],
) -> tf.data.Dataset:
    """Takes the long way by `tries`, or the short one.

    steps(k) gives the numbers of steps from 0 when each is read in k parts; find(number of the
    step) its `count` records.
    """
    if tries is None:
        return records.load_from_memory(source, steps(1), find, shape[:2], shape[2])
    chunk = records.chunk_size(count)
    parts = count // chunk

    def find_chunk(number: tf.Tensor) -> records.Tensors:
        first = number % parts * chunk
        return {name: value[first : first + chunk] for name, value in find(number // parts).items()}

    return records.try_records(steps(parts), find_chunk, tries, chunk, parts)


def _is_short(source: Source, crop: str, plan: Variation) -> bool:
    return crop == "resize" and not source.encoded and not plan.needs_records


def _with_options(dataset: tf.data.Dataset, deterministic: bool) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = deterministic
    # Hosts are told apart by `host` here; TensorFlow must not divide the records once more.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _check_mixing(mixup: float, cutmix: float, rows: bool, batch_size: int) -> None:
    for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
        if not alpha:
            continue
        if not (math.isfinite(alpha) and alpha > 0):
            raise UserError(f"{name} is {alpha}: it is the alpha of a beta distribution, use 0 for none or more")
        if not rows:
            raise UserError(f'{name} mixes label rows: set label_format="onehot"')
        if batch_size < 2:
            raise UserError(f"{name} mixes the examples of a batch with each other: use a batch_size of 2 or more")


def _row_width(source: Source, num_classes: int | None) -> int:
    if source.labels.ndim == 2:
        return int(source.labels.shape[1])
    return source.num_classes if num_classes is None else num_classes


def _checked_crop(crop: str) -> str:
    _choose("crop", crop, ("resize", "inception", "central"))
    return crop


def _choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f'{option} is "{value}": use {", ".join(allowed)}{nearest(value, allowed)}')
