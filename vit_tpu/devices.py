"""What TensorFlow finds here, and which distribution strategy that means."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from vit_tpu.errors import UserError, nearest

STRATEGIES = ("auto", "cpu", "gpu", "mirrored", "tpu")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      strategy: the tf.distribute strategy.
      line: one sentence that says what was chosen and why.
      kind: "CPU", "GPU" or "TPU".
    """

    strategy: Any
    line: str
    kind: str

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync

    def scope(self) -> contextlib.AbstractContextManager:
        return self.strategy.scope()


def choose(name: str = "auto", tpu: str | None = None) -> Devices:
    """Returns the devices a run will use.

    Args:
      name: "auto" takes TPUs, else all GPUs, else the CPU; "cpu" and "gpu" one device; "mirrored" all GPUs, or all
        logical CPU devices where there is no GPU; "tpu" the TPU named by `tpu`.
      tpu: "local" for the TPU VM this runs on, or a TPU's name or address.

    Raises:
      UserError: what was asked for is not here; says what is.
    """
    import tensorflow as tf

    if name not in STRATEGIES:
        raise UserError(f'strategy "{name}"{nearest(name, STRATEGIES)} is not one of {", ".join(STRATEGIES)}')
    gpus, cpus = tf.config.list_logical_devices("GPU"), tf.config.list_logical_devices("CPU")
    if name == "tpu" or (name == "auto" and tpu):
        return _tpu(tpu or "local")
    if name == "gpu" and not gpus:
        raise UserError(
            "strategy=gpu, but TensorFlow sees no GPU here: install tensorflow[and-cuda] or choose strategy=cpu"
        )
    if name == "mirrored":
        devices = [d.name for d in (gpus or cpus)]
        kind = "GPU" if gpus else "CPU"
        strategy = tf.distribute.MirroredStrategy(devices)
        return Devices(strategy, f"MirroredStrategy over {len(devices)} {kind} device(s)", kind)
    if name == "auto" and len(gpus) > 1:
        strategy = tf.distribute.MirroredStrategy([d.name for d in gpus])
        return Devices(strategy, f"MirroredStrategy over {len(gpus)} GPUs (strategy=gpu would use one)", "GPU")
    if gpus and name != "cpu":
        return Devices(tf.distribute.OneDeviceStrategy(gpus[0].name), "one GPU", "GPU")
    # Keras' default strategy: one device needs no distribution machinery.
    return Devices(tf.distribute.get_strategy(), f"one CPU device, {_cores()} cores", "CPU")


def _tpu(address: str) -> Devices:
    import tensorflow as tf

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f'no TPU "{address}" could be reached ({reason}): on a TPU VM install tensorflow-tpu and use tpu=local'
        ) from None
    return Devices(strategy, f'TPUStrategy over {strategy.num_replicas_in_sync} cores of "{address}"', "TPU")


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
