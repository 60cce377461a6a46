import hashlib

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from vit_tpu.data.digits import digits
from vit_tpu.data.synthetic import synthetic
from vit_tpu.errors import UserError


def _images(source):
    return source.get(tf.range(source.num_examples, dtype=tf.int64))["image"].numpy()


def test_the_split_is_fixed_stratified_and_complete():
    train, validation = digits(), digits("validation")
    assert (train.num_examples, validation.num_examples) == (1437, 360)
    assert train.image_shape == validation.image_shape == (8, 8, 1)
    everything = np.bincount(load_digits().target)
    held_out = np.bincount(validation.labels)
    assert np.abs(held_out - everything / 5).max() < 1
    together = sorted(i.tobytes() for s in (train, validation) for i in _images(s))
    grey = np.floor(load_digits().images * 255 / 16 + 0.5).astype(np.uint8)
    assert together == sorted(i.tobytes() for i in grey)
    assert hashlib.sha256(validation.labels.tobytes()).hexdigest()[:16] == "839e3ddef9d9c1d8"


def test_sixteen_grey_levels_fill_the_byte():
    found = _images(digits())
    assert found.min() == 0 and found.max() == 255
    assert len(np.unique(found)) == 17


def test_unknown_split():
    with pytest.raises(UserError, match='unknown split "test"'):
        digits("test")


def test_synthetic_images_are_a_function_of_the_index():
    source = synthetic(100, (6, 4), num_classes=7)
    many = source.get(tf.range(100, dtype=tf.int64))
    assert many["image"].shape == (100, 6, 4, 3) and many["image"].dtype == tf.uint8
    one = source.get(tf.constant(33, tf.int64))
    np.testing.assert_array_equal(one["image"], many["image"][33])
    assert int(one["label"]) == 33 % 7 == source.labels[33]
    assert len(np.unique(many["image"].numpy())) > 60
    with pytest.raises(UserError, match="not possible"):
        synthetic(0)
