"""The real training step as HLO, without allocating a weight: `python -m vit_tpu.tpu.trace REQUEST.json`.

The model, the optimizer and the step are the ones that `vit_tpu.train` builds from the same config. Only the storage of
the variables is different: it is reserved, never written, so the pages of a 22 GB training state never exist. Nothing
may be run in such a process, which is why it is one of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from vit_tpu import config as configs
from vit_tpu import mesh as meshes
from vit_tpu.errors import UserError
from vit_tpu.settings import Config

_SMALL = 1024  # elements; smaller variables are initialised as usual
_NOMINAL_EXAMPLES = 1_281_167  # the schedule's constants need a number; memory and time do not depend on it


def variable_creator(next_creator: Any, **kwargs: Any) -> Any:
    """For `tf.variable_creator_scope`: gives large variables storage that is never touched."""
    import numpy as np
    import tensorflow as tf

    initial = kwargs.get("initial_value")
    shape, dtype = _shape_of(initial)
    if int(np.prod(shape)) >= _SMALL:

        def reserve() -> Any:
            with tf.init_scope():
                return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)

        kwargs["initial_value"] = reserve
    return next_creator(**kwargs)


def _shape_of(initial: Any) -> tuple[list[int], Any]:
    import tensorflow as tf
    from tensorflow.python.framework import func_graph

    if callable(initial):
        with func_graph.FuncGraph("shapes").as_default():  # traced, not computed
            initial = tf.convert_to_tensor(initial())
            return initial.shape.as_list(), initial.dtype
    initial = tf.convert_to_tensor(initial)
    return initial.shape.as_list(), initial.dtype


class Step:
    """The traced step of one config.

    Args:
      config: what `vit_tpu.train` would run; `init_from` and the data themselves are not read.
      replicas: cores over which gradients are summed.
      allocate: whether the weights exist after all, for a step that is to be run elsewhere.
    """

    def __init__(self, config: Config, replicas: int = 1, allocate: bool = False):
        import tensorflow as tf

        from vit_tpu import devices
        from vit_tpu.training import build, schedule

        quiet = dataclasses.replace(config.training, jit=None)
        config = dataclasses.replace(config, init_from=None, training=quiet)
        classes, channels = data_shape(config)
        plan = schedule.plan(config, max(_NOMINAL_EXAMPLES, config.training.batch_size))
        creator = contextlib.nullcontext() if allocate else tf.variable_creator_scope(variable_creator)
        with creator:
            self.model = build.build_model(config, devices.choose("cpu"), classes, channels, plan)
        self.config, self.classes, self.channels, self.replicas = config, classes, channels, replicas

    def hlo(self, batch: int) -> tuple[bytes, list[dict[str, Any]]]:
        """Returns the step for `batch` images a core as a serialized HloModule, and what its arguments are.

        On a mesh the module is that of all its cores, which the compiler divides, and takes the batch of all of them.

        Raises:
          UserError: the batch does not suit the config.
        """
        if self.model.mesh is not None:
            meshes.check_batch(self.model.mesh, batch * self.model.mesh.cores, self.config.training.accumulation_steps)
            batch *= self.model.mesh.cores
        function, specs = self.function(batch)
        hlo = function.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")
        return hlo, self._arguments(function.get_concrete_function(*specs), specs)

    def function(self, batch: int, tpu: bool = True) -> tuple[Any, list[Any]]:
        """Returns the step as a `tf.function`, traced for a TPU or not, and the specs of its arguments."""
        import tensorflow as tf

        from vit_tpu.layers import target

        model = self.model

        @tf.function(jit_compile=True, autograph=False)
        def step(images: Any, labels: Any, weights: Any) -> Any:
            with replica_context(self.replicas), target.tpu() if tpu else contextlib.nullcontext():
                return model.train_step((images, labels, weights))

        multi = self.config.training.loss == "sigmoid" or self.config.data.mixup > 0
        labels = tf.TensorSpec([batch, self.classes], tf.float32) if multi else tf.TensorSpec([batch], tf.int32)
        specs = [
            tf.TensorSpec([batch, *model.image_size, self.channels], tf.float32),
            labels,
            tf.TensorSpec([batch], tf.float32),
        ]
        return step, specs

    def _arguments(self, function: Any, specs: list[Any]) -> list[dict[str, Any]]:
        """One entry per argument of the program: {"name", "role", "shape", "dtype"}."""
        from vit_tpu.layers import sharding

        layouts, mesh = self.model.inner_optimizer.layouts, self.model.mesh
        known = {id(variable.handle): (name, role) for name, (variable, role) in self.variables().items()}
        arguments = [
            {"name": name, "role": "batch", "shape": spec.shape.as_list(), "dtype": spec.dtype.name}
            for name, spec in zip(("images", "labels", "weights"), specs)
        ]
        by_handle = {id(variable.handle): variable for variable in function.graph.variables}
        for captured in function.captured_inputs:
            variable = by_handle.get(id(captured))
            if variable is None:
                arguments.append(
                    {
                        "name": "constant",
                        "role": "other",
                        "shape": captured.shape.as_list(),
                        "dtype": captured.dtype.name,
                    }
                )
                continue
            name, role = known.get(id(variable.handle), (variable.name, "other"))
            entry = {"name": name, "role": role, "shape": variable.shape.as_list(), "dtype": variable.dtype.name}
            if mesh is not None and name in layouts:
                places = (layouts[name].used, layouts[name].state)
                entry["pieces"] = [sharding.piece(variable.shape.as_list(), place, mesh) for place in places]
            arguments.append(entry)
        return arguments

    def variables(self) -> dict[str, tuple[Any, str]]:
        """Returns name -> (variable, role) of everything that is trained or kept for it."""
        model = self.model
        found: dict[str, tuple[Any, str]] = {p.path: (p.variable, "parameters") for p in model.parameters()}
        for slot, variables in model.inner_optimizer.slots.items():
            found.update({f"{slot}/{path}": (v, "optimizer") for path, v in variables.items()})
        if model.averages is not None:
            paths = [p.path for p in model.trained]
            found.update({f"ema/{path}": (v, "ema") for path, v in zip(paths, model.averages.averages)})
        return found

    def facts(self) -> dict[str, Any]:
        """What the report needs to know of the model."""
        from vit_tpu.layers import sharding

        model, layout = self.model, ""
        if model.mesh is not None:
            layout = sharding.table(model.groups, model.inner_optimizer, model.averages is not None, model.mesh)
        return {
            "layout": layout,
            "parameters": sum(p.variable.shape.num_elements() for p in self.model.parameters()),
            "forward_flops": self.model.flops(),
            "tokens": self.model.num_patches + self.model.positions.num_prefix,
        }


class _Replicas:
    """Stands for tf.distribute's replica context where TPUStrategy would put its own."""

    def __init__(self, count: int):
        self.num_replicas_in_sync = count

    @property
    def replica_id_in_sync_group(self) -> Any:
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        return gen_xla_ops.xla_replica_id()

    def all_reduce(self, how: Any, values: Any) -> Any:
        import tensorflow as tf
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        groups = tf.constant([list(range(self.num_replicas_in_sync))])
        return tf.nest.map_structure(lambda v: gen_xla_ops.xla_all_reduce(v, groups, "Add", "CrossReplica"), values)


