"""The block as a Keras layer, its configuration, and the weights every layer here creates."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from vit_tpu.layers import base
from vit_tpu.layers.block import Block


def test_a_block_is_two_residual_branches_with_norms_first():
    block = Block(8, 2, 16)
    x = tf.random.normal([2, 3, 8])
    middle = x + block.attention(block.norm1(x))
    block(x)
    np.testing.assert_allclose(block(x), middle + block.mlp(block.norm2(middle)), atol=1e-6)


def test_blocks_work_in_a_keras_model():
    model = keras.Sequential([keras.layers.Dense(8), Block(8, 2, 16), Block(8, 2, 16, remat=True)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((4, 3, 5), np.float32), np.ones((4, 3, 8), np.float32), verbose=0)
    assert len(model.trainable_variables) == 2 + 16 + 16


def test_config_round_trip():
    block = Block(8, 2, 16, dropout=0.1, drop_path=0.2, layer_scale=0.3, gelu="erf", epsilon=1e-5, remat=True)
    again = Block.from_config(block.get_config())
    assert again.get_config() == block.get_config()


@pytest.mark.parametrize("stack", [None, 3])
def test_specs_are_what_is_created(stack):
    block = Block(8, 2, 16, layer_scale=0.1)
    block.create_weights("somewhere", stack)
    lead = () if stack is None else (stack,)
    assert list(block.params) == list(block.specs())
    for path, spec in block.specs().items():
        assert tuple(block.params[path].shape) == (*lead, *spec.shape), path
        assert block.params[path].name == f"somewhere/{path}:0"
        assert block.params[path].dtype == tf.float32
    assert [id(v) for v in block.trainable_variables] == [id(v) for v in block.params.values()]


def test_weights_are_created_once():
    block = Block(8, 2, 16)
    block.create_weights()
    before = dict(block.params)
    block.create_weights("again")
    assert all(block.params[path] is variable for path, variable in before.items())


def test_below_takes_a_prefix_off_whole_names_only():
    assert base.below({"a/b": 1, "ab/c": 2, "a/d/e": 3}, "a") == {"b": 1, "d/e": 3}
