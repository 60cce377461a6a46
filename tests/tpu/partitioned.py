"""Runs training steps divided over virtual CPU devices, by XLA's own CPU client: `python partitioned.py CASES.json`.

TensorFlow traces and lowers the step; jax's CPU client compiles the same HLO for several devices and runs it. Of jax
nothing is used but that client. Answers a line of JSON for each case: how far the divided step ends from the plain one.
"""

import json
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
# Devices wait for each other, and on a busy machine for long: by itself the client gives up after 40 seconds.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=1200"
)

import jax
import numpy as np
import tensorflow as tf
import tf_keras as keras
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.sharding_impls import GSPMDSharding

from vit_tpu import config as configs
from vit_tpu import mesh as meshes
from vit_tpu.tpu import trace

jax.devices()  # reads the flags, of which TensorFlow does not know all
del os.environ["XLA_FLAGS"]
jax.config.update("jax_enable_x64", True)  # counters are int64
STEPS = 5
meshes.SMALLEST = 64  # divide even the tiny weights of these models


class Partitioned:
    """One step as a program of `cores` devices."""

    def __init__(self, hlo: bytes, text: str, cores: int):
        self.devices = tuple(jax.devices()[:cores])
        options = xc.CompileOptions()
        build = options.executable_build_options
        for target in (options, build):
            target.num_replicas, target.num_partitions = 1, cores
        build.use_spmd_partitioning, build.use_shardy_partitioner = True, False
        build.allow_spmd_sharding_propagation_to_parameters = [True]
        build.allow_spmd_sharding_propagation_to_output = [True]
        build.device_assignment = xc.DeviceAssignment.create(np.arange(cores).reshape(1, cores))
        module = _jax.mlir.hlo_to_stablehlo(hlo)
        self.program = jax.devices()[0].client.compile_and_load(module, xc.DeviceList(self.devices), options)
        self.kept = {int(p): int(o) for o, p in re.findall(r"\{(\d+)\}: \((\d+), \{\}, ", text.partition("\n")[0])}
        self.inputs, self.outputs = self.program.get_parameter_shardings(), self.program.get_output_shardings()

    def place(self, value, how):
        sharding = GSPMDSharding(self.devices, _hlo(how))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: np.asarray(value[index]))

    def parts(self, parameter: int, shape) -> int:
        """Over how many devices an argument is divided."""
        whole, piece = np.prod(shape), self.place(np.zeros(shape, np.float32), self.inputs[parameter])
        return int(whole // max(np.prod(piece.addressable_shards[0].data.shape), 1))

    def run(self, values):
        """Returns the arguments after one step."""
        placed = [self.place(np.asarray(v), how) for v, how in zip(values, self.inputs)]
        found = self.program.execute_sharded(placed).disassemble_into_single_device_arrays()
        new = list(values)
        for parameter, output in self.kept.items():
            sharding = GSPMDSharding(self.devices, _hlo(self.outputs[output]))
            array = jax.make_array_from_single_device_arrays(np.shape(values[parameter]), sharding, found[output])
            new[parameter] = np.asarray(array)
        return new


def _hlo(how):
    return xc.HloSharding.from_proto(how) if isinstance(how, xc.OpSharding) else how


def build(values, mesh=None, shard="none"):
    keras.utils.set_random_seed(3)
    return trace.Step(configs.from_dict({**values, "mesh": mesh, "shard": shard}), allocate=True)


def batches(step, size):
    draw = np.random.default_rng(5)
    for _ in range(STEPS):
        images = draw.normal(size=(size, *step.model.image_size, step.channels)).astype(np.float32)
        weights = (np.arange(size) < size - 3).astype(np.float32)  # the last three are padding
        yield images, draw.integers(0, step.classes, size).astype(np.int32), weights


def state(step):
    return {name: variable.numpy().astype(np.float32) for name, (variable, _) in step.variables().items()}


def whole(values):
    """Returns the state after the same steps by TensorFlow on one device, without a mesh."""
    step = build(values)
    size = values["training"]["batch_size"]
    function, _ = step.function(size, tpu=False)
    for batch in batches(step, size):
        results = function(*map(tf.constant, batch))
    return state(step), float(results["step_loss"])


def divided(values, mesh, shard, tpu):
    """Returns the state before and after the steps of the divided program, and over how many devices each lies."""
    step = build(values, mesh, shard)
    size = values["training"]["batch_size"]
    function, specs = step.function(size, tpu=tpu)
    concrete = function.get_concrete_function(*specs)
    lower = function.experimental_get_compiler_ir(*specs)
    program = Partitioned(lower(stage="hlo_serialized"), lower(stage="hlo"), step.model.mesh.cores)
    arguments = step._arguments(concrete, specs)
    by_handle = {id(v.handle): v for v in concrete.graph.variables}
    captured = [by_handle[id(c)].numpy() if id(c) in by_handle else c.numpy() for c in concrete.captured_inputs]
    for batch in batches(step, size):
        captured = program.run([*batch, *captured])[3:]
    after = {a["name"]: np.asarray(v, np.float32) for a, v in zip(arguments[3:], captured)}
    parts = {a["name"]: program.parts(i, a["shape"]) for i, a in enumerate(arguments) if a["role"] != "other"}
    return state(step), after, parts


def compare(expected, loss, values, mesh, shard, tpu):
    before, after, parts = divided(values, mesh, shard, tpu)
    differences, moved = {}, {}
    for name, value in expected.items():
        size = max(float(np.abs(value).max()), 1e-10)
        differences[name] = float(np.abs(after[name] - value).max()) / size
        moved[name] = float(np.abs(after[name] - before[name]).max())
        if not name.endswith("key/bias"):  # whose gradient is zero
            moved[name] /= size
    worst = sorted(differences, key=lambda name: -differences[name])[:3]
    idle = {name: moved.pop(name) for name in list(moved) if name.endswith("key/bias")}
    still = min(moved, key=lambda name: moved[name])
    return {
        "worst": [[name, differences[name]] for name in worst], "compared": len(differences), "loss": loss,
        "still": [still, moved[still]], "idle": max(idle.values()), "parts": parts,
    }  # fmt: skip


def main(cases):
    known = {}
    for case in cases:
        key = json.dumps(case["config"])
        known[key] = known.get(key) or whole(case["config"])
        print(json.dumps(compare(*known[key], case["config"], case["mesh"], case["shard"], case["tpu"])), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
