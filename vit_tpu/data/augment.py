"""Augmentation of whole batches, every choice a function of the examples' keys.

Images stay uint8 until `mixup`, nothing reads the global dtype policy, and nothing keeps state.
"""

from __future__ import annotations

import tensorflow as tf

from vit_tpu.data import keys

# Each random choice has a stream number of its own; see keys.uniform.
FLIP, SHIFT_ROWS, SHIFT_COLUMNS, CROP, BETA_A, BETA_B = range(6)


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


def mixup(
    images: tf.Tensor,
    labels: tf.Tensor,
    key: tf.Tensor,
    alpha: float,
    before: tuple[tf.Tensor, tf.Tensor] | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each example with the one before it, by one share for the whole batch.

    The rule of big_vision (and of the papers trained with it): share = max(b, 1 - b) with
    b ~ Beta(alpha, alpha), mixed = share * x + (1 - share) * roll(x, 1).

    Args:
      images: float32 [B, H, W, C].
      labels: float32 [B, K].
      key: uint64 scalar, one for the step.
      alpha: the Beta distribution's parameter, > 0.
      before: (image [H, W, C], label [K]) that precede the first example: the last of the batch
        when None, the last of the preceding host's share when the batch is spread over hosts.
    """
    share = mixup_share(key, alpha)
    if before is None:
        image_partner, label_partner = tf.roll(images, 1, axis=0), tf.roll(labels, 1, axis=0)
    else:
        image_partner = tf.concat([before[0][None], images[:-1]], axis=0)
        label_partner = tf.concat([before[1][None], labels[:-1]], axis=0)
    return (
        share * images + (1 - share) * image_partner,
        share * labels + (1 - share) * label_partner,
    )


def mixup_share(key: tf.Tensor, alpha: float) -> tf.Tensor:
    """Returns the float32 scalar max(b, 1 - b), b ~ Beta(alpha, alpha), for a uint64 key."""
    # Beta as a ratio of two gammas, in float64: with a small alpha both underflow float32.
    a, b = (
        tf.random.stateless_gamma([], keys.op_seed(key, stream), alpha=alpha, dtype=tf.float64)
        for stream in (BETA_A, BETA_B)
    )
    share = a / (a + b)
    return tf.cast(tf.maximum(share, 1 - share), tf.float32)


def _pick(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Returns images[b, rows[b, i], columns[b, j]] as [B, I, J, C].

    One gather of pixels: faster on a CPU than a gather of rows and one of columns.
    """
    _, height, width, channels = images.shape
    batch = tf.range(tf.shape(images)[0])[:, None, None]
    flat = (batch * height + rows[:, :, None]) * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), flat)
