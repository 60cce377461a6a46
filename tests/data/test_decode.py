"""Real files that break decoders; expected pixels were measured with Pillow or follow from twins."""

import io
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from vit_tpu.data import formats, preprocess
from vit_tpu.data.decode import Decode, decode_image, decode_window
from vit_tpu.errors import UserError

FOLDER = pathlib.Path(__file__).parent / "hard_images"
LIMIT = Decode().max_pixels


def _bytes(name):
    return (FOLDER / name).read_bytes()


def _graph(**options):
    @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
    def decode(data):
        return decode_image(data, 3, Decode(**options))

    return decode


DECODE = _graph()
APPLY = _graph(exif="apply")


def _pillow(data, background=(255, 255, 255), turn=False):
    image = Image.open(io.BytesIO(data))
    image.load()
    if turn:
        image = ImageOps.exif_transpose(image)
    rgba = image.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, (*background, 255))
    return np.asarray(Image.alpha_composite(canvas, rgba).convert("RGB")).astype(int)


def _jpeg(size, **kwargs):
    values = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(values).resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=95, **kwargs)
    return out.getvalue()


# name, mean of all pixels, largest mean difference to Pillow: 0 where decoding has one answer.
# TensorFlow's fast inverse transform is about one level off Pillow's on JPEG.
READABLE = [
    ("cmyk_adobe.jpg", 13.9, 1.1),
    ("rgb_twin_of_cmyk.jpg", 12.1, 1.1),
    ("gray.jpg", 84.2, 1.1),
    ("baseline.jpg", 105.4, 1.1),
    ("arithmetic_coded.jpg", 105.3, 1.1),
    ("exif_orientation_5_small.jpg", 87.5, 1.1),
    ("one_pixel.jpg", 0.0, 1.1),
    ("two_by_one_rotated.jpg", 84.7, 1.1),
    ("png16_gray.png", 123.9, 0),  # 8-bit values in 16-bit fields: not black
    ("png16_rgba_animated.png", 85.0, 0),
    ("png_rgba.png", 183.8, 0),
    ("png_gray_alpha_animated.png", 127.5, 0),
    ("png_palette_alpha.png", 85.0, 0),
    ("png_gray_trns.png", 123.9, 0),
    ("png_palette8.png", 29.3, 0),
    ("png_palette_alpha_photo.png", 183.5, 0),
    ("webp_orientation_6.webp", 88.5, 0),
    ("webp_lossy.webp", 115.3, 0),
    ("webp_alpha.webp", 205.9, 0),
    ("gif_disposal_rgba.gif", 187.4, 0),
    ("bmp_rgb24.bmp", 121.0, 0),
    ("bmp_rgba32.bmp", 119.6, 0),
    ("bmp_pal8rle.bmp", 118.9, 0),
]


@pytest.mark.parametrize("name, mean, tolerance", READABLE)
def test_readable_files_have_their_pixels(name, mean, tolerance):
    data = _bytes(name)
    found = DECODE(data).numpy()
    expected = _pillow(data)
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() <= tolerance
    assert found.mean() == pytest.approx(mean, abs=0.06)


def test_arithmetic_coding_gives_the_same_picture():
    arithmetic, baseline = (DECODE(_bytes(n)).numpy().astype(int)
                            for n in ("arithmetic_coded.jpg", "baseline.jpg"))  # fmt: skip
    assert np.abs(arithmetic - baseline).mean() < 1


def test_cmyk_looks_like_its_rgb_twin():
    cmyk, twin = (DECODE(_bytes(n)).numpy().astype(int)
                  for n in ("cmyk_adobe.jpg", "rgb_twin_of_cmyk.jpg"))  # fmt: skip
    assert np.abs(cmyk - twin).mean() < 5  # inverted inks would give about 230


@pytest.mark.parametrize("name", ["png_rgba.png", "webp_alpha.webp"])
def test_transparent_pixels_show_the_background(name):
    data = _bytes(name)
    found = _graph(background=(255, 0, 128))(data).numpy()
    alpha = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))[..., 3]
    assert (alpha == 0).any()
    np.testing.assert_array_equal(np.unique(found[alpha == 0], axis=0), [[255, 0, 128]])
    assert np.abs(found - _pillow(data, (255, 0, 128))).max() <= 1


