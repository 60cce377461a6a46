"""How many files carry a camera's orientation: said once, because most models were trained without looking at it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from vit_tpu.data import formats
from vit_tpu.data.source import Source

_LOOK_AT = 1000


def count_turned(source: Source, limit: int = _LOOK_AT) -> tuple[int, int]:
    """Returns how many files have an EXIF orientation other than upright, and how many were looked at.

    Args:
      source: of encoded files; others have (0, 0).
      limit: the most files to look at; they are spread evenly over the source.
    """
    if not source.encoded:
        return 0, 0
    count = min(limit, source.num_examples)
    chosen = np.arange(count, dtype=np.int64) * source.num_examples // max(count, 1)

    def orientation(data: bytes) -> np.int32:
        return np.int32(formats.orientation(data))

    def look(index: tf.Tensor) -> tf.Tensor:
        data = source.get(index)["image"]
        # EXIF ("Exif" in JPEG, "eXIf" in PNG, "EXIF" in WebP) or XMP costs a look in Python only where it may be.
        marked = tf.strings.regex_full_match(data, r"\C*(?i:exif|tiff:orientation)\C*")  # \C is any byte
        turn = tf.cond(
            marked, lambda: tf.numpy_function(orientation, [data], tf.int32), lambda: tf.constant(1, tf.int32)
        )
        return tf.ensure_shape(turn, [])

    dataset = tf.data.Dataset.from_tensor_slices(chosen).map(look, num_parallel_calls=tf.data.AUTOTUNE)
    turns = list(dataset.ignore_errors().as_numpy_iterator())  # unreadable files are reported by the pipelines
    return sum(int(turn) != 1 for turn in turns), count


def sentence(source: Source, exif: str, limit: int = _LOOK_AT) -> str:
    """Returns what to tell the user about turned files, or an empty text if there are none."""
    turned, looked = count_turned(source, limit)
    if not turned:
        return ""
    of = f"{looked:,} files" if looked == source.num_examples else f"{looked:,} files looked at (evenly spread)"
    way = (
        "are turned upright (data.exif=apply)"
        if exif == "apply"
        else "are read as stored, as for ImageNet (data.exif=apply turns them upright)"
    )
    return f"{source.name}: {turned:,} of {of} carry an EXIF orientation and {way}"
