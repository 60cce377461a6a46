"""A snapshot of this machine, as plain data: what the checks read, and what tests plant faults into."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from importlib import metadata

from vit_tpu import precision
from vit_tpu.diagnose import shortage

PACKAGES = (
    "tensorflow", "tf_keras", "tf-models-official", "tensorboard", "tensorboard-plugin-profile", "protobuf", "numpy",
    "tensorflow-tpu", "tensorflow-addons", "typeguard", "libtpu", "setuptools",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU that TensorFlow sees: its name, CUDA compute capability and the bytes that TensorFlow may take of it."""

    name: str
    capability: tuple[int, int] | None
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is installed and what there is to compute with.

    Attributes:
      python: (major, minor).
      packages: version by name; None = not installed.
      gpus: those that TensorFlow sees.
      tpus: TPU cores that TensorFlow sees.
      nvidia_files: device files of an NVIDIA driver, whether TensorFlow uses it or not.
      cpu_flags: instruction sets of the CPU.
      cores: that this process may use.
      memory_bytes: of the host, or what this process may take of it; None if unknown.
      environment: variables that steer TensorFlow and XLA.
      now: seconds since 1970 by this machine's clock.
      newest_file: the newest change of an installed package's files, by the same clock.
      xla_error: why a small function could not be compiled with XLA, or None.
    """

    python: tuple[int, int]
    packages: Mapping[str, str | None]
    gpus: tuple[Gpu, ...] = ()
    tpus: int = 0
    nvidia_files: tuple[str, ...] = ()
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 1
    memory_bytes: int | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    now: float = 0.0
    newest_file: float = 0.0
    xla_error: str | None = None


def version(name: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def look() -> Machine:
    """Returns the snapshot of this machine; imports TensorFlow and compiles one small function."""
    packages = {name: version(name) for name in PACKAGES}
    gpus: tuple[Gpu, ...] = ()
    tpus, xla_error = 0, None
    if packages["tensorflow"] or packages["tensorflow-tpu"]:
        import tensorflow as tf

        for device in tf.config.list_physical_devices("GPU"):
            details = tf.config.experimental.get_device_details(device)
            size = shortage.of_device("GPU")
            gpus += (Gpu(details.get("device_name", device.name), details.get("compute_capability"), size),)
        tpus = len(tf.config.list_physical_devices("TPU"))
        xla_error = _xla_error()
    return Machine(
        python=sys.version_info[:2],
        packages=packages,
        gpus=gpus,
        tpus=tpus,
        nvidia_files=tuple(str(path) for path in sorted(pathlib.Path("/dev").glob("nvidia[0-9]*"))),
        cpu_flags=precision.cpu_flags(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=shortage.of_host(),
        environment={k: v for k, v in os.environ.items() if k.startswith(("TF_", "XLA_", "CUDA_", "TPU_"))},
        now=time.time(),
        newest_file=_newest_file(),
        xla_error=xla_error,
    )


def _xla_error() -> str | None:
    """Compiles a function with XLA and looks at the program: a compiler that is silently not used finds no fusion."""
    import tensorflow as tf

    try:
        function = tf.function(lambda x: tf.reduce_sum(tf.exp(x) * 2.0), jit_compile=True)
        program = function.experimental_get_compiler_ir(tf.ones([8]))(stage="optimized_hlo")
        if "HloModule" not in program:
            return "the compiled function has no XLA program"
        return None if abs(float(function(tf.zeros([8]))) - 16.0) < 1e-4 else "a compiled function gives a wrong number"
    except Exception as error:  # whatever it is, it is the finding
        return " ".join(str(error).split())[:200]


def _newest_file() -> float:
    try:
        return max(path.stat().st_mtime for path in pathlib.Path(__file__).parent.glob("*.py"))
    except (OSError, ValueError):
        return 0.0
