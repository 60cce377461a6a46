"""A mesh on the cores of a TPU, as far as that goes without one: the device assignment of a made-up slice."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import topology as topologies

from vit_tpu import devices
from vit_tpu.errors import UserError
from vit_tpu.mesh import Mesh
from vit_tpu.tpu import sharding


def slice_of(*shape):
    """A slice of one host whose cores are counted row by row."""
    places = np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), -1).astype(np.int32)
    return topologies.Topology(mesh_shape=shape, device_coordinates=places[None])


@pytest.mark.parametrize("cores, block", [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 2]), (4, [2, 1, 1, 2]), (8, [2, 2, 1, 2])])
def test_cores_of_a_chip_come_first(cores, block):
    assert sharding.computation_shape([2, 2, 1, 2], cores) == block


def test_mesh_that_no_block_has_names_those_that_have():
    with pytest.raises(
        UserError, match="mesh of 16 cores does not fit this TPU of 8 cores .2x2x1x2.: use 2, 4, 8 cores"
    ):
        sharding.computation_shape([2, 2, 1, 2], 16)
    with pytest.raises(UserError, match="mesh of 3 cores"):
        sharding.computation_shape([2, 2, 1, 2], 3)


def test_one_copy_takes_all_eight_cores():
    found = sharding.assignment(slice_of(2, 2, 1, 2), Mesh(4, 2, "full"))
    assert (found.num_replicas, found.num_cores_per_replica) == (1, 8)


def test_parts_of_the_model_axis_share_a_chip():
    found = sharding.assignment(slice_of(2, 2, 1, 2), Mesh(4, 2, "full"))
    places = [tuple(found.coordinates(0, core)) for core in range(8)]
    assert len(set(places)) == 8
    for data in range(4):
        assert places[2 * data][:3] == places[2 * data + 1][:3]


def test_larger_slice_holds_several_copies_of_the_mesh():
    found = sharding.assignment(slice_of(4, 4, 1, 2), Mesh(8, 1, "state"))
    assert (found.num_replicas, found.num_cores_per_replica) == (4, 8)


def test_strategy_is_made_for_spmd_over_the_assignment(monkeypatch):
    made = []
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda *args, **kwargs: made.append((args, kwargs)))
    sharding.strategy("resolver", slice_of(2, 2, 1, 2), Mesh(4, 2))
    sharding.strategy("resolver", slice_of(2, 2, 1, 2), Mesh(8))  # copies: nothing to divide
    sharding.strategy("resolver", slice_of(2, 2, 1, 2), None)
    (args, kwargs), plain, none = made
    assert args == ("resolver",) and kwargs["experimental_spmd_xla_partitioning"] is True
    assert kwargs["experimental_device_assignment"].num_cores_per_replica == 8
    assert plain == none == (("resolver",), {})


@pytest.mark.parametrize("name", ["cpu", "mirrored", "auto"])
def test_without_a_tpu_the_error_says_what_is_possible(name):
    with pytest.raises(UserError, match="strategy=.* cannot divide a model.*strategy=tpu.*vit_tpu.plan.*mirrored"):
        devices.choose(name, mesh=Mesh(8, 1, "state"))