@contextlib.contextmanager
def replica_context(count: int) -> Iterator[None]:
    """Inside, the step being traced sees `count` replicas."""
    import tensorflow as tf

    if count == 1:
        yield
        return
    before = tf.distribute.get_replica_context
    tf.distribute.get_replica_context = lambda: _Replicas(count)
    try:
        yield
    finally:
        tf.distribute.get_replica_context = before


def data_shape(config: Config) -> tuple[int, int]:
    """Returns classes and channels without reading the data where the config says enough.

    Raises:
      UserError: the config names neither classes nor data that is here.
    """
    channels = config.data.channels or (1 if config.data.source == "digits" else 3)
    if config.model.num_classes is not None:
        return config.model.num_classes, channels
    known = {"digits": 10, "synthetic": config.data.classes}
    if config.data.source in known:
        return known[config.data.source], channels
    from vit_tpu.training import inputs

    try:
        source = inputs.open_source(config, "train")
    except UserError as error:
        raise UserError(f"how many classes? set model.num_classes, since the data cannot say ({error})") from None
    return inputs.num_classes(config, source), inputs.channels(config, source)


def main(path: str) -> None:
    """Answers one line of JSON on standard output for every line {"batch", "hlo": path to write} on standard input."""
    import os
    import resource
    import time

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not mix with the answers
    step = None
    for line in sys.stdin:
        request = json.loads(line)
        began = time.process_time()
        try:
            if step is None:
                wanted = json.loads(pathlib.Path(path).read_text())
                step = Step(configs.from_dict(wanted["config"]), wanted["replicas"])
            hlo, arguments = step.hlo(request["batch"])
            pathlib.Path(request["hlo"]).write_bytes(hlo)
            answer: dict[str, Any] = {"arguments": arguments, **step.facts()}
        except UserError as error:
            answer = {"wrong": str(error)}
        except Exception as error:  # the parent shows it
            answer = {"error": f"{type(error).__name__}: {error}"}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answers.write(
            json.dumps({**answer, "cpu_seconds": time.process_time() - began, "peak_host_bytes": peak}) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1])
