"""What TensorFlow finds here, and which distribution strategy that means."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from vit_tpu.cluster import Cluster
from vit_tpu.errors import UserError, nearest
from vit_tpu.mesh import Mesh
from vit_tpu.tpu import sharding

STRATEGIES = ("auto", "cpu", "gpu", "mirrored", "multi_worker", "tpu")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      strategy: the tf.distribute strategy.
      line: one sentence that says what was chosen and why.
      kind: "CPU", "GPU" or "TPU".
      hosts: machines that read data, each its share of every batch.
    """

    strategy: Any
    line: str
    kind: str
    hosts: int = 1

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync

    def scope(self) -> contextlib.AbstractContextManager:
        return self.strategy.scope()

    def batches(self, make: Callable[[int, int], Any], batch_size: int) -> Any:
        """Returns batches as `fit` and `evaluate` read them.

        Args:
          make: (number of hosts, which) -> the dataset of that host, batch_size / hosts examples an element.
          batch_size: over all hosts.
        """
        if self.hosts == 1:
            return _static(make(1, 0))

        def on_host(context: Any) -> Any:
            found = _static(make(context.num_input_pipelines, context.input_pipeline_id))
            each = context.get_per_replica_batch_size(batch_size)
            whole = batch_size == each * context.num_input_pipelines
            return found if whole else found.rebatch(each, drop_remainder=True).prefetch(2)

        return self.strategy.distribute_datasets_from_function(on_host)


def choose(
    name: str = "auto",
    tpu: str | None = None,
    *,
    virtual: int | None = None,
    workers: Cluster | None = None,
    mesh: Mesh | None = None,
) -> Devices:
    """Returns the devices a run will use.

    Several workers and virtual devices have to be set up before TensorFlow has touched its devices.

    Args:
      name: "auto" takes the TPU that `tpu` names, else all `workers`, else all GPUs, else the CPU; "cpu" and "gpu" one
        device; "mirrored" all GPUs, or all logical CPU devices where there is no GPU; "multi_worker" `workers`; "tpu"
        the TPU named by `tpu`.
      tpu: "local" for the TPU VM this runs on, or a TPU's name or address.
      virtual: number of devices to cut the CPU into, to try out "mirrored".
      workers: the processes of the run.
      mesh: cores of a TPU that one copy of the model is divided over.

    Raises:
      UserError: what was asked for is not here; says what is.
    """
    import tensorflow as tf

    if name not in STRATEGIES:
        raise UserError(f'strategy "{name}"{nearest(name, STRATEGIES)} is not one of {", ".join(STRATEGIES)}')
    check_together(name, tpu, virtual, workers)
    sharding.check_strategy(mesh, name == "tpu" or bool(tpu), name)
    if name == "tpu" or (name == "auto" and tpu):
        return _tpu(tpu or "local", mesh)
    if workers is not None:
        return _multi_worker(workers)
    if virtual is not None:
        _cut_cpu(virtual)
        if name == "auto" and virtual > 1:
            name = "mirrored"
    gpus, cpus = tf.config.list_logical_devices("GPU"), tf.config.list_logical_devices("CPU")
    if name == "gpu" and not gpus:
        raise UserError(
            "strategy=gpu, but TensorFlow sees no GPU here: install tensorflow[and-cuda] or choose strategy=cpu"
        )
    if name == "mirrored":
        devices = [d.name for d in (gpus or cpus)]
        kind = "GPU" if gpus else "CPU"
        strategy = tf.distribute.MirroredStrategy(devices)
        cut = f", {_cores()} cores cut into {virtual} virtual devices" if virtual else ""
        return Devices(strategy, f"MirroredStrategy over {len(devices)} {kind} device(s){cut}", kind)
    if name == "auto" and len(gpus) > 1:
        strategy = tf.distribute.MirroredStrategy([d.name for d in gpus])
        return Devices(strategy, f"MirroredStrategy over {len(gpus)} GPUs (strategy=gpu would use one)", "GPU")
    if gpus and name != "cpu":
        return Devices(tf.distribute.OneDeviceStrategy(gpus[0].name), "one GPU", "GPU")
    # Keras' default strategy: one device needs no distribution machinery.
    return Devices(tf.distribute.get_strategy(), f"one CPU device, {_cores()} cores", "CPU")


