"""Times one training step of our ViT beside a plain tf_keras ViT and tf-models-official's, in one process.

  python benchmarks/step.py                      S/16, batch 8, float32, depth 3: about three minutes
  python benchmarks/step.py --depth 12 --json step.json

The same shapes, AdamW, softmax loss and GAP for all; steps are taken in turn (A B C A B C ...), so that a drifting
machine slows all alike. Figures are CPU seconds of the process per step (what the step costs) and wall seconds (what
one waits), as medians; "share of GEMM" is the model's FLOPs over what a float32 matrix product reaches on the same
threads in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf
import tf_keras as keras


class Positions(keras.layers.Layer):
    """Learnt position embedding."""

    def build(self, shape):
        self.table = self.add_weight("table", [1, *shape[1:]], initializer="random_normal")

    def call(self, x):
        return x + self.table


def plain_keras(args):
    """A ViT as people write it from Keras' own layers."""
    width, heads = 384, 6
    images = keras.Input([args.image, args.image, 3])
    x = keras.layers.Conv2D(width, 16, 16)(images)
    x = keras.layers.Reshape([-1, width])(x)
    x = Positions()(x)
    for _ in range(args.depth):
        y = keras.layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y)
        y = keras.layers.LayerNormalization(epsilon=1e-6)(x)
        y = keras.layers.Dense(4 * width, activation=lambda t: keras.activations.gelu(t, approximate=True))(y)
        x = x + keras.layers.Dense(width)(y)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization(epsilon=1e-6)(x))
    model = keras.Model(images, keras.layers.Dense(1000, dtype="float32")(x))
    model.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-4, global_clipnorm=1.0), _loss(), jit_compile=args.jit)
    return model


def official(args):
    """tf-models-official's ViT backbone with a classifier."""
    from official.vision.modeling.backbones import vit

    backbone = vit.VisionTransformer(
        mlp_dim=1536,
        num_heads=6,
        num_layers=args.depth,
        hidden_size=384,
        patch_size=16,
        pooler="gap",
        representation_size=0,
        input_specs=keras.layers.InputSpec(shape=[None, args.image, args.image, 3]),
        original_init=False,
    )
    images = keras.Input([args.image, args.image, 3])
    features = keras.layers.Reshape([384])(backbone(images)["pre_logits"])
    model = keras.Model(images, keras.layers.Dense(1000, dtype="float32")(features))
    model.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-4, global_clipnorm=1.0), _loss(), jit_compile=args.jit)
    return model


def ours(args):
    import vit_tpu

    model = vit_tpu.ViT("S/16", image_size=args.image, num_classes=1000, pool="gap", depth=args.depth)
    model.compile(vit_tpu.optim.AdamW(1e-3, weight_decay=1e-4), grad_clip_norm=1.0, jit_compile=args.jit)
    return model


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def gemm(seconds: float = 1.0) -> tuple[float, float]:
    """Returns FLOP per wall second and per CPU second of a float32 2048^3 product in NumPy."""
    a = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    a @ a
    best_wall = best_cpu = float("inf")
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        wall, cpu = time.perf_counter(), time.process_time()
        a @ a
        best_wall, best_cpu = min(best_wall, time.perf_counter() - wall), min(best_cpu, time.process_time() - cpu)
    return 2 * 2048**3 / best_wall, 2 * 2048**3 / best_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--jit", choices=("off", "on", "both"), default="both")
    parser.add_argument("--only", default="ours,plain tf_keras,tf-models-official")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    keras.mixed_precision.set_global_policy(args.precision)
    builders = {"ours": ours, "plain tf_keras": plain_keras, "tf-models-official": official}
    builders = {name: builder for name, builder in builders.items() if name in args.only.split(",")}
    images = np.random.default_rng(0).uniform(-1, 1, (args.batch, args.image, args.image, 3)).astype(np.float32)
    labels = np.arange(args.batch, dtype=np.int32)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    import dataclasses

    from vit_tpu.models import flops, variant

    shape = dataclasses.replace(variant("S/16"), depth=args.depth)
    work = 3 * args.batch * flops(shape, image_size=args.image, num_classes=1000, pool="gap")
    runners, times, first = {}, {}, {}
    for jit in {"off": [False], "on": [True], "both": [False, True]}[args.jit]:
        for name, builder in builders.items():
            args.jit = jit
            model, label = builder(args), f"{name}, {'XLA' if jit else 'no XLA'}"
            iterator, step = iter(data), model.make_train_function()
            started = time.perf_counter()
            step(iterator)
            first[label] = time.perf_counter() - started
            step(iterator)
            runners[label], times[label] = (step, iterator), []
    peaks = []
    for _ in range(args.rounds):
        peaks.append(gemm(0.5))
        for label, (step, iterator) in runners.items():
            wall, cpu = time.perf_counter(), time.process_time()
            logs = step(iterator)
            float(logs["loss"])
            times[label].append((time.process_time() - cpu, time.perf_counter() - wall))
    gemm_wall, gemm_cpu = max(p[0] for p in peaks), max(p[1] for p in peaks)
    print(
        f"S/16 depth {args.depth}, batch {args.batch}, {args.image} px, {args.precision}: "
        f"{work / 1e9:.1f} GFLOP a step; "
        f"GEMM {gemm_cpu / 1e9:.0f} GFLOP per CPU second, {gemm_wall / 1e9:.0f} per wall second"
    )
    print(f"{'':34}{'CPU s':>8}{'wall s':>8}{'of GEMM':>9}{'ratio to ours (CPU, same XLA)':>32}{'first step s':>14}")
    table = {}
    for label, taken in times.items():
        cpu, wall = statistics.median(t[0] for t in taken), statistics.median(t[1] for t in taken)
        table[label] = {
            "cpu_s": cpu,
            "wall_s": wall,
            "share_of_gemm": work / cpu / gemm_cpu,
            "first_step_s": first[label],
        }
    for label, row in table.items():
        reference = table.get(f"ours, {label.split(', ')[1]}")
        row["ratio"] = row["cpu_s"] / reference["cpu_s"] if reference else None
        ratio = f"{row['ratio']:.2f}" if reference else "-"
        print(
            f"{label:34}{row['cpu_s']:8.3f}{row['wall_s']:8.3f}{row['share_of_gemm']:9.2f}{ratio:>32}{row['first_step_s']:14.1f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "gemm_flops": [gemm_cpu, gemm_wall], "steps": table}, file, indent=1)


if __name__ == "__main__":
    main()
