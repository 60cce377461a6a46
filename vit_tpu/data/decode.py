"""Encoded image in, uint8 [H, W, 3] (or [H, W, 1]) out: by content, never by the file's name.

JPEG (grey, CMYK, progressive, arithmetic), PNG (every kind) and plain lossy WebP are decoded by
TensorFlow; GIF, BMP and other WebP (alpha, animation, lossless) by Pillow: their first frame.
Everything else is refused; `vit_tpu.data.formats.explain` names the reason.

- Transparent pixels are laid on a background colour, white by default. (TensorFlow alone would
  show whatever colour the file hides under them, or refuse.)
- 16-bit PNG is reduced to its upper 8 bits, except when no value exceeds 255: such files hold
  8-bit values in 16-bit fields, and reducing them would leave a black image.
- EXIF orientation is ignored unless asked for: ImageNet and the models trained on it ignore it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from vit_tpu.data import formats, preprocess
from vit_tpu.errors import UserError


@dataclass(frozen=True)
class Decode:
    """How files become pixels.

    Attributes:
      background: the colour 0..255 (red, green, blue) under transparent pixels.
      exif: "ignore" or "apply" the orientation that a camera noted.
      max_pixels: larger images are refused before their pixels are allocated; the default is
        Pillow's limit (0.5 GiB as RGB).
    """

    background: tuple[int, int, int] = (255, 255, 255)
    exif: str = "ignore"
    max_pixels: int = 178_956_970

    def __post_init__(self) -> None:
        if self.exif not in ("ignore", "apply"):
            raise UserError(f'exif is "{self.exif}": use ignore or apply')
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise UserError(f"background {self.background!r} is not three values from 0 to 255")


def decode_image(data: tf.Tensor, channels: int = 3, options: Decode | None = None) -> tf.Tensor:
    """Decodes one image, eagerly or inside a graph.

    Args:
      data: the encoded file, a scalar string.
      channels: 3 or 1.
      options: see `Decode`.

    Returns:
      uint8 [H, W, channels].

    Raises:
      tf.errors.OpError: for anything that is not a whole image of a supported format.
    """
    options = options or Decode()
    return _decode(data, channels, options, lambda: _whole_jpeg(data, channels, options))


def decode_in_graph(data: tf.Tensor, channels: int = 3, options: Decode | None = None) -> tf.Tensor:
    """As `decode_image`, by TensorFlow's operations alone, for graphs that run without Python.

    JPEG, PNG, BMP, WebP and a GIF's first frame; orientation is ignored and alpha is laid on the background for PNG
    only. Anything else is an error.
    """
    options = options or Decode()

    def other(data: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_image(data, channels=3, expand_animations=False)

    return _decode(data, channels, options, lambda: _whole_jpeg(data, channels, options), other=other)


def decode_window(
    data: tf.Tensor,
    seed: tf.Tensor,
    area: tuple[float, float],
    channels: int = 3,
    options: Decode | None = None,
) -> tf.Tensor:
    """Decodes a random window (`preprocess.crop_window`), of a JPEG only the blocks it needs.

    Args:
      data: the encoded file, a scalar string.
      seed: int32 [2].
      area: smallest and largest share of the image.
      channels, options: as for `decode_image`.

    Returns:
      uint8 [h, w, channels].
    """
    options = options or Decode()

    def jpeg() -> tf.Tensor:
        window = preprocess.crop_window(_jpeg_shape(data, options), seed, area)
        return tf.io.decode_and_crop_jpeg(data, window, channels=channels)

    def cut(image: tf.Tensor) -> tf.Tensor:
        top, left, height, width = tf.unstack(preprocess.crop_window(tf.shape(image), seed, area))
        return image[top : top + height, left : left + width]

    return _decode(data, channels, options, jpeg, cut)


def _decode(data, channels, options, jpeg, after=lambda image: image, other=None):
    data = tf.convert_to_tensor(data, tf.string)

    head = tf.strings.substr(data, 0, 32) + b"\0" * 32  # padded: substr must start inside

    def starts(text: bytes, at: int = 0) -> tf.Tensor:
        return tf.strings.substr(head, at, len(text)) == text

    def png() -> tf.Tensor:
        return after(preprocess.to_channels(_png(data, head, options), channels))

    def webp() -> tf.Tensor:
        image = tf.io.decode_image(data, channels=3, expand_animations=False)
        image = tf.ensure_shape(image, [None, None, 3])
        return after(preprocess.to_channels(image, channels))

    def by_pillow(data: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda value: _by_pillow(value, options), [data], tf.uint8)

    def rest() -> tf.Tensor:
        image = tf.ensure_shape((other or by_pillow)(data), [None, None, 3])
        return after(preprocess.to_channels(image, channels))

    # "VP8 " is the plain lossy kind, which has neither alpha nor animation.
    plain_webp = starts(b"WEBP", 8) & starts(b"VP8 ", 12)
    image = tf.cond(
        starts(b"\xff\xd8\xff"),
        jpeg,
        lambda: tf.cond(starts(b"\x89PNG\r\n\x1a\n"), png, lambda: tf.cond(plain_webp, webp, rest)),
    )
    image = tf.ensure_shape(image, [None, None, channels])
    if options.exif == "apply" and other is None:
        turn = tf.numpy_function(lambda value: np.int32(formats.orientation(_as_bytes(value))), [data], tf.int32)
        image = tf.ensure_shape(orient(image, turn), [None, None, channels])
    return image


def _as_bytes(value: bytes | np.ndarray) -> bytes:
    return value.item() if isinstance(value, np.ndarray) else value  # an array when eager


def _by_pillow(data: bytes | np.ndarray, options: Decode) -> np.ndarray:
    try:
        return formats.decode_with_pillow(_as_bytes(data), options.background, options.max_pixels)
    except ValueError as error:  # eagerly, too, the caller sees TensorFlow's kind of error
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from None


def orient(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns uint8 [H, W, C] as its EXIF orientation (int32 scalar, 1..8) asks."""

    turned = tf.cond(orientation < 5, lambda: image, lambda: tf.transpose(image, [1, 0, 2]))
    # tf.reverse, not [::-1]: a slice with a negative step takes 50 times as long.
    return tf.switch_case(
        orientation - 1,
        [
            lambda: image,
            lambda: tf.reverse(image, [1]),
            lambda: tf.reverse(image, [0, 1]),
            lambda: tf.reverse(image, [0]),
            lambda: turned,
            lambda: tf.reverse(turned, [1]),
            lambda: tf.reverse(turned, [0, 1]),
            lambda: tf.reverse(turned, [0]),
        ],
    )


