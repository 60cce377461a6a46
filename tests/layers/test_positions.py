"""Fixed positions against the reference; tokens in front."""

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import positions


def test_sincos_equals_the_reference_on_every_grid(refs):
    file = refs("sincos2d.npz")
    assert len(file.files) == 4
    for key in file.files:
        wanted = file[key]
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in key).split()]
        height, width, size = numbers[-3:]
        np.testing.assert_allclose(positions.sincos2d((height, width), size), wanted.reshape(1, -1, size), atol=1e-6)


def test_order_of_axes_differs_for_grids_that_are_not_square():
    wide, tall = positions.sincos2d((2, 3), 8), positions.sincos2d((3, 2), 8)
    assert wide.shape == tall.shape == (1, 6, 8)
    assert np.abs(wide - tall).max() > 0.1


def test_positions_go_to_patches_and_tokens_in_front():
    layer = positions.PositionsAndTokens((2, 3), 8, class_token=True, registers=2)
    x = tf.random.normal([4, 6, 8])
    y = layer(x)
    assert y.shape == (4, 9, 8) and layer.num_prefix == 3
    np.testing.assert_array_equal(y[:, 3:], x + layer.params["posemb"])
    layer.params["cls"].assign(tf.fill([1, 1, 8], 5.0))
    layer.params["registers"].assign(tf.fill([1, 2, 8], 7.0))
    np.testing.assert_array_equal(layer(x)[:, 0], np.full((4, 8), 5.0))
    np.testing.assert_array_equal(layer(x)[:, 1:3], np.full((4, 2, 8), 7.0))


def test_fixed_positions_are_no_weight():
    layer = positions.PositionsAndTokens((2, 2), 8, "sincos2d")
    x = tf.zeros([1, 4, 8])
    np.testing.assert_array_equal(layer(x), positions.sincos2d((2, 2), 8))
    assert layer.weights == []


def test_the_dtype_of_the_tokens_is_kept():
    layer = positions.PositionsAndTokens((2, 2), 8, class_token=True, registers=1)
    assert layer(tf.zeros([1, 4, 8], tf.bfloat16)).dtype == tf.bfloat16
    assert layer.params["posemb"].dtype == tf.float32


def test_wrong_arguments():
    with pytest.raises(UserError, match="width that divides by 4, not 6"):
        positions.sincos2d((2, 2), 6)
    with pytest.raises(UserError, match='posemb="rope" is not one of learn, sincos2d'):
        positions.PositionsAndTokens((2, 2), 8, "rope")
