"""A machine on which nothing is wrong, to plant faults into."""

import dataclasses

from vit_tpu.diagnose.machine import Gpu, Machine

PACKAGES = {
    "tensorflow": "2.20.0", "tf_keras": "2.20.1", "tf-models-official": "2.20.0", "tensorboard": "2.20.0",
    "tensorboard-plugin-profile": "2.22.1", "typeguard": "4.4.0", "setuptools": "80.10.2",
}  # fmt: skip
MACHINE = Machine(
    python=(3, 11), packages=PACKAGES, cpu_flags=frozenset({"avx2"}), cores=4, memory_bytes=2**34,
    now=1.8e9, newest_file=1.7e9,
)  # fmt: skip


def machine(packages=None, gpus=(), **changes):
    """The healthy machine with some packages replaced (None removes one), GPUs by compute capability, and the rest."""
    merged = {**PACKAGES, **(packages or {})}
    cards = tuple(Gpu(f"card {c[0]}.{c[1]}", c) for c in gpus)
    return dataclasses.replace(MACHINE, packages=merged, gpus=cards, **changes)
