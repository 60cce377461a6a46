"""Image operations with the results of big_vision's, for images of any size.

They take uint8 [H, W, C] (the resizes also [B, H, W, C]) and give uint8, so that a chain of them
behaves alike wherever it is cut; `to_float` ends it. Resizes cut the fraction off instead of
rounding, as big_vision does, so that published weights see the pixels they were trained on.
"""

from __future__ import annotations

import tensorflow as tf

from vit_tpu.errors import UserError


def resize(image: tf.Tensor, size: tuple[int, int], antialias: bool = False) -> tf.Tensor:
    """Resizes uint8 [..., H, W, C] to `size` (H, W), bilinear with half-pixel centres."""
    if tuple(image.shape[-3:-1]) == tuple(size):
        return image
    return _to_uint8(tf.image.resize(image, size, method="bilinear", antialias=antialias))


def resize_small(image: tf.Tensor, smaller: int) -> tf.Tensor:
    """Resizes uint8 [H, W, C] by area so that its smaller side is `smaller`; keeps the aspect."""
    height, width = _size(image)
    ratio = tf.cast(smaller, tf.float32) / tf.cast(tf.minimum(height, width), tf.float32)
    sides = [tf.round(tf.cast(side, tf.float32) * ratio) for side in (height, width)]
    size = tf.cast(tf.stack(sides), tf.int32)
    return _to_uint8(tf.image.resize(image, size, method="area"))


def central_crop(image: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Cuts the central `size` (H, W) out of uint8 [H, W, C], which must be at least as large."""
    height, width = _size(image)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    cut = tf.image.crop_to_bounding_box(image, top, left, size[0], size[1])
    return tf.ensure_shape(cut, [size[0], size[1], image.shape[-1]])


def crop_window(shape: tf.Tensor, seed: tf.Tensor, area: tuple[float, float] = (0.05, 1.0)) -> tf.Tensor:
    """Returns int32 (top, left, height, width) of a random crop, as in Inception's training.

    Args:
      shape: int32 [3], the image's H, W, C.
      seed: int32 [2].
      area: smallest and largest share of the image; the aspect ratio is 3/4 to 4/3.
    """
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros([1, 0, 4], tf.float32),
        seed=seed,
        area_range=area,
        aspect_ratio_range=(3 / 4, 4 / 3),
        min_object_covered=0.0,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)


def to_float(images: tf.Tensor) -> tf.Tensor:
    """Maps uint8 0..255 to float32 [-1, 1], the range all of this package's models expect."""
    # images * (2 / 255) - 1, bit for bit, in one pass over memory instead of three.
    codes = tf.bitcast(images, tf.quint8)
    return tf.quantization.dequantize(codes, -1.0, 1.0, mode="MIN_COMBINED")


def to_channels(images: tf.Tensor, channels: int) -> tf.Tensor:
    """Makes uint8 [..., 1 or 3] have `channels`: grey is repeated, colour becomes luminance."""
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return tf.repeat(images, 3, axis=-1)
    # ITU-R 601 luma, as JPEG and Pillow use it.
    grey = tf.tensordot(tf.cast(images, tf.float32), [[0.299], [0.587], [0.114]], axes=1)
    return tf.cast(tf.round(grey), tf.uint8)


def height_width(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (H, W) for a side or a pair.

    Raises:
      UserError: for anything else, or sides below 1.
    """
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UserError(f"image_size {image_size!r} is not a side or (height, width) in pixels")
    return pair[0], pair[1]


def _to_uint8(image: tf.Tensor) -> tf.Tensor:
    # No clipping: the weights of these resizes are positive and sum to 1, so values stay in 0..255.
    return tf.cast(image, tf.uint8)


def _size(image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    shape = tf.shape(image)
    return shape[-3], shape[-2]
