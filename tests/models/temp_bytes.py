"""Compiles gradient steps with XLA for the CPU and prints the temporary memory of each as JSON; run as a script.

    python temp_bytes.py FOLDER

The CPU compiler expands optimization barriers before its last common-subexpression pass, which then merges
what the barrier kept apart: by default `remat="block"` saves nothing on a CPU. The TPU compiler keeps barriers
to the end; disabling the early expansion makes the CPU compiler do the same, so that it can be measured here.
"""

import json
import os
import pathlib
import re
import sys

MODES = {"none": {}, "block": {"remat": "block"}, "no_barrier": {"remat": "block"}, "scan": {"scan": True}}


def main(folder):
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_disable_hlo_passes=cse_barrier_expander"
    os.environ.update(XLA_FLAGS=flags, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    import tensorflow as tf

    from vit_tpu.layers import target
    from vit_tpu.models.vit import ViT

    sizes = {}
    barrier = target.barrier
    size = {"width": 16, "depth": 4, "mlp_dim": 64, "num_heads": 2, "image_size": 64, "num_classes": 10}
    for mode, options in MODES.items():
        target.barrier = list if mode == "no_barrier" else barrier
        model = ViT("Ti/4", pool="gap", **size, **options)
        variables = [p.variable for p in model.parameters()]

        def gradients(images, model=model, variables=variables):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(images, training=True) ** 2)
            return tape.gradient(loss, variables)

        gradients.__name__ = f"gradients_{mode}"
        tf.function(gradients, jit_compile=True, autograph=False)(tf.zeros([4, 64, 64, 3]))
        sizes[mode] = temp_bytes(pathlib.Path(folder), gradients.__name__)
    print(json.dumps(sizes))


def temp_bytes(folder, name):
    """Returns the size of the temporary allocation of the dumped module with this name in it."""
    (path,) = folder.glob(f"*_{name}_*buffer-assignment.txt")
    return sum(
        int(size) for size in re.findall(r"^allocation \d+: size (\d+), preallocated-temp", path.read_text(), re.M)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
