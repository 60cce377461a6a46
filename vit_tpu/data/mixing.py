"""Mixup and CutMix: each example of a batch is mixed with the one before it, images and label rows alike.

One draw holds for the whole batch, a function of (seed, step); with several hosts the first
example's partner is the last one of the host before, so the number of hosts changes no batch.
"""

from __future__ import annotations

import tensorflow as tf

from vit_tpu.data import keys

# Stream numbers of the step's key; 4 and 5 are the beta's, see `beta`.
BETA_A, BETA_B, ROW, COLUMN, WHICH = range(4, 9)

Pair = tuple[tf.Tensor, tf.Tensor]


def mix(images: tf.Tensor, labels: tf.Tensor, key: tf.Tensor, mixup_alpha: float, cutmix_alpha: float,
        before: Pair | None = None) -> Pair:  # fmt: skip
    """Applies mixup or CutMix; where both alphas are above 0, one of them by a fair coin, as DeiT does.

    Args:
      images: float32 [B, H, W, C].
      labels: float32 [B, K].
      key: uint64 scalar, one for the step.
      mixup_alpha, cutmix_alpha: parameters of the beta distributions, 0 for never.
      before: (image [H, W, C], label [K]) that precede the first example: the last of the batch
        when None, the last of the preceding host's share when the batch is spread over hosts.

    Returns:
      Images and labels as they came in, mixed.
    """
    if not (mixup_alpha and cutmix_alpha):
        one, alpha = (mixup, mixup_alpha) if mixup_alpha else (cutmix, cutmix_alpha)
        return one(images, labels, key, alpha, before)
    return tf.cond(
        keys.uniform(key, WHICH) < 0.5,
        lambda: mixup(images, labels, key, mixup_alpha, before),
        lambda: cutmix(images, labels, key, cutmix_alpha, before),
    )


def mixup(images: tf.Tensor, labels: tf.Tensor, key: tf.Tensor, alpha: float, before: Pair | None = None) -> Pair:
    """Mixes each example with the one before it, by one share for the whole batch.

    The rule of big_vision (and of the papers trained with it): share = max(b, 1 - b) with
    b ~ Beta(alpha, alpha), mixed = share * x + (1 - share) * roll(x, 1). Arguments as for `mix`.
    """
    share = mixup_share(key, alpha)
    image_partner, label_partner = _partners(images, labels, before)
    return (
        share * images + (1 - share) * image_partner,
        share * labels + (1 - share) * label_partner,
    )


def cutmix(images: tf.Tensor, labels: tf.Tensor, key: tf.Tensor, alpha: float, before: Pair | None = None) -> Pair:
    """Pastes one box of each example's predecessor over it; the label's share is that of the pixels pasted.

    Yun et al., "CutMix", 2019 (arXiv:1905.04899): the box has the image's aspect, 1 - b of its
    area with b ~ Beta(alpha, alpha), and a uniform centre; what reaches over the border is cut off,
    and the label follows what is left. Arguments as for `mix`.
    """
    height, width = images.shape[1], images.shape[2]
    top, left, bottom, right = tf.unstack(cutmix_box(key, alpha, height, width))
    image_partner, label_partner = _partners(images, labels, before)
    middle = tf.concat(
        [images[:, top:bottom, :left], image_partner[:, top:bottom, left:right], images[:, top:bottom, right:]], axis=2
    )
    # Strips are copied whole: less than half the time of tf.where with a mask.
    mixed = tf.concat([images[:, :top], middle, images[:, bottom:]], axis=1)
    pasted = tf.cast((bottom - top) * (right - left), tf.float32) / float(height * width)
    return tf.ensure_shape(mixed, images.shape), (1 - pasted) * labels + pasted * label_partner


def cutmix_box(key: tf.Tensor, alpha: float, height: int, width: int) -> tf.Tensor:
    """Returns int32 (top, left, bottom, right) of the box inside an image of height x width pixels."""
    side = tf.sqrt(1.0 - beta(key, alpha))
    edges = []
    for stream, length in ((ROW, height), (COLUMN, width)):
        extent = tf.cast(tf.round(side * float(length)), tf.int32)
        start = keys.integer(key, stream, length) - extent // 2
        edges.append((tf.maximum(start, 0), tf.minimum(start + extent, length)))
    return tf.stack([edges[0][0], edges[1][0], edges[0][1], edges[1][1]])


def mixup_share(key: tf.Tensor, alpha: float) -> tf.Tensor:
    """Returns the float32 scalar max(b, 1 - b), b ~ Beta(alpha, alpha), for a uint64 key."""
    share = beta(key, alpha)
    return tf.maximum(share, 1 - share)


def beta(key: tf.Tensor, alpha: float) -> tf.Tensor:
    """Returns a float32 scalar b ~ Beta(alpha, alpha) for a uint64 key."""
    # As a ratio of two gammas, in float64: with a small alpha both underflow float32.
    a, b = (
        tf.random.stateless_gamma([], keys.op_seed(key, stream), alpha=alpha, dtype=tf.float64)
        for stream in (BETA_A, BETA_B)
    )
    # With alpha near 0 both may be 0 even there: nothing is mixed then.
    return tf.cast(tf.where(a + b > 0, a / tf.maximum(a + b, 1e-300), 1.0), tf.float32)


def _partners(images: tf.Tensor, labels: tf.Tensor, before: Pair | None) -> Pair:
    if before is None:
        return tf.roll(images, 1, axis=0), tf.roll(labels, 1, axis=0)
    return (
        tf.concat([before[0][None], images[:-1]], axis=0),
        tf.concat([before[1][None], labels[:-1]], axis=0),
    )
