"""The Python side of decoding: odd formats through Pillow, and the reason when nothing can read it."""

from __future__ import annotations

import io
import warnings

import numpy as np

_REJECTED = (
    (b"II*\x00", "TIFF is not supported: convert it to PNG or JPEG"),
    (b"MM\x00*", "TIFF is not supported: convert it to PNG or JPEG"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000 is not supported: convert it to PNG or JPEG"),
    (b"\xff\x4f\xff\x51", "JPEG 2000 is not supported: convert it to PNG or JPEG"),
    (b"8BPS", "Photoshop files are not supported: convert it to PNG or JPEG"),
    (b"%PDF", "it is a PDF, not an image"),
)
_READABLE = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"GIF8": "GIF", b"BM": "BMP"}
_EXIF_ORIENTATION = 0x0112


def decode_with_pillow(data: bytes, background: tuple[int, int, int], max_pixels: int) -> np.ndarray:
    """Returns the first frame of a GIF, BMP or WebP as uint8 [H, W, 3], alpha laid on `background`.

    Raises:
      ValueError: with the reason, for anything Pillow cannot read or with more than `max_pixels`.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own size warning; ours is the limit
            image = Image.open(io.BytesIO(data), formats=("GIF", "BMP", "WEBP"))
            _check_pixels(image.width, image.height, max_pixels)
            image.load()
    except ValueError:
        raise
    except Exception as error:  # Pillow's plugins raise nearly anything for a damaged file
        raise ValueError(f"Pillow cannot read it ({error})") from None
    rgba = image.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, (*background, 255))
    return np.asarray(Image.alpha_composite(canvas, rgba).convert("RGB"))


def orientation(data: bytes) -> int:
    """Returns the EXIF orientation 1..8 of an encoded image; 1 when there is none or it is bad."""
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore")  # Pillow warns of damaged EXIF blocks
            value = int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block says nothing about the picture
        return 1
    return value if 1 <= value <= 8 else 1


def explain(data: bytes, max_pixels: int) -> str:
    """Returns why the decoder refused `data`, in words for the report of broken records."""
    if not data:
        return "the file is empty"
    for magic, reason in _REJECTED:
        if data.startswith(magic):
            return reason
    if data[4:8] == b"ftyp":
        brand = "AVIF" if data[8:12] in (b"avif", b"avis") else "HEIF or video"
        return f"{brand} is not supported: convert it to PNG or JPEG"
    kind = next((name for magic, name in _READABLE.items() if data.startswith(magic)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "WebP"
    if not kind:
        if data.lstrip()[:1] == b"<":
            return "it is a text page (HTML or XML), not an image"
        return f"unknown format (starts with {data[:8]!r}): use JPEG, PNG, GIF, WebP or BMP"
    try:
        size = _jpeg_frame(data) if kind == "JPEG" else _pillow_size(data)
    except Exception as error:
        if type(error).__name__ == "DecompressionBombError":  # Pillow's own, far larger limit
            return f"it announces too many pixels (decompression bomb): {str(error).rstrip('.')}"
        return f"the {kind} header is damaged"
    if size[2] > 8:
        return f"{size[2]}-bit JPEG is not supported: convert it to 8 bits"
    try:
        _check_pixels(size[0], size[1], max_pixels)
    except ValueError as error:
        return str(error)
    return f"the {kind} is truncated or damaged"


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ValueError(
            f"it announces {width} x {height} pixels, more than the limit of {max_pixels} (decompression bomb)"
        )


def _pillow_size(data: bytes) -> tuple[int, int, int]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            return image.width, image.height, 8


def _jpeg_frame(data: bytes) -> tuple[int, int, int]:
    """Returns (width, height, bits) from a JPEG's frame header."""
    at = 2
    while True:
        while data[at] != 0xFF:  # junk between segments
            at += 1
        marker = data[at + 1]
        if marker in (0xFF, 0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            at += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[at + 5 : at + 7], "big")
            width = int.from_bytes(data[at + 7 : at + 9], "big")
            return width, height, data[at + 4]
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
