"""A few examples of a source as the pipelines see them, for picture sheets."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from vit_tpu.data import preprocess, records
from vit_tpu.data.decode import Decode
from vit_tpu.data.source import Source


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
    channels = records.choose_channels(source, channels)
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
