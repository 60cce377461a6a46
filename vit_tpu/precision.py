"""Dtype policies: a scope that restores what it changed, and what the hardware supports.

The module itself is callable, so that users write `with vit_tpu.precision("mixed_bfloat16"):`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from vit_tpu.errors import UserError, nearest

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def check(policy: str) -> str:
    """Returns `policy` if it is one that vit_tpu trains with, else raises UserError with the name that was meant."""
    if policy in POLICIES:
        return policy
    if f"mixed_{policy}" in POLICIES:
        raise UserError(
            f'precision "{policy}" would keep the weights themselves in {policy}, where small updates '
            f'are rounded away; use "mixed_{policy}" (float32 weights, {policy} arithmetic)'
        )
    raise UserError(f'unknown precision "{policy}"{nearest(policy, POLICIES)}; choose one of {", ".join(POLICIES)}')


@contextlib.contextmanager
def scope(policy: str) -> Iterator[None]:
    """Sets the global Keras dtype policy inside a `with` block and restores the old one, also on an exception.

    Args:
      policy: "float32", "mixed_bfloat16" or "mixed_float16".

    Raises:
      UserError: any other name ("bfloat16" and "float16" would round the weights themselves).
    """
    import tf_keras as keras

    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(check(policy))
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


def explain() -> tuple[str, str]:
    """Returns the recommended policy for the devices TensorFlow sees here, and the reason in one sentence."""
    import tensorflow as tf

    if tf.config.list_logical_devices("TPU"):
        return "mixed_bfloat16", "TPU matrix units multiply bfloat16 natively"
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        return for_gpu(details.get("compute_capability"))
    return for_cpu(cpu_flags())


def for_cpu(flags: frozenset[str]) -> tuple[str, str]:
    """Returns the recommended policy for a CPU with these instruction sets, and the reason."""
    if {"avx512_bf16", "amx_bf16"} & flags:
        return "mixed_bfloat16", (
            "this CPU has bfloat16 instructions: a step without XLA is faster with them (S/16 with AVX-512: 1.6 times, "
            "measured), one with XLA is not"
        )
    return "float32", (
        "this CPU has no bfloat16 instructions: half precision is emulated, slower with XLA, many times slower without"
    )


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of this CPU as Linux names them; nothing elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            found = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())


def for_gpu(capability: tuple[int, int] | None) -> tuple[str, str]:
    """Returns the recommended policy for a GPU of this CUDA compute capability, and the reason."""
    if capability is None:
        return "float32", "the GPU does not report its compute capability"
    name = f"compute capability {capability[0]}.{capability[1]}"
    if tuple(capability) >= (8, 0):
        return "mixed_bfloat16", f"{name} has bfloat16 tensor cores"
    if tuple(capability) >= (7, 0):
        return "mixed_float16", f"{name} has float16 tensor cores but none for bfloat16"
    return "float32", f"{name} has no tensor cores: half precision would not be faster"


def recommended() -> str:
    """Returns the policy that suits the devices here; `explain()` also gives the reason."""
    return explain()[0]


class _CallableModule(types.ModuleType):
    def __call__(self, policy: str) -> contextlib.AbstractContextManager[None]:
        return scope(policy)


sys.modules[__name__].__class__ = _CallableModule
