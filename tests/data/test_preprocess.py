"""Against numbers made with big_vision's own operations on one uint8 image of 73 x 101."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.data import preprocess
from vit_tpu.errors import UserError

REFERENCE = np.load(pathlib.Path(__file__).parent / "refs" / "preprocess.npz")
IMAGE = tf.constant(REFERENCE["in"])


def _assert_equal_images(found, name):
    expected = REFERENCE[f"out/{name}"].astype(np.float64)
    found = np.asarray(found).astype(np.float64)
    assert found.shape == expected.shape
    difference = np.abs(found - expected)
    level = 1 if expected.max() > 3 else 2 / 255
    # The same float operations: a pixel may fall on the other side of a whole number, few may.
    assert difference.max() <= level * 1.001
    assert difference.mean() < level * 0.01


def test_resize():
    _assert_equal_images(preprocess.resize(IMAGE, (64, 64)), "resize")


def test_resize_with_antialias():
    _assert_equal_images(preprocess.resize(IMAGE, (64, 64), antialias=True), "resize_aa")


def test_resize_small_keeps_the_aspect():
    _assert_equal_images(preprocess.resize_small(IMAGE, 48), "resize_small")


def test_central_crop():
    _assert_equal_images(preprocess.central_crop(IMAGE, (64, 64)), "central")
    _assert_equal_images(preprocess.central_crop(IMAGE, (73, 73)), "central_max")


def test_value_range():
    found = preprocess.to_float(IMAGE).numpy()
    np.testing.assert_allclose(found, REFERENCE["out/vrange"], atol=2.5e-7)
    assert found.min() == -1.0 and found.max() == 1.0


def test_evaluation_chain():
    small = preprocess.resize_small(IMAGE, 56)
    _assert_equal_images(preprocess.to_float(preprocess.central_crop(small, (48, 48))), "eval_i1k")


def test_few_shot_chain():
    resized = preprocess.resize(IMAGE, (56, 56))
    found = preprocess.to_float(preprocess.central_crop(resized, (48, 48)))
    _assert_equal_images(found, "fewshot")


def test_resize_of_a_batch_equals_resize_of_each():
    batch = tf.stack([IMAGE, IMAGE[::-1]])
    found = preprocess.resize(batch, (20, 30))
    np.testing.assert_array_equal(found[1], preprocess.resize(IMAGE[::-1], (20, 30)))


def test_crop_windows_lie_inside_and_keep_area_and_aspect():
    shape = tf.constant([300, 400, 3])
    windows = np.array([preprocess.crop_window(shape, tf.constant([7, i]), (0.2, 0.6)) for i in range(200)])
    top, left, height, width = windows.T
    assert top.min() >= 0 and left.min() >= 0
    assert (top + height).max() <= 300 and (left + width).max() <= 400
    area = height * width / (300 * 400)
    assert 0.19 < area.min() < 0.25 and 0.55 < area.max() < 0.61
    aspect = width / height
    assert 0.74 < aspect.min() < 0.82 and 1.2 < aspect.max() < 1.35
    assert len({tuple(window) for window in windows.tolist()}) > 190


def test_the_same_seed_gives_the_same_window():
    shape = tf.constant([300, 400, 3])
    first = preprocess.crop_window(shape, tf.constant([1, 2]))
    np.testing.assert_array_equal(first, preprocess.crop_window(shape, tf.constant([1, 2])))


def test_channels_are_repeated_or_become_luminance():
    grey = IMAGE[..., :1]
    np.testing.assert_array_equal(preprocess.to_channels(grey, 3), np.repeat(grey, 3, axis=-1))
    primaries = tf.constant([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], tf.uint8)
    found = preprocess.to_channels(primaries, 1).numpy()[0, :, 0]
    assert found.tolist() == [76, 150, 29, 255]


def test_image_size_is_a_side_or_a_pair():
    assert preprocess.height_width(8) == (8, 8)
    assert preprocess.height_width((8, 6)) == (8, 6)
    for wrong in (0, (8, 6, 3), (8, -1), "8"):
        with pytest.raises(UserError, match="image_size"):
            preprocess.height_width(wrong)
