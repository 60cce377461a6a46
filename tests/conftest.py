"""Set-up every test shares: a quiet TensorFlow with two logical CPU devices, and the reference files."""

import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

REFS = pathlib.Path(__file__).parent / "data" / "refs"
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(scope="session")
def refs():
    """Returns a function that opens a reference file by name (see tests/data/refs/README.md)."""

    def open_(name):
        path = REFS / name
        return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)

    return open_


@pytest.fixture(scope="session")
def mirrored():
    """The one strategy over both devices for the whole session: CPU collectives of several do not mix."""
    return tf.distribute.MirroredStrategy([device.name for device in tf.config.list_logical_devices("CPU")])


@pytest.fixture(autouse=True)
def _policy_is_restored():
    """No test may leave another global dtype policy or seed behind."""
    keras.utils.set_random_seed(0)
    yield
    policy = keras.mixed_precision.global_policy().name
    keras.mixed_precision.set_global_policy("float32")
    assert policy == "float32", f"the test left the global policy at {policy}"