def _whole_jpeg(data: tf.Tensor, channels: int, options: Decode) -> tf.Tensor:
    with tf.control_dependencies([_jpeg_shape(data, options)]):
        return tf.io.decode_jpeg(data, channels=channels)


def _jpeg_shape(data: tf.Tensor, options: Decode) -> tf.Tensor:
    shape = tf.io.extract_jpeg_shape(data)
    check = _assert_pixels(tf.cast(shape[:2], tf.int64), options)
    with tf.control_dependencies([check]):
        return tf.identity(shape)


def _png(data: tf.Tensor, head: tf.Tensor, options: Decode) -> tf.Tensor:
    # The header is at a fixed place: width, height (4 bytes each), bit depth, ...
    sides = tf.cast(tf.io.decode_raw(tf.strings.substr(head, 16, 8), tf.int32, little_endian=False), tf.int64)
    deep = tf.strings.substr(head, 24, 1) == b"\x10"

    def sixteen() -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.cast(tf.io.decode_png(data, channels=4, dtype=tf.uint16), tf.int32)
        colour, alpha = pixels[..., :3], pixels[..., 3:]
        scale = tf.where(tf.reduce_max(colour) > 255, 256, 1)
        return tf.cast(colour // scale, tf.uint8), tf.cast(alpha // 256, tf.uint8)

    def eight() -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.io.decode_png(data, channels=4)
        return pixels[..., :3], pixels[..., 3:]

    with tf.control_dependencies([_assert_pixels(sides, options)]):
        colour, alpha = tf.cond(deep, sixteen, eight)

    def blend() -> tf.Tensor:
        share = tf.cast(alpha, tf.float32) / 255.0
        under = tf.constant(options.background, tf.float32)
        mixed = share * tf.cast(colour, tf.float32) + (1.0 - share) * under
        return tf.cast(tf.round(mixed), tf.uint8)

    return tf.cond(tf.reduce_all(alpha == 255), lambda: colour, blend)


def _assert_pixels(sides: tf.Tensor, options: Decode) -> tf.Operation:
    return tf.debugging.assert_less_equal(
        tf.reduce_prod(sides), tf.constant(options.max_pixels, tf.int64), "too many pixels"
    )
