import numpy as np
import pytest
import tensorflow as tf

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


# big_vision's mixup on [[0, 1], [2, 3], [4, 5], [6, 7]] with the share it drew.
MIXED = [
    [2.857602596282959, 3.857602596282959],
    [1.0474658012390137, 2.0474658012390137],
    [3.0474658012390137, 4.047465801239014],
    [5.047465801239014, 6.047465801239014],
]


def test_mixup_mixes_each_example_with_the_one_before(monkeypatch):
    x = tf.reshape(tf.range(8, dtype=tf.float32), [4, 2])
    share = MIXED[1][0] / 2
    monkeypatch.setattr(augment, "mixup_share", lambda key, alpha: tf.constant(share))
    images = x[:, None, None, :]
    found, labels = augment.mixup(images, x, tf.constant(0, tf.uint64), 0.2)
    np.testing.assert_allclose(found[:, 0, 0], MIXED, rtol=1e-6)
    np.testing.assert_allclose(labels, MIXED, rtol=1e-6)
    found, labels = augment.mixup(images[1:], x[1:], tf.constant(0, tf.uint64), 0.2, (images[0], x[0]))
    np.testing.assert_allclose(found[:, 0, 0], MIXED[1:], rtol=1e-6)
    np.testing.assert_allclose(labels, MIXED[1:], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_share_follows_the_folded_beta(alpha):
    draw = tf.function(lambda i: augment.mixup_share(keys.make_key(0, i), alpha))
    found = np.array([draw(tf.constant(i, tf.int64)) for i in range(1500)])
    assert found.dtype == np.float32 and found.min() >= 0.5 and found.max() <= 1.0
    expected = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    expected = np.maximum(expected, 1 - expected)
    assert abs(found.mean() - expected.mean()) < 0.015
    assert abs((found < 0.75).mean() - (expected < 0.75).mean()) < 0.04
