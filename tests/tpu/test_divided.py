"""Variables in parts: outside of a TPU's step by their values, inside by the graph that TensorFlow makes of them."""

import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.tpu import tpu

from vit_tpu.layers import sharding
from vit_tpu.mesh import Mesh
from vit_tpu.tpu import divided

MESH = Mesh(2, 2, "full")
VALUE = np.arange(32, dtype=np.float32).reshape(4, 8)


def made(spec, value=VALUE, mesh=MESH):
    parts = [tf.Variable(divided.part_of(tf.constant(value), core, spec, mesh)) for core in range(mesh.cores)]
    return divided.DividedVariable(parts, spec, mesh, "weight")


@pytest.mark.parametrize("spec", [("data", "model"), ("model", "data"), ("data", None), (None, "model")])
def test_parts_make_up_the_whole_and_assigning_divides_it(spec):
    variable = made(spec)
    assert variable.shape == [4, 8] and variable.read_value().numpy().tolist() == VALUE.tolist()
    variable.assign(2.0 * VALUE)
    assert tf.convert_to_tensor(variable).numpy().tolist() == (2.0 * VALUE).tolist()
    variable.assign_add(VALUE)
    assert variable.read_value().numpy().tolist() == (3.0 * VALUE).tolist()


def test_each_core_holds_its_part_alone():
    cores = [part.numpy().tolist() for part in made(("data", "model"))]
    # core = data * 2 + model
    assert cores == [VALUE[:2, :4].tolist(), VALUE[:2, 4:].tolist(), VALUE[2:, :4].tolist(), VALUE[2:, 4:].tolist()]
    copies = [part.numpy().tolist() for part in made((None, "model"))]
    assert copies[0] == copies[2] == VALUE[:, :4].tolist() and copies[1] == copies[3] == VALUE[:, 4:].tolist()


def test_checkpoint_holds_the_whole_value(tmp_path):
    variable = made(("data", "model"))
    path = tf.train.Checkpoint(weight=variable).write(str(tmp_path / "c"))
    [name] = [name for name, _ in tf.train.list_variables(path) if "weight" in name]
    assert tf.train.load_variable(path, name).tolist() == VALUE.tolist()
    other = made(("model", None), np.zeros_like(VALUE))  # another way of dividing
    tf.train.Checkpoint(weight=other).read(path).assert_consumed()
    assert other.read_value().numpy().tolist() == VALUE.tolist()


@pytest.mark.parametrize(
    "spec, dims, tile", [(("data", "model"), [2, 2], [2, 2]), (("data", None), [2, 1, 2], [2, 1, 2])]
)
def test_step_of_a_tpu_sees_one_annotated_array(spec, dims, tile):
    variable = made(spec)

    def step():
        variable.assign(tf.convert_to_tensor(variable) + 1.0)
        return tf.reduce_sum(tf.convert_to_tensor(variable))

    def on_tpu():
        return tpu.rewrite(step)

    graph = tf.function(on_tpu, autograph=False).get_concrete_function().graph
    inputs = [op for op in graph.get_operations() if op.type == "TPUPartitionedInputV2"]
    assert inputs and all(list(op.get_attr("partition_dims")) == dims for op in inputs)
    assert len(inputs[0].inputs) == 4
    proto = xla_data_pb2.OpSharding()
    proto.ParseFromString(inputs[0].get_attr("_XlaSharding"))
    assert list(proto.tile_assignment_dimensions) == tile
    handles = {op.outputs[0].ref() for op in inputs}
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp" and op.inputs[0].ref() in handles]
    writes = [op for op in graph.get_operations() if op.type == "AssignVariableOp" and op.inputs[0].ref() in handles]
    # TensorFlow itself finds the whole's shape from the parts.
    assert len(writes) == 1 and reads and all(op.outputs[0].shape == [4, 8] for op in reads)


def test_only_what_is_placed_on_several_cores_is_divided():
    asked = []

    def next_creator(**kwargs):
        asked.append(kwargs.pop("custom_tpu_variable_creator", None))
        return resource_variable_ops.ResourceVariable(kwargs["initial_value"])

    last = tf.variable_creator_scope(lambda _, **kwargs: next_creator(**kwargs))
    with last, divided.variables(None, Mesh(4, 1, "full")):
        for spec in (None, (None, None), ("model", None), ("data", None)):
            with sharding.placed(spec):
                tf.Variable(VALUE)
    assert [creator is not None for creator in asked] == [False, False, False, True]


def test_creator_makes_one_divided_variable_for_each_copy_of_the_mesh(monkeypatch):
    cores = np.array([["CPU:0"] * 4] * 2)
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(_tpu_devices=cores))
    found = []
    monkeypatch.setitem(
        divided.distribute_utils.TPU_VARIABLE_CLASS_MAPPING,
        tf.VariableSynchronization.ON_WRITE,
        lambda strategy, values, aggregation: found.extend(values),
    )
    divided.create(
        strategy, MESH, ("data", "model"), None, initial_value=lambda: tf.constant(VALUE), name="weight", trainable=True
    )
    assert len(found) == 2 and all(isinstance(variable, divided.DividedVariable) for variable in found)
    for variable in found:
        assert [part.shape.as_list() for part in variable] == [[2, 4]] * 4
        assert variable.read_value().numpy().tolist() == VALUE.tolist() and variable.trainable
