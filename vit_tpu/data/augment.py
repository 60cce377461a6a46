"""Flip, shift, colour jitter and random erasing, every choice a function of the examples' keys.

Images are uint8 throughout, nothing reads the global dtype policy, and nothing keeps state.
"""

from __future__ import annotations

import math

import tensorflow as tf

from vit_tpu.data import keys

# Each random choice has a stream number of its own, see keys.uniform; `policies` starts at 1000.
FLIP, SHIFT_ROWS, SHIFT_COLUMNS, CROP = range(4)
_JITTER, _ERASE = 100, 200
_ERASE_TRIALS = 10
ERASE_AREA, ERASE_ASPECT = (0.02, 1 / 3), (0.3, 3.3)
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


def random_flip(images: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Mirrors each of [B, H, W, C] left to right with probability one half; key uint64 [B]."""
    count = tf.shape(images)[0]
    both = tf.concat([images, tf.reverse(images, [2])], axis=0)
    # Whole images are copied: far faster than tf.where with a broadcast condition.
    return tf.gather(both, tf.range(count) + tf.where(is_mirrored(key), count, 0))


def flip_one(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Does to one [H, W, C] what `random_flip` does to it in a batch; key uint64 scalar."""
    # Not image[:, ::-1], which takes 50 times as long.
    return tf.cond(is_mirrored(key), lambda: tf.reverse(image, [1]), lambda: image)


def is_mirrored(key: tf.Tensor) -> tf.Tensor:
    """Returns bool, one for each key: whether its example is mirrored."""
    return keys.uniform(key, FLIP) < 0.5


def random_shift(images: tf.Tensor, key: tf.Tensor, padding: int) -> tf.Tensor:
    """Pads [B, H, W, C] with `padding` black pixels all round and cuts H x W anywhere.

    The usual augmentation of small images (He et al., "Deep residual learning", 2015, section
    4.2: 4 pixels for CIFAR-10). key: uint64 [B].
    """
    if not padding:
        return images
    height, width = images.shape[1], images.shape[2]
    p = padding
    padded = tf.pad(images, [[0, 0], [p, p], [p, p], [0, 0]])
    top = keys.integer(key, SHIFT_ROWS, 2 * p + 1)
    left = keys.integer(key, SHIFT_COLUMNS, 2 * p + 1)
    return _pick(padded, top[:, None] + tf.range(height), left[:, None] + tf.range(width))


def shift_one(image: tf.Tensor, key: tf.Tensor, padding: int) -> tf.Tensor:
    """Does to one [H, W, C] what `random_shift` does to it in a batch; key uint64 scalar."""
    if not padding:
        return image
    p = padding
    padded = tf.pad(image, [[p, p], [p, p], [0, 0]])
    top = keys.integer(key, SHIFT_ROWS, 2 * p + 1)
    left = keys.integer(key, SHIFT_COLUMNS, 2 * p + 1)
    return tf.ensure_shape(tf.slice(padded, [top, left, 0], image.shape), image.shape)


def jitter(image: tf.Tensor, key: tf.Tensor, strength: float) -> tf.Tensor:
    """Changes brightness, contrast and saturation of one uint8 [H, W, 1 or 3], in a random order.

    Each by a factor uniform in [1 - strength, 1 + strength] (from 0 at least), with the meaning of
    Pillow's ImageEnhance and torchvision's ColorJitter. key: uint64 scalar.
    """
    low, high = max(0.0, 1.0 - strength), 1.0 + strength
    factors = [low + (high - low) * keys.uniform(key, _JITTER + i) for i in range(3)]

    def grey(x: tf.Tensor) -> tf.Tensor:
        return x if x.shape[-1] == 1 else tf.tensordot(x, [[weight] for weight in _LUMA], axes=1)

    def mixed(x: tf.Tensor, under: tf.Tensor | float, factor: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(factor * x + (1.0 - factor) * under, 0.0, 255.0)

    changes = [
        lambda x: mixed(x, 0.0, factors[0]),
        lambda x: mixed(x, tf.reduce_mean(grey(x)), factors[1]),
        lambda x: mixed(x, grey(x), factors[2]),
    ]
    first = keys.integer(key, _JITTER + 3, 3)
    turn = 1 + keys.integer(key, _JITTER + 4, 2)  # forwards or backwards round the circle: all six orders
    x = tf.cast(image, tf.float32)
    for place in range(3):
        # x is bound now: a lambda called later would see the last one
        calls = [lambda change=change, x=x: tf.ensure_shape(change(x), image.shape) for change in changes]
        x = tf.switch_case((first + place * turn) % 3, calls)
    return tf.cast(tf.round(x), tf.uint8)


def erase(image: tf.Tensor, key: tf.Tensor, probability: float, count: int = 1) -> tf.Tensor:
    """Fills `count` random boxes of one uint8 [H, W, C] with noise, with `probability`.

    Random erasing (Zhong et al., arXiv:1708.04896, RE-R): a box takes 2 to 33 % of the image
    (divided by `count`) at an aspect, height to width, of 0.3 to 3.3, even in its logarithm as in
    timm; sizes are drawn up to ten times until one fits. key: uint64 scalar.
    """
    height, width, channels = image.shape

    def filled() -> tf.Tensor:
        result = image
        for number in range(count):
            stream = _ERASE + 10 + 50 * number
            top, left, rows, columns = tf.unstack(erase_box(key, stream, (height, width), count))
            noise = tf.random.stateless_uniform(
                [rows, columns, channels], keys.op_seed(key, stream + 40), 0, 256, tf.int32
            )
            middle = tf.concat(
                [result[top : top + rows, :left], tf.cast(noise, tf.uint8), result[top : top + rows, left + columns :]],
                axis=1,
            )
            result = tf.concat([result[:top], middle, result[top + rows :]], axis=0)
        return tf.ensure_shape(result, image.shape)

    return tf.cond(keys.uniform(key, _ERASE) < probability, filled, lambda: image)


def erase_box(key: tf.Tensor, stream: int, size: tuple[int, int], count: int = 1) -> tf.Tensor:
    """Returns int32 (top, left, height, width) of a box that fits into `size`; of no area if none of ten did."""
    height, width = size
    draws = keys.uniform(key[None], stream + tf.range(2 * _ERASE_TRIALS))
    area = (ERASE_AREA[0] + draws[:_ERASE_TRIALS] * (ERASE_AREA[1] - ERASE_AREA[0])) * float(height * width) / count
    low, high = math.log(ERASE_ASPECT[0]), math.log(ERASE_ASPECT[1])
    aspect = tf.exp(low + draws[_ERASE_TRIALS:] * (high - low))
    rows = tf.cast(tf.round(tf.sqrt(area * aspect)), tf.int32)
    columns = tf.cast(tf.round(tf.sqrt(area / aspect)), tf.int32)
    fits = (rows <= height) & (columns <= width)
    chosen = tf.argmax(tf.cast(fits, tf.int32))
    some = tf.cast(tf.reduce_any(fits), tf.int32)
    rows, columns = tf.gather(rows, chosen) * some, tf.gather(columns, chosen) * some
    places = keys.uniform(key[None], stream + 2 * _ERASE_TRIALS + tf.range(2))
    top, left = (
        tf.minimum(tf.cast(place * tf.cast(room + 1, tf.float32), tf.int32), room)
        for place, room in zip(tf.unstack(places), (height - rows, width - columns))
    )
    return tf.stack([top, left, rows, columns])


def _pick(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Returns images[b, rows[b, i], columns[b, j]] as [B, I, J, C].

    One gather of pixels: faster on a CPU than a gather of rows and one of columns.
    """
    _, height, width, channels = images.shape
    batch = tf.range(tf.shape(images)[0])[:, None, None]
    flat = (batch * height + rows[:, :, None]) * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), flat)