def test_deep_png_keeps_its_upper_bits():
    deep = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    out = io.BytesIO()
    Image.fromarray(deep).save(out, "PNG")
    found = DECODE(out.getvalue()).numpy()
    np.testing.assert_array_equal(found, np.repeat((deep >> 8)[..., None], 3, axis=-1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_on_request_only(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _jpeg((8, 4), exif=exif)
    assert DECODE(data).shape == (4, 8, 3)
    found = _graph(exif="apply")(data).numpy()
    expected = _pillow(data, turn=True)
    assert found.shape == ((4, 8, 3) if orientation < 5 else (8, 4, 3))
    assert np.abs(found - expected).mean() < 2


def test_exif_orientation_of_real_files():
    for name in ("exif_orientation_5_small.jpg", "webp_orientation_6.webp", "png_rgba.png"):
        data = _bytes(name)
        assert np.abs(APPLY(data).numpy() - _pillow(data, turn=True)).mean() < 1.1
    assert APPLY(_bytes("two_by_one_rotated.jpg")).shape == (2, 1, 3)


def _twelve_bit():
    data = bytearray(_jpeg((60, 40)))
    data[data.index(b"\xff\xc0") + 4] = 12  # the precision in the frame header
    return bytes(data)


def _frames(kind, **options):
    """An animation of three plain frames with a grey ramp on top; only the first one counts."""
    frames = []
    for colour in ((200, 40, 40), (40, 200, 40), (40, 40, 200)):
        values = np.full((20, 30, 3), colour, np.uint8)
        values[:5] = np.linspace(0, 255, 30).astype(np.uint8)[None, :, None]
        frames.append(Image.fromarray(values))
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], **options)
    return out.getvalue()


def _with_junk(data, junk):
    """`junk` between the first two segments of a JPEG, where a decoder must look for the next marker."""
    length = int.from_bytes(data[4:6], "big")
    return data[: 4 + length] + junk + data[4 + length :]


@pytest.mark.parametrize(
    "data, tolerance",
    [
        (_jpeg((60, 40), progressive=True), 2),
        (_jpeg((60, 40), icc_profile=bytes(range(256)) * 600), 2),  # three segments
        (_with_junk(_jpeg((60, 40)), b"\x01\x02\x03"), 2),
        (_with_junk(_jpeg((60, 40)), b"\xff\x00"), 2),
        (_jpeg((60, 40), exif=b"Exif\0\0" + b"\xff" * 60_000), 2),  # a block of nonsense
        (_jpeg((60, 40)) + _jpeg((30, 20)), 2),  # two pictures in one file, as of stereo cameras and phones
        (_frames("GIF"), 0),
        (_frames("WEBP", lossless=True), 0),
        (_frames("PNG"), 0),
    ],
    ids=["progressive", "icc", "junk", "ff00", "exif", "two", "gif", "webp", "png"],
)
def test_odd_but_whole_files_have_their_pixels(data, tolerance):
    expected = _pillow(data)
    for decode in (DECODE, APPLY):
        found = decode(data).numpy()
        assert found.shape == expected.shape
        assert np.abs(found - expected).mean() <= tolerance
    assert found.std() > 20  # a picture, not a plain field


def test_the_name_of_a_file_says_nothing(tmp_path):
    for name, content in (("a.jpg", "png_rgba.png"), ("b.png", "gray.jpg")):
        (tmp_path / name).write_bytes(_bytes(content))
        found = DECODE(tf.io.read_file(str(tmp_path / name))).numpy()
        np.testing.assert_array_equal(found, DECODE(_bytes(content)).numpy())


def _broken_stream():
    data = bytearray(_bytes("png_rgba.png"))
    at = data.index(b"IDAT") + 2000
    data[at : at + 40] = bytes(40)
    return bytes(data)


TIFF = io.BytesIO()
Image.new("RGB", (4, 4)).save(TIFF, "TIFF")

REFUSED = [
    ("progressive_truncated.jpg", "the JPEG is truncated or damaged"),
    (_twelve_bit(), "12-bit JPEG is not supported"),
    ("png_truncated_end_chunk.png", "the PNG is truncated or damaged"),
    ("png_broken.png", "the PNG header is damaged"),
    ("gif_bomb.gif", "decompression bomb"),
    ("avif.avif", "AVIF is not supported"),
    (b"", "the file is empty"),
    (b"<html>404 not found</html>", "it is a text page"),
    (b"\n <!DOCTYPE html>", "it is a text page"),
    (TIFF.getvalue(), "TIFF is not supported"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + b"\0" * 99, "JPEG 2000 is not supported"),
    (b"\xff\xd8\xff", "the JPEG header is damaged"),
    (b"\x89PNG\r\n\x1a\n", "the PNG header is damaged"),
    (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "the WebP header is damaged"),
    (b"ab", "unknown format"),
    (_jpeg((60, 40))[:-300], "the JPEG is truncated or damaged"),
    (_broken_stream(), "the PNG is truncated or damaged"),
    (_bytes("png_rgba.png")[:9000], "the PNG is truncated or damaged"),
    (b"\xff\x4f\xff\x51" + b"\0" * 99, "JPEG 2000 is not supported"),
    (b"8BPS" + b"\0" * 99, "Photoshop files are not supported"),
    (b"%PDF-1.4", "it is a PDF"),
    (b"\0\0\0\x18ftypheic" + b"\0" * 99, "HEIF or video is not supported"),
]


@pytest.mark.parametrize("data, reason", REFUSED)
def test_unreadable_files_are_refused_with_a_reason(data, reason):
    data = _bytes(data) if isinstance(data, str) else data
    with pytest.raises(tf.errors.OpError):
        DECODE(data)
    assert reason in formats.explain(data, LIMIT)
    assert "\n" not in formats.explain(data, LIMIT)


@pytest.mark.parametrize("name", ["webp_lossy.webp", "png_rgba.png", "gray.jpg", "bmp_rgb24.bmp"])
def test_images_above_the_limit_are_refused(name):
    data = _bytes(name)
    with pytest.raises(tf.errors.OpError):
        _graph(max_pixels=4000)(data)
    assert "more than the limit of 4000" in formats.explain(data, 4000)


@pytest.mark.parametrize("name", ["gray.jpg", "png_rgba.png", "webp_lossy.webp", "bmp_rgb24.bmp"])
def test_one_channel_is_the_luminance(name):
    data = _bytes(name)
    found = decode_image(tf.constant(data), 1).numpy()
    weights = np.array([0.299, 0.587, 0.114])
    assert found.shape[2] == 1
    assert np.abs(found[..., 0] - DECODE(data).numpy() @ weights).mean() < 1


@pytest.mark.parametrize("name", ["gray.jpg", "png_rgba.png", "webp_lossy.webp", "bmp_rgb24.bmp"])
def test_a_window_is_that_part_of_the_image(name):
    seed = tf.constant([3, 4])
    whole = DECODE(_bytes(name)).numpy().astype(int)
    window = decode_window(tf.constant(_bytes(name)), seed, (0.1, 0.5)).numpy().astype(int)
    shape = tf.constant(whole.shape, tf.int32)
    top, left, height, width = preprocess.crop_window(shape, seed, (0.1, 0.5)).numpy()
    assert 0.05 < height * width / whole[..., 0].size < 0.6
    np.testing.assert_array_equal(window, whole[top : top + height, left : left + width])


def test_a_window_of_the_whole_jpeg_is_the_jpeg():
    data = _jpeg((64, 48))
    found = decode_window(tf.constant(data), tf.constant([0, 0]), (1.0, 1.0))
    # 4:3 is the limit of the aspect ratio, so the largest window is nearly everything
    assert found.shape[0] >= 46 and found.shape[1] >= 62


def test_wrong_options_are_refused():
    with pytest.raises(UserError, match='exif is "warn": use ignore or apply'):
        Decode(exif="warn")
    with pytest.raises(UserError, match="background"):
        Decode(background=(0, 0, 256))
