"""What every source of images gives the pipelines: a count, names, and record i for any i."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Source:
    """Images that can be read in any order, because order and resume are functions of position.

    Attributes:
      name: short name for messages and reports, for example "digits/train".
      num_examples: how many records there are.
      num_classes: how many classes the labels speak of.
      class_names: one name for each class, in label order.
      labels: int32 [n] class indices, or float32 [n, num_classes] soft or multi-label rows.
      get: a function that works inside a TensorFlow graph. It takes an int64 index (a scalar, or a
        vector when `image_shape` is set) and returns {"image", "label", "id"}: image uint8
        [..., H, W, C], or the encoded file as a string; label as in `labels`; id a readable string.
      image_shape: (H, W, C) when all images are uint8 arrays of this shape in memory,
        None when `get` returns encoded files.
      name_of: the id of record i, without TensorFlow.
    """

    name: str
    num_examples: int
    num_classes: int
    class_names: tuple[str, ...]
    labels: np.ndarray
    get: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    image_shape: tuple[int, int, int] | None
    name_of: Callable[[int], str]

    @property
    def encoded(self) -> bool:
        """True when images are encoded files that the pipeline must decode."""
        return self.image_shape is None


def why(error: Exception) -> str:
    """Returns on one line what the operating system, TensorFlow or a library says went wrong."""
    text = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    text = re.sub(r"\{\{function_node .*?\}\}|\[Op:\w+\]( name:)?", "", str(text))  # TensorFlow's inner names
    return " ".join(str(text).split())[:300] or type(error).__name__


def files(source: Source) -> tf.data.Dataset:
    """Returns (encoded file, True) of every record, in order; ("", False) of those that cannot be read."""

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        one = tf.data.Dataset.from_tensors(index)
        found = one.map(lambda i: (source.get(i)["image"], True)).ignore_errors()
        return found.concatenate(one.map(lambda i: ("", False))).take(1).get_single_element()

    return tf.data.Dataset.range(source.num_examples).map(read, num_parallel_calls=tf.data.AUTOTUNE)
