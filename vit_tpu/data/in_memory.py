"""Decode once: turns a source of small files into one whose pixels are in memory."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl import logging

from vit_tpu.data import preprocess, records
from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.decode import Decode
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError

_BLOCK = 64


def memory_bytes(source: Source, image_size: int | tuple[int, int], channels: int = 3) -> int:
    """Returns the bytes that `load_into_memory` would hold."""
    height, width = preprocess.height_width(image_size)
    return source.num_examples * height * width * channels


def load_into_memory(
    source: Source,
    image_size: int | tuple[int, int],
    *,
    channels: int = 3,
    crop: str = "resize",
    limit: int = 2**30,
    decode: Decode | None = None,
    broken: BrokenRecords | None = None,
) -> Source:
    """Returns `source` decoded and resized to `image_size`, uint8 in memory.

    For small images, where reading and decoding cost more than everything after. Unreadable
    records are left out. Random crops then choose from the finished image.

    Args:
      image_size: side or (H, W) in pixels.
      channels: 1 or 3.
      crop: "resize" or "central", see `pipeline.eval_pipeline`.
      limit: the most bytes to hold.
      decode, broken: as in `pipeline.eval_pipeline`.

    Raises:
      UserError: if the pixels exceed the limit, or too many records are unreadable.
    """
    if not source.encoded:
        return source
    needed = memory_bytes(source, image_size, channels)
    if needed > limit:
        raise UserError(
            f"{source.name}: {source.num_examples} images of {image_size} pixels take "
            f"{needed / 2**30:.1f} GiB in memory, more than {limit / 2**30:.1f}: "
            "read them from files, or raise the limit"
        )
    size = preprocess.height_width(image_size)
    broken = broken or BrokenRecords(0)
    count = source.num_examples
    blocks = -(-count // _BLOCK)
    read = records.make_reader(source, size, channels, decode or Decode(), crop)
    chunk = records.chunk_size(_BLOCK)

    def find(number: tf.Tensor) -> records.Tensors:
        index = tf.minimum(number * chunk + tf.range(chunk, dtype=tf.int64), count - 1)
        return {"index": index, "key": tf.cast(index, tf.uint64)}

    loaded = records.load_records(
        source, tf.data.Dataset.range(blocks * (_BLOCK // chunk)), find, read, chunk,
        _BLOCK // chunk, broken, (*size, channels),
    )  # fmt: skip
    images = np.empty((blocks * _BLOCK, *size, channels), np.uint8)
    ok = np.empty(blocks * _BLOCK, bool)
    try:
        for block, batch in enumerate(loaded.prefetch(2).as_numpy_iterator()):
            images[block * _BLOCK : (block + 1) * _BLOCK] = batch["image"]
            ok[block * _BLOCK : (block + 1) * _BLOCK] = batch["ok"]
    except tf.errors.OpError:
        broken.check()
        raise
    kept = np.flatnonzero(ok[:count])
    if not len(kept):
        raise UserError(f"{source.name}: none of the {count} images can be read: check the files")
    logging.info("%s: %.0f MiB of pixels in memory.", source.name, needed / 2**20)
    # All kept, the usual case, takes a view, not a second copy.
    pixels = images[:count] if len(kept) == count else images[kept]
    return from_arrays(
        pixels, source.labels[kept], name=source.name, num_classes=source.num_classes,
        class_names=source.class_names, ids=[source.name_of(int(i)) for i in kept],
    )  # fmt: skip
