"""What several devices bring, and what this package's step costs over a bare strategy loop, side by side in one run.

  python benchmarks/replicas.py                      two virtual devices on the CPU: about two minutes
  python benchmarks/replicas.py --devices 4 --json replicas.json

The bare loop is what TensorFlow's guide for custom training shows: `strategy.run` of forward, loss, gradient, sum over
replicas, clip and update, for the same model and optimizer. Our step adds the count of examples, the check that all is
finite, counters and metrics. The global batch is the same for all; steps are taken in turn (A B C D A B C D ...), so
that a busy machine slows all alike. Figures are medians of wall seconds and of the process's CPU seconds a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

import vit_tpu
from vit_tpu import devices, optim


def build(args: argparse.Namespace, strategy: tf.distribute.Strategy) -> vit_tpu.ViT:
    with strategy.scope():
        model = vit_tpu.ViT(
            "S/16", image_size=args.image, num_classes=100, pool="gap", depth=args.depth, width=args.width,
            mlp_dim=4 * args.width, num_heads=args.width // 64,
        )  # fmt: skip
        model.compile(optim.AdamW(1e-3, weight_decay=0.1), grad_clip_norm=1.0)
    return model


def ours(model: vit_tpu.ViT):
    return lambda images, labels: model.train_step((images, labels))["loss"]


def bare(model: vit_tpu.ViT):
    """The loop of TensorFlow's guide around the same model and optimizer."""
    variables = [p.variable for p in model.trained]

    def step(images, labels):
        context = tf.distribute.get_replica_context()
        count = context.num_replicas_in_sync
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model.call(images, training=True))
            loss = tf.reduce_mean(each) / count
        gradients = tape.gradient(loss, variables)
        if count > 1:
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        model.optimizer.apply_gradients(zip(gradients, variables), skip_gradients_aggregation=True)
        return loss

    return step


def compiled(step, strategy: tf.distribute.Strategy, batch):
    """Returns a function without arguments that takes one step and waits for it."""
    if strategy.num_replicas_in_sync == 1:
        run = tf.function(step, autograph=False)
        parts = batch
    else:
        run = tf.function(lambda *parts: strategy.run(step, args=parts), autograph=False)
        spread = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(batch))
        parts = next(iter(spread))

    def once() -> None:
        loss = run(*parts)
        strategy.experimental_local_results(loss)[0].numpy()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=96)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    here = devices.choose("mirrored", virtual=args.devices)
    images = tf.random.stateless_normal([args.batch, args.image, args.image, 3], [1, 2])
    batch = images, tf.range(args.batch) % 100
    runs = {}
    for name, strategy in (("1 device", tf.distribute.get_strategy()), (f"{args.devices} devices", here.strategy)):
        for kind, make in (("bare loop", bare), ("our step", ours)):
            runs[name, kind] = compiled(make(build(args, strategy)), strategy, batch)
    for run in runs.values():
        run()
        run()
    wall, cpu = {key: [] for key in runs}, {key: [] for key in runs}
    for number in range(args.steps):
        order = list(runs) if number % 2 else list(reversed(runs))
        for key in order:
            began, used = time.perf_counter(), time.process_time()
            runs[key]()
            wall[key].append(time.perf_counter() - began)
            cpu[key].append(time.process_time() - used)
    base = ("1 device", "our step")
    rows = []
    for key in runs:
        pair = (key[0], "bare loop")
        over = statistics.median(b / a for a, b in zip(cpu[pair], cpu[key])) - 1
        over_wall = statistics.median(b / a for a, b in zip(wall[pair], wall[key])) - 1
        speed = statistics.median(a / b for a, b in zip(wall[base], wall[key]))
        rows.append({
            "devices": key[0], "step": key[1], "wall_seconds": statistics.median(wall[key]),
            "cpu_seconds": statistics.median(cpu[key]), "overhead_cpu": over, "overhead_wall": over_wall,
            "throughput_against_one": speed,
        })  # fmt: skip
    print(
        f"batch {args.batch}, {args.image} pixels, {args.depth} blocks of width {args.width}, {args.steps} steps each"
    )
    print("| devices | step | wall s | CPU s | over the bare loop, CPU (wall) | images/s against one device |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['devices']} | {row['step']} | {row['wall_seconds']:.3f} | {row['cpu_seconds']:.3f} | "
            f"{100 * row['overhead_cpu']:+.1f} % ({100 * row['overhead_wall']:+.1f} %) | "
            f"{row['throughput_against_one']:.2f} |"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
