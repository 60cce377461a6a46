"""The peak that model FLOPs utilisation is measured against."""

from __future__ import annotations

import os
import time

import tensorflow as tf

# Dense matrix peak of one device in FLOP/s from the makers' data sheets: (bfloat16 or float16, float32 or TF32).
GPU_PEAKS = {
    "H200": (989e12, 494e12),
    "H100": (989e12, 494e12),
    "A100": (312e12, 156e12),
    "V100": (125e12, 15.7e12),
    "L4": (121e12, 60e12),
    "T4": (65e12, 8.1e12),
}
# Per core as TensorFlow counts replicas: bfloat16.
TPU_PEAKS = {"v2": 23e12, "v3": 61.5e12, "v4": 275e12, "v5lite": 197e12, "v5e": 197e12, "v5p": 459e12, "v6": 918e12}


def of_devices(kind: str, replicas: int, half: bool) -> tuple[float | None, str]:
    """Returns the peak of all replicas in FLOP/s and one sentence on where the number is from.

    Args:
      kind: "CPU", "GPU" or "TPU".
      replicas: how many devices work.
      half: whether the policy computes in bfloat16 or float16.
    """
    if kind == "CPU":
        return measured_matmul(), "measured here: float32 matrix product, best of five"
    if kind == "GPU":
        name = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0]).get(
            "device_name", ""
        )
        for part, peaks in GPU_PEAKS.items():
            if part in name:
                return replicas * peaks[0 if half else 1], f"data sheet of {name}"
        return None, f"no data sheet figure for {name or 'this GPU'}"
    name = os.environ.get("TPU_ACCELERATOR_TYPE", "")  # TPU VMs set it: v3-8, v5litepod-16
    for part, figure in TPU_PEAKS.items():
        if name.startswith(part):
            return replicas * figure, f"data sheet of {name}"
    return None, f"no figure for {name or 'this TPU: TPU_ACCELERATOR_TYPE=v3-8 or the like would say which it is'}"


def measured_matmul(size: int = 1024, repeats: int = 5) -> float:
    """Returns the FLOP/s of a float32 matrix product on this CPU, all its cores at work."""
    a = tf.random.stateless_uniform([size, size], [0, 1])
    product = tf.function(lambda x: tf.matmul(x, x))
    product(a).numpy()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        product(a).numpy()
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best
