"""Loading: from positions to a step's images, uint8 and all of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_tpu.data import augment, formats, keys, preprocess
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.decode import Decode, decode_image, decode_window
from vit_tpu.data.source import Source, why
from vit_tpu.errors import UserError

Tensors = dict[str, tf.Tensor]
# (encoded file or uint8 image, uint64 key) -> uint8 [H, W, C]
Reader = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_LONGEST_CHUNK = 32  # measured: trying a chunk costs 0.15 ms an image with 8 records, 0.05 ms with 32
_RECORD = ("image", "label", "ok")


class Attempts(NamedTuple):
    """Two functions (index int64, key uint64) -> {"image", "label", "ok"}, for use inside a dataset.

    Attributes:
      plainly: fails where the record cannot be read.
      safely: gives black and "ok" False instead.
    """

    plainly: Callable[[tf.Tensor, tf.Tensor], Tensors]
    safely: Callable[[tf.Tensor, tf.Tensor], Tensors]


def make_reader(
    source: Source,
    size: tuple[int, int],
    channels: int,
    decode: Decode,
    crop: str,
    crop_area: tuple[float, float] = (1.0, 1.0),
    vary: Reader | None = None,
) -> Reader:
    """Returns the function (image of the source, key) -> uint8 [H, W, channels] of `size`.

    crop: "resize" the whole image; "inception": a random window of a share `crop_area`;
    "central": the smaller side to 8/7 of `size`, then the middle (256 and 224 in big_vision).
    vary: what to do with the finished image, see `variation.of_one`.
    """

    def decoded(image: tf.Tensor) -> tf.Tensor:
        if source.encoded:
            return decode_image(image, channels, decode)
        return preprocess.to_channels(image, channels)

    def inception(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        seed = keys.op_seed(key, augment.CROP)
        if source.encoded:
            return preprocess.resize(decode_window(image, seed, crop_area, channels, decode), size)
        image = decoded(image)
        top, left, height, width = tf.unstack(preprocess.crop_window(tf.shape(image), seed, crop_area))
        return preprocess.resize(image[top : top + height, left : left + width], size)

    def central(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        smaller = preprocess.resize_small(decoded(image), round(max(size) * 8 / 7))
        return preprocess.central_crop(smaller, size)

    def whole(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        return preprocess.resize(decoded(image), size)

    chosen = {"inception": inception, "central": central, "resize": whole}[crop]

    def read(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        image = tf.ensure_shape(chosen(image, key), [*size, channels])
        return image if vary is None else tf.ensure_shape(vary(image, key), [*size, channels])

    return read


def load_from_memory(
    source: Source,
    steps: tf.data.Dataset,
    find: Callable[[tf.Tensor], Tensors],
    size: tuple[int, int],
    channels: int,
) -> tf.data.Dataset:
    """Returns a dataset of batches, one for each of `steps`, each gathered and resized at once.

    Only for sources with `image_shape`. `find(step)` gives {"index" int64 [b], ...}; what it gives
    is passed on, with "image" uint8 [b, *size, channels], "label" and "ok" (all True).
    """

    def load(step: tf.Tensor) -> Tensors:
        found = find(step)
        record = source.get(found["index"])
        image = preprocess.to_channels(preprocess.resize(record["image"], size), channels)
        return found | {
            "image": image,
            "label": record["label"],
            "ok": tf.ones_like(found["index"], tf.bool),
        }

    return steps.map(load, num_parallel_calls=tf.data.AUTOTUNE)


def load_records(
    source: Source,
    chunks: tf.data.Dataset,
    find: Callable[[tf.Tensor], Tensors],
    read: Reader,
    chunk: int,
    chunks_per_step: int,
    broken: BrokenRecords,
    shape: tuple[int, int, int],
) -> tf.data.Dataset:
    """As `load_from_memory`, reading one record after the other, several chunks at a time.

    Args:
      chunks: numbers c; chunk c % chunks_per_step of step c // chunks_per_step.
      find: c -> {"index" int64 [chunk], "key" uint64 [chunk], ...}.
      broken: gets the records that cannot be read; they come out black with "ok" False.
      shape: (H, W, C) that `read` gives.
    """
    loaded = try_records(chunks, find, attempts(source, read, shape), chunk, chunks_per_step)
    return loaded.map(lambda batch: report_broken(batch, source, broken), num_parallel_calls=tf.data.AUTOTUNE)


def try_records(
    chunks: tf.data.Dataset,
    find: Callable[[tf.Tensor], Tensors],
    tries: Attempts,
    chunk: int,
    chunks_per_step: int,
) -> tf.data.Dataset:
    """Does what `load_records` does but for the report, in TensorFlow's operations alone.

    TensorFlow has no try: a failed read ends the whole map. A dataset of one element that ignores
    errors, followed by a substitute, is one, but costs as much as decoding a small image. So a
    whole chunk is tried first; only when that fails is each of its records tried alone, and the
    ones that fail come out black with "ok" False.
    """

    def read_chunk(index: tf.Tensor, key: tf.Tensor) -> Tensors:
        records = tf.data.Dataset.from_tensor_slices((index, key))
        return records.map(tries.plainly).batch(chunk, drop_remainder=True).get_single_element()

    def load(number: tf.Tensor) -> Tensors:
        found = find(number)
        one = tf.data.Dataset.from_tensors((found["index"], found["key"]))
        tried = one.map(read_chunk).ignore_errors()
        each = one.unbatch().map(tries.safely).batch(chunk, drop_remainder=True)
        return found | tried.concatenate(each).take(1).get_single_element()

    def join(parts: Tensors) -> Tensors:
        return {name: tf.reshape(part, [chunks_per_step * chunk, *part.shape[2:]]) for name, part in parts.items()}

    loaded = chunks.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    if chunks_per_step == 1:
        return loaded
    return loaded.batch(chunks_per_step, drop_remainder=True).map(join)


def attempts(source: Source, read: Reader, shape: tuple[int, int, int]) -> Attempts:
    """Returns the ways to read a record of `source`; shape (H, W, C) is what `read` gives."""
    scalar = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.uint64)

    @tf.function(input_signature=scalar, autograph=False)  # traced once for all its uses
    def read_one(index: tf.Tensor, key: tf.Tensor) -> Tensors:
        record = source.get(index)
        image = read(record["image"], key)
        return {"image": image, "label": record["label"], "ok": tf.constant(True)}

    with tf.device("CPU:0"):
        labels = tf.constant(source.labels)

    def black(index: tf.Tensor, key: tf.Tensor) -> Tensors:
        return {"image": tf.zeros(shape, tf.uint8), "label": tf.gather(labels, index), "ok": tf.constant(False)}

    def read_safely(index: tf.Tensor, key: tf.Tensor) -> Tensors:
        one = tf.data.Dataset.from_tensors((index, key))
        return one.map(read_one).ignore_errors().concatenate(one.map(black)).take(1).get_single_element()

    return Attempts(read_one, read_safely)


def read_again(batch: Tensors, tries: Attempts) -> Tensors:
    """Reads the records of a batch that are not "ok" once more, here: what another process could not read."""

    def again(bad: tf.Tensor) -> tf.data.Dataset:
        found = tuple(tf.gather(batch[name], bad) for name in ("index", "key"))
        return tf.data.Dataset.from_tensor_slices(found).map(tries.safely)

    return _where_not_ok(batch, again)


def _where_not_ok(batch: Tensors, make: Callable[[tf.Tensor], tf.data.Dataset]) -> Tensors:
    """Returns the batch with what `make` (places int64 [k] -> k records) gives in place of those not "ok"."""

    def made() -> Tensors:
        bad = tf.where(~batch["ok"])
        found = make(bad[:, 0]).batch(batch["ok"].shape[0]).get_single_element()
        return {name: tf.tensor_scatter_nd_update(batch[name], bad, value) for name, value in found.items()}

    kept = {name: batch[name] for name in _RECORD}
    new = tf.cond(tf.reduce_all(batch["ok"]), lambda: kept, made)
    return batch | {name: tf.ensure_shape(value, batch[name].shape) for name, value in new.items()}


def choose_channels(source: Source, channels: int | None) -> int:
    """Returns 1 or 3: `channels`, or the source's own when None (3 for encoded files)."""
    if channels is None:
        return source.image_shape[2] if source.image_shape else 3
    if channels not in (1, 3):
        raise UserError(f"channels is {channels}: use 1 (grey) or 3 (colour)")
    return channels


