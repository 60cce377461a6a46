"""Patch embedding against a convolution; sizes that do not divide."""

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import patches


@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_a_convolution_whose_stride_is_its_kernel(channels):
    layer = patches.PatchEmbedding(10, 4, channels)
    x = np.random.default_rng(0).normal(size=(2, 8, 12, channels)).astype(np.float32)
    got = layer(x)
    layer.params["bias"].assign(np.arange(10.0))
    wanted = tf.nn.conv2d(x, layer.params["kernel"], 4, "VALID")
    assert got.shape == (2, 6, 10)
    np.testing.assert_allclose(got, tf.reshape(wanted, [2, 6, 10]), atol=1e-5)
    np.testing.assert_allclose(layer(x) - got, np.broadcast_to(np.arange(10.0), (2, 6, 10)), atol=1e-5)


def test_the_batch_may_be_unknown():
    layer = patches.PatchEmbedding(10, 4)
    traced = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec([None, 8, 8, 3]))
    assert traced.structured_outputs.shape.as_list() == [None, 4, 10]
    assert traced(tf.zeros([5, 8, 8, 3])).shape == (5, 4, 10)


@pytest.mark.parametrize(
    "size, words",
    [((30, 32), "use 16 or 32 for 30"), ((32, 7), "use 16 for 7"), ((0, 16), "use 16 for 0"), ((-16, 16), "for -16")],
)
def test_sizes_that_do_not_divide_name_those_that_do(size, words):
    with pytest.raises(UserError, match=words):
        patches.grid_of(size, 16)


def test_grid():
    assert patches.grid_of((224, 112), 14) == (16, 8)
