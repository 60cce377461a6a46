"""Made-up images for benchmarks: nothing is read, every pixel is a function of the index."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from vit_tpu.data import keys
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError


def synthetic(
    num_examples: int = 1024,
    image_size: int | tuple[int, int] = 224,
    *,
    num_classes: int = 1000,
    channels: int = 3,
) -> Source:
    """Returns a source of uint8 images, each of one colour that depends on its index.

    Args:
      image_size: side or (H, W).
      num_classes: labels are index % num_classes.
      channels: 1 or 3.

    Raises:
      UserError: if there would be no example or no class.
    """
    if num_examples < 1 or num_classes < 1 or channels not in (1, 3):
        raise UserError(
            f"synthetic data of {num_examples} examples, {num_classes} classes and {channels} "
            "channels is not possible: use at least one example and class, and 1 or 3 channels"
        )
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        value = tf.cast(keys.integer(keys.make_key(0, index), 0, 256), tf.uint8)
        shape = tf.concat([tf.shape(index), [height, width, channels]], axis=0)
        image = tf.broadcast_to(value[..., None, None, None], shape)
        static = [*index.shape.as_list(), height, width, channels]
        return {
            "image": tf.ensure_shape(image, static),
            "label": tf.cast(index % num_classes, tf.int32),
            "id": tf.strings.join(["synthetic/", tf.strings.as_string(index)]),
        }

    return Source(
        name="synthetic",
        num_examples=num_examples,
        num_classes=num_classes,
        class_names=tuple(str(i) for i in range(num_classes)),
        labels=(np.arange(num_examples) % num_classes).astype(np.int32),
        get=get,
        image_shape=(height, width, channels),
        name_of=lambda i: f"synthetic/{i}",
    )