def chunk_size(count: int) -> int:
    """Returns the largest divisor of `count` up to 32: how many records are tried together."""
    return max(size for size in range(1, _LONGEST_CHUNK + 1) if count % size == 0)


def report_broken(batch: Tensors, source: Source, broken: BrokenRecords) -> Tensors:
    """Notes the records of a batch that are not "ok" in `broken`, with the reason; returns the batch."""

    def report() -> tf.Tensor:
        bad = tf.boolean_mask(batch["index"], ~batch["ok"])
        done = tf.numpy_function(lambda indices: _report(source, indices, broken), [bad], tf.bool)
        with tf.control_dependencies([done]):
            return tf.identity(batch["ok"])

    ok = tf.cond(tf.reduce_all(batch["ok"]), lambda: batch["ok"], report)
    return batch | {"ok": tf.ensure_shape(ok, batch["ok"].shape)}


def replace_broken(
    batch: Tensors,
    positions: tf.Tensor,
    others: Callable[[tf.Tensor], Tensors],
    tries: Attempts,
    broken: BrokenRecords,
) -> Tensors:
    """Gives the place of each record that is not "ok" to the next readable one of the global batch.

    That one may belong to another host: it is read here once more, so the batches are the same for every number of
    hosts. Broken records are few.

    Args:
      batch: this host's part, from `try_records`.
      positions: int64 [b], where its records stand in the stream.
      others: position -> {"index", "key"} of the other records of its global batch, the next one first, round in a
        circle.
      broken: stops with a readable message where no record of the global batch can be read.
    """

    def stand_in(position: tf.Tensor) -> tf.data.Dataset:
        found = others(position)
        readable = tf.data.Dataset.from_tensor_slices((found["index"], found["key"])).map(tries.plainly).ignore_errors()
        none = {name: tf.zeros(value.shape[1:], value.dtype) for name, value in batch.items() if name in _RECORD}
        return readable.concatenate(tf.data.Dataset.from_tensors(none)).take(1)

    def replaced(bad: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(tf.gather(positions, bad)).flat_map(stand_in)

    batch = _where_not_ok(batch, replaced)

    def stop() -> tf.Tensor:
        done = tf.numpy_function(broken.stop, [], tf.bool)
        with tf.control_dependencies([done]):
            return tf.identity(batch["image"])

    image = tf.cond(tf.reduce_all(batch["ok"]), lambda: batch["image"], stop)
    return batch | {"image": tf.ensure_shape(image, batch["image"].shape)}


def _report(source: Source, indices: np.ndarray, broken: BrokenRecords) -> np.bool_:
    for index in np.atleast_1d(indices):
        try:
            image = source.get(tf.constant(index, tf.int64))["image"].numpy()
            reason = formats.explain(image, Decode().max_pixels)
        except (tf.errors.OpError, AttributeError) as error:
            reason = f"it cannot be read ({why(error)})"
        broken.add(source.name_of(int(index)), reason)
    return np.bool_(True)
