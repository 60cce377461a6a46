import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.data import keys, mixing

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
    monkeypatch.setattr(mixing, "mixup_share", lambda key, alpha: tf.constant(share))
    images = x[:, None, None, :]
    found, labels = mixing.mixup(images, x, tf.constant(0, tf.uint64), 0.2)
    np.testing.assert_allclose(found[:, 0, 0], MIXED, rtol=1e-6)
    np.testing.assert_allclose(labels, MIXED, rtol=1e-6)
    found, labels = mixing.mixup(images[1:], x[1:], tf.constant(0, tf.uint64), 0.2, (images[0], x[0]))
    np.testing.assert_allclose(found[:, 0, 0], MIXED[1:], rtol=1e-6)
    np.testing.assert_allclose(labels, MIXED[1:], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_share_follows_the_folded_beta(alpha):
    draw = tf.function(lambda i: mixing.mixup_share(keys.make_key(0, i), alpha))
    found = np.array([draw(tf.constant(i, tf.int64)) for i in range(1500)])
    assert found.dtype == np.float32 and found.min() >= 0.5 and found.max() <= 1.0
    expected = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    expected = np.maximum(expected, 1 - expected)
    assert abs(found.mean() - expected.mean()) < 0.015
    assert abs((found < 0.75).mean() - (expected < 0.75).mean()) < 0.04


def _numbered(count, height, width):
    """Image i is all i; its label row is one-hot i."""
    images = tf.ones([count, height, width, 3]) * tf.range(count, dtype=tf.float32)[:, None, None, None]
    return images, tf.one_hot(tf.range(count), count)


@pytest.mark.parametrize("height, width", [(16, 16), (12, 30), (31, 7)])
def test_cutmix_label_share_is_the_share_of_pixels(height, width):
    images, labels = _numbered(5, height, width)
    cut = tf.function(lambda key: mixing.cutmix(images, labels, key, 1.0))
    touching = 0
    for number in range(60):
        mixed, rows = (part.numpy() for part in cut(keys.make_key(0, number)))
        for i in range(5):
            before = (i - 1) % 5
            shares = [(mixed[i] == value).mean() for value in range(5)]
            np.testing.assert_allclose(rows[i], shares, atol=1e-6)
            assert abs(shares[i] + shares[before] - 1) < 1e-6
        pasted = np.argwhere((mixed[0] == 4)[..., 0])
        if len(pasted):
            (top, left), (bottom, right) = pasted.min(0), pasted.max(0)
            assert len(pasted) == (bottom - top + 1) * (right - left + 1)  # one whole box
            touching += top == 0 or left == 0 or bottom == height - 1 or right == width - 1
    assert touching > 20  # boxes that reach over the border occur, and are right


def test_cutmix_boxes_have_the_paper_s_distribution():
    height, width = 40, 20
    boxes = tf.data.Dataset.range(4000).map(lambda i: mixing.cutmix_box(keys.make_key(0, i), 1.0, height, width))
    top, left, bottom, right = np.stack(list(boxes.as_numpy_iterator())).T
    assert top.min() == 0 and left.min() == 0 and bottom.max() == height and right.max() == width
    rng = np.random.default_rng(0)
    side = np.sqrt(1 - rng.beta(1.0, 1.0, 100_000))

    def clipped(length):
        extent = np.round(side * length).astype(int)
        start = rng.integers(0, length, len(side)) - extent // 2
        return np.minimum(start + extent, length) - np.maximum(start, 0)

    rows, columns = clipped(height), clipped(width)
    assert abs((bottom - top).mean() - rows.mean()) < 0.5
    assert abs((right - left).mean() - columns.mean()) < 0.25
    share = ((bottom - top) * (right - left)).mean() / (height * width)
    assert abs(share - (rows * columns).mean() / (height * width)) < 0.01  # 0.32; unclipped it would be 0.5


def test_one_of_mixup_and_cutmix_for_each_batch_half_the_time():
    images, labels = _numbered(4, 9, 9)
    mixed = tf.function(lambda key: mixing.mix(images, labels, key, 1.0, 1.0)[0])
    cut = sum(bool(np.isin(mixed(keys.make_key(0, i)), range(4)).all()) for i in range(200))
    assert 75 < cut < 125


def test_tiny_alphas_give_finite_shares():
    draw = tf.function(lambda i: mixing.beta(keys.make_key(0, i), 1e-4))
    found = np.array([draw(tf.constant(i, tf.int64)) for i in range(200)])
    assert np.isfinite(found).all() and found.min() >= 0 and found.max() <= 1


def test_hosts_paste_the_predecessor_of_their_first_example():
    images, labels = _numbered(6, 8, 8)
    key = keys.make_key(0, 4)
    whole, rows = mixing.cutmix(images, labels, key, 1.0)
    half, half_rows = mixing.cutmix(images[3:], labels[3:], key, 1.0, (images[2], labels[2]))
    np.testing.assert_array_equal(half, whole[3:])
    np.testing.assert_array_equal(half_rows, rows[3:])
