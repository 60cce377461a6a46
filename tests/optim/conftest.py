"""Fixtures of the optimizer tests."""

import pytest
import tensorflow as tf
from optim_helpers import MAKERS


@pytest.fixture(scope="session")
def mirrored():
    """One strategy for the whole session: CPU collectives of several do not mix."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(params=MAKERS)
def make(request):
    """A maker of each optimizer: make(**options)."""
    return MAKERS[request.param]
