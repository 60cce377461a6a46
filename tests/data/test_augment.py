import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance

from vit_tpu.data import augment, keys


def _batch(count=64, height=6, width=5):
    values = np.random.default_rng(0).integers(1, 256, (count, height, width, 3), np.uint8)
    return tf.constant(values), keys.make_key(0, tf.range(count, dtype=tf.int64))


def test_flip_mirrors_about_half_and_leaves_the_rest():
    images, key = _batch()
    found = augment.random_flip(images, key).numpy()
    kept = (found == images.numpy()).all(axis=(1, 2, 3))
    mirrored = (found == images.numpy()[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (kept ^ mirrored).all()
    assert 20 < mirrored.sum() < 44


def test_shift_is_a_crop_of_the_padded_image():
    images, key = _batch(count=200)
    found = augment.random_shift(images, key, 2).numpy()
    padded = np.pad(images.numpy(), ((0, 0), (2, 2), (2, 2), (0, 0)))
    offsets = []
    for one, around in zip(found, padded):
        matches = [(y, x) for y in range(5) for x in range(5) if (around[y : y + 6, x : x + 5] == one).all()]
        assert len(matches) == 1
        offsets += matches
    assert len(set(offsets)) == 25  # every one of 5 x 5 places occurs


def test_shift_and_flip_of_an_example_do_not_depend_on_its_batch():
    images, key = _batch()
    for function in (augment.random_flip, lambda i, k: augment.random_shift(i, k, 2)):
        together = function(images, key)
        np.testing.assert_array_equal(function(images[9:12], key[9:12]), together[9:12])


def test_flip_of_one_image_is_its_flip_in_a_batch():
    images, key = _batch(count=12)
    together = augment.random_flip(images, key)
    for i in range(12):
        np.testing.assert_array_equal(augment.flip_one(images[i], key[i]), together[i])


def test_shift_by_nothing_is_the_identity():
    images, key = _batch()
    assert augment.random_shift(images, key, 0) is images


def test_shift_of_one_image_is_its_shift_in_a_batch():
    images, key = _batch(count=12)
    together = augment.random_shift(images, key, 3)
    for i in range(12):
        np.testing.assert_array_equal(augment.shift_one(images[i], key[i], 3), together[i])
    first = images[0]
    assert augment.shift_one(first, key[0], 0) is first


@pytest.mark.parametrize("first, turn, order", [(0, 0, "bcs"), (2, 0, "sbc"), (1, 1, "cbs"), (0, 1, "bsc")])
def test_jitter_is_pillow_s_enhancement_in_each_order(first, turn, order, monkeypatch):
    coarse = Image.fromarray(np.random.default_rng(0).integers(30, 200, (4, 5, 3), np.uint8))
    image = coarse.resize((24, 20), Image.Resampling.BICUBIC)
    factors = {"b": 1.3, "c": 0.75, "s": 1.35}
    draws = [(factors[name] - 0.6) / 0.8 for name in "bcs"]
    monkeypatch.setattr(augment.keys, "uniform", lambda key, stream: tf.constant(draws[stream - 100], tf.float32))
    monkeypatch.setattr(
        augment.keys, "integer", lambda key, stream, count: tf.constant({103: first, 104: turn}[stream])
    )
    found = augment.jitter(tf.constant(np.asarray(image)), tf.constant(0, tf.uint64), 0.4).numpy()
    kinds = {"b": ImageEnhance.Brightness, "c": ImageEnhance.Contrast, "s": ImageEnhance.Color}
    for name in order:
        image = kinds[name](image).enhance(factors[name])
    # Pillow cuts fractions off after each of three steps.
    difference = found.astype(int) - np.asarray(image).astype(int)
    assert difference.min() >= -1 and difference.max() <= 4 and 0 < difference.mean() < 2


def test_jitter_draws_all_orders_and_factors_of_its_range():
    grey = tf.fill([2, 2, 1], tf.constant(100, tf.uint8))
    spread = [augment.jitter(grey, keys.make_key(0, i), 0.3).numpy().max() for i in range(60)]
    assert 70 <= min(spread) < 76 and 124 < max(spread) <= 130
    orders = {
        (int(keys.integer(keys.make_key(0, i), 103, 3)), int(keys.integer(keys.make_key(0, i), 104, 2)))
        for i in range(60)
    }
    assert len(orders) == 6


@pytest.mark.parametrize("size", [(60, 60), (40, 90)])
def test_erased_boxes_have_the_paper_s_areas_and_aspects(size):
    boxes = tf.data.Dataset.range(1500).map(lambda i: augment.erase_box(keys.make_key(0, i), 210, size))
    top, left, rows, columns = np.stack(list(boxes.as_numpy_iterator())).T
    assert top.min() == 0 and left.min() == 0
    assert (top + rows).max() == size[0] and (left + columns).max() == size[1]
    share = rows * columns / (size[0] * size[1])
    assert 0.015 < share.min() < 0.03 and 0.31 < share.max() < 0.35
    if size[0] == size[1]:
        assert abs(share.mean() - (0.02 + 1 / 3) / 2) < 0.01
        aspect = np.log(rows / columns)
        assert abs(aspect.mean()) < 0.06  # even in the logarithm: a plain uniform aspect would give 0.45
        assert aspect.min() < -1.1 and aspect.max() > 1.1


def test_erasing_fills_boxes_with_noise_and_leaves_the_rest():
    image = tf.fill([48, 48, 3], tf.constant(77, tf.uint8))
    erase = tf.function(lambda key, share, count: augment.erase(image, key, share, count), autograph=False)
    changed = []
    for i in range(40):
        found = erase(keys.make_key(0, i), 0.5, 1).numpy()
        top, left, rows, columns = augment.erase_box(keys.make_key(0, i), 210, (48, 48)).numpy()
        inside = found[top : top + rows, left : left + columns]
        changed.append((inside != 77).mean() > 0.9)
        outside = found.copy()
        outside[top : top + rows, left : left + columns] = 77
        assert (outside == 77).all()
        if changed[-1] and inside.size > 1000:
            assert abs(inside.mean() - 127.5) < 8 and abs(inside.std() - 73.9) < 5
        np.testing.assert_array_equal(found, erase(keys.make_key(0, i), 0.5, 1))
    assert 10 < sum(changed) < 30
    several = erase(keys.make_key(0, 3), 1.0, 4).numpy()
    assert 0.02 * 0.5 < (several != 77).any(axis=-1).mean() < 1 / 3


def test_a_box_that_cannot_fit_erases_nothing():
    found = np.stack([augment.erase_box(keys.make_key(0, i), 210, (1, 400)).numpy() for i in range(20)])
    assert ((found[:, 2] <= 1) & (found[:, 3] <= 400)).all()
