"""Tracing without weights: nothing is allocated, the step is the trainer's, the data are not needed."""

import dataclasses
import os

import pytest
import tensorflow as tf

from vit_tpu import config as configs
from vit_tpu import settings
from vit_tpu.errors import UserError
from vit_tpu.tpu import trace


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_large_variables_take_no_memory():
    before = resident_bytes()
    with tf.variable_creator_scope(trace.variable_creator):
        weight = tf.Variable(lambda: tf.zeros([256, 2**20]), name="weight")  # 1 GiB
        average = tf.Variable(lambda: tf.cast(weight, tf.bfloat16), name="average")
    assert (weight.shape, weight.dtype) == ((256, 2**20), tf.float32)
    assert (average.shape, average.dtype) == ((256, 2**20), tf.bfloat16)
    assert resident_bytes() - before < 2**27


def test_small_variables_keep_their_values():
    with tf.variable_creator_scope(trace.variable_creator):
        assert tf.Variable([1.0, 2.0]).numpy().tolist() == [1.0, 2.0]


def test_replicas_are_seen_by_the_step_and_then_gone():
    real = tf.distribute.get_replica_context()
    with trace.replica_context(4):
        assert tf.distribute.get_replica_context().num_replicas_in_sync == 4
    assert tf.distribute.get_replica_context() is real


@pytest.mark.parametrize(
    "data, classes, expected",
    [
        ({"source": "digits"}, None, (10, 1)),
        ({"source": "synthetic", "classes": 7}, None, (7, 3)),
        ({"source": "folder", "path": "/nowhere"}, 21841, (21841, 3)),
    ],
)
def test_classes_and_channels_need_no_data_where_the_config_says_them(data, classes, expected):
    config = configs.from_dict({"data": data, "model": {"num_classes": classes}})
    assert trace.data_shape(config) == expected


def test_classes_that_nothing_says_are_asked_for():
    config = configs.from_dict({"data": {"source": "folder", "path": "/nowhere"}})
    with pytest.raises(UserError, match="how many classes. set model.num_classes"):
        trace.data_shape(config)


def test_arguments_of_the_program_are_named_by_role():
    config = dataclasses.replace(settings.Config(), precision="mixed_bfloat16")
    config = configs.replace(configs.replace(config, "model.depth", 1), "training.ema", 0.9)
    hlo, arguments = trace.Step(config).hlo(4)
    roles = [a["role"] for a in arguments]
    assert roles[:3] == ["batch"] * 3 and hlo
    parameters = [a for a in arguments if a["role"] == "parameters"]
    assert {"blocks/0/mlp/dense1/kernel", "posemb", "head/bias"} <= {a["name"] for a in parameters}
    assert roles.count("ema") == len(parameters) and roles.count("optimizer") == 2 * len(parameters)


def test_batch_larger_than_the_synthetic_data_can_be_planned():
    config = configs.from_dict({"data": {"source": "synthetic", "size": 8}, "training": {"batch_size": 64, "steps": 5}})
    config = configs.replace(config, "model.depth", 1)
    assert trace.Step(config).config.training.batch_size == 64