def check_batch(batch_size: int, replicas: int, accumulation_steps: int = 1, repeats: int = 1) -> None:
    """Raises UserError for a batch that does not divide among replicas and micro-batches; names the nearest that do."""
    parts = replicas * accumulation_steps
    unit = math.lcm(parts, repeats)
    if batch_size % unit:
        near = [size for size in (batch_size // unit * unit, (batch_size // unit + 1) * unit) if size]
        asked = f"{replicas} replicas" + (f" x {accumulation_steps} micro-batches" if accumulation_steps > 1 else "")
        copies = f" with each example {repeats} times" if repeats > 1 else ""
        raise UserError(
            f"training.batch_size {batch_size} does not divide equally among {asked}{copies}: use a multiple of "
            f"{unit}, such as {' or '.join(map(str, near))}"
        )


def check_together(name: str, tpu: str | None, virtual: int | None, workers: Cluster | None) -> None:
    """Raises UserError for a strategy, TPU, virtual devices and workers that exclude each other; arguments as `choose`
    takes them."""
    if tpu and name not in ("auto", "tpu"):
        raise UserError(f"strategy={name} uses no TPU, but tpu={tpu} is given: leave one of them out")
    if name == "multi_worker" and workers is None:
        raise UserError(
            "strategy=multi_worker needs to know the workers: give --workers=host:port,host:port and --worker=INDEX on "
            "each, or set TF_CONFIG"
        )
    if workers is not None and (tpu or name not in ("auto", "multi_worker")):
        what = f"tpu={tpu}" if tpu else f"strategy={name}"
        raise UserError(
            f"{what} trains in one process, but {len(workers.addresses)} workers are named: leave them out (and unset "
            "TF_CONFIG), or use strategy=multi_worker"
        )
    if virtual is not None and (tpu or workers is not None or name not in ("auto", "mirrored")):
        what = f"tpu={tpu}" if tpu else "several workers" if workers is not None else f"strategy={name}"
        raise UserError(f"virtual_devices={virtual} means nothing with {what}: use it with strategy=mirrored or auto")


def _cut_cpu(count: int) -> None:
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        raise UserError(
            f"virtual_devices={count} cuts up the CPU, but there are GPUs here, which would be used: leave it out, or "
            "hide them with CUDA_VISIBLE_DEVICES=-1"
        )
    device = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        found = len(tf.config.list_logical_devices("CPU"))
        if found != count:
            raise UserError(
                f"virtual_devices={count} comes too late: TensorFlow has set up {found} CPU device(s) in this process "
                "already; start it in a new process, before anything else uses TensorFlow"
            ) from None


def _multi_worker(workers: Cluster) -> Devices:
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(workers.addresses)}), task_type="worker", task_id=workers.index,
        num_accelerators={"GPU": gpus}, rpc_layer="grpc",
    )  # fmt: skip
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:  # "Collective ops must be configured at program startup"
        raise UserError(
            f"several workers have to be set up before anything else uses TensorFlow in a process ({error}): start a "
            "new one"
        ) from None
    except tf.errors.OpError as error:
        raise UserError(
            f"worker {workers.index} cannot serve at {workers.addresses[workers.index]} "
            f"({' '.join(error.message.split())[:200]}): is the port free, and the address this machine's?"
        ) from None
    kind, count = ("GPU", gpus) if gpus else ("CPU", 1)
    line = (
        f"MultiWorkerMirroredStrategy, worker {workers.index} of {len(workers.addresses)} with {count} {kind}(s), "
        f"{strategy.num_replicas_in_sync} replicas in all"
    )
    return Devices(strategy, line, kind, len(workers.addresses))


def _tpu(address: str, mesh: Mesh | None = None) -> Devices:
    import tensorflow as tf

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = sharding.strategy(resolver, topology, mesh)
    except (ValueError, RuntimeError, OSError, ImportError, tf.errors.OpError) as error:  # OSError: no such name
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f'no TPU "{address}" could be reached ({reason}): on a TPU VM install tensorflow-tpu and use tpu=local'
        ) from None
    sharding.check_replicas(strategy, mesh)
    hosts = strategy.extended.num_hosts
    where = f" on {hosts} hosts" if hosts > 1 else ""
    return Devices(
        strategy,
        f'TPUStrategy over {strategy.num_replicas_in_sync} cores of "{address}"{where}{sharding.line(strategy, mesh)}',
        "TPU",
        hosts,
    )


def _static(data: Any) -> Any:
    """Returns the dataset, whose shapes are all known: a compiled step would be compiled again for each new one."""
    import tensorflow as tf

    for spec in tf.nest.flatten(data.element_spec):
        if not spec.shape.is_fully_defined():
            raise UserError(f"the data has batches of shape {spec.shape}: batch it with drop_remainder=True, or pad it")
    return data


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
