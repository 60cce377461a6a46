"""Compiles one training step of our ViT, of a plain tf_keras ViT and of tf-models-official's for a TPU, without a TPU.

  python benchmarks/tpu_step.py                            S/16, batch 64, v3: memory and estimated cycles
  python benchmarks/tpu_step.py --model=L/16 --depth=4     fewer blocks: all of L/16 takes minutes
  python benchmarks/tpu_step.py --memory                   memory alone, in seconds

The same shapes, GAP, Adam without decay or clipping, softmax loss over 1000 classes, bfloat16 arithmetic, state updated
in place. Figures are the compiler's: bytes are what it allocates, cycles are its estimate, not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

import tensorflow as tf
import tf_keras as keras

from vit_tpu import config as configs
from vit_tpu.models import variants
from vit_tpu.tpu import compiler, planner, report, topologies, trace

CLASSES = 1000


def plain_keras(shape: variants.Variant, erf: bool = False) -> keras.Model:
    """A ViT as people write it from Keras' own layers; `erf`: with the GELU that Keras means by "gelu"."""
    images = keras.Input([224, 224, 3])
    x = keras.layers.Conv2D(shape.width, shape.patch_size, shape.patch_size)(images)
    x = keras.layers.Reshape([-1, shape.width])(x)
    x = Positions()(x)
    for _ in range(shape.depth):
        y = keras.layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + keras.layers.MultiHeadAttention(shape.num_heads, shape.width // shape.num_heads)(y, y)
        y = keras.layers.LayerNormalization(epsilon=1e-6)(x)
        y = keras.layers.Dense(shape.mlp_dim)(y)
        y = keras.layers.Activation(lambda t: keras.activations.gelu(t, approximate=not erf))(y)
        x = x + keras.layers.Dense(shape.width)(y)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization(epsilon=1e-6)(x))
    return keras.Model(images, keras.layers.Dense(CLASSES, dtype="float32")(x))


class Positions(keras.layers.Layer):
    def build(self, shape):
        self.embedding = self.add_weight(name="posemb", shape=[1, *shape[1:]])

    def call(self, x):
        return x + tf.cast(self.embedding, x.dtype)


def official(shape: variants.Variant) -> keras.Model:
    """tf-models-official's ViT backbone with a classifier."""
    from official.vision.modeling.backbones import vit

    backbone = vit.VisionTransformer(
        mlp_dim=shape.mlp_dim,
        num_heads=shape.num_heads,
        num_layers=shape.depth,
        hidden_size=shape.width,
        patch_size=shape.patch_size,
        pooler="gap",
        representation_size=0,
        input_specs=keras.layers.InputSpec(shape=[None, 224, 224, 3]),
        original_init=False,
    )
    images = keras.Input([224, 224, 3])
    features = keras.layers.Reshape([shape.width])(backbone(images)["pre_logits"])
    return keras.Model(images, keras.layers.Dense(CLASSES, dtype="float32")(features))


def lowered(build, batch: int) -> tuple[bytes, list[dict]]:
    """Returns a Keras model's training step as HLO, and its arguments; no weight is allocated."""
    with tf.variable_creator_scope(trace.variable_creator):
        model = build()
        optimizer = keras.optimizers.Adam(1e-3, jit_compile=False)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(jit_compile=True, autograph=False)
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    specs = [tf.TensorSpec([batch, 224, 224, 3]), tf.TensorSpec([batch], tf.int32)]
    function = step.get_concrete_function(*specs)
    weights = {id(v.handle) for v in model.trainable_variables}
    by_handle = {id(v.handle): v for v in function.graph.variables}
    arguments = [{"name": "batch", "role": "batch", "shape": spec.shape.as_list()} for spec in specs]
    for captured in function.captured_inputs:
        variable = by_handle.get(id(captured))
        role = "other" if variable is None else "parameters" if id(captured) in weights else "optimizer"
        shape = (captured if variable is None else variable).shape.as_list()
        arguments.append({"name": getattr(variable, "name", ""), "role": role, "shape": shape})
    return step.experimental_get_compiler_ir(*specs)(stage="hlo_serialized"), arguments


def ours(args: argparse.Namespace, shape: variants.Variant) -> tuple[report.Memory, report.Cycles | None]:
    config = configs.from_dict(
        {
            "model": {"variant": args.model, "depth": shape.depth, "pool": "gap", "num_classes": CLASSES},
            "data": {"source": "synthetic"},
            "training": {"steps": 1000, "grad_clip_norm": None},
            "precision": "mixed_bfloat16",
        }
    )
    plan = planner.make_plan(config, args.chip, batch_per_core=args.batch, cycles=not args.memory, limit=args.limit)
    return plan.memory, plan.cycles


def peer(build, args: argparse.Namespace, flops: int) -> tuple[report.Memory, report.Cycles | None]:
    chip = topologies.chip(args.chip)
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        hlo, arguments = lowered(build, args.batch)
    finally:
        keras.mixed_precision.set_global_policy(before)
    compiled = compiler.compile_hlo(hlo, chip, stage="memory" if args.memory else "cycles", limit=args.limit)
    cycles = report.cycles(compiled, chip, args.batch, flops) if compiled.finished else None
    return report.memory(compiled, arguments, chip), cycles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--chip", default="v3")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--only", default="ours,tf_keras tanh,tf_keras erf,tf-models-official")
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    shape = variants.variant(args.model)
    shape = dataclasses.replace(shape, depth=args.depth or shape.depth)
    flops = variants.flops(shape, image_size=224, num_classes=CLASSES, pool="gap")
    steps = {
        "ours": lambda: ours(args, shape),
        "tf_keras tanh": lambda: peer(lambda: plain_keras(shape), args, flops),
        "tf_keras erf": lambda: peer(lambda: plain_keras(shape, erf=True), args, flops),
        "tf-models-official": lambda: peer(lambda: official(shape), args, flops),
    }
    where = f"one {args.chip} core; libtpu {compiler.version()}; compiler estimate, not measured"
    print(f"{args.model}, {shape.depth} blocks, {args.batch} images on {where}")
    print(f"{'':22}{'HBM MiB':>9}{'state':>8}{'temporary':>11}{'Mcycles':>10}{'ms':>8}{'MFU':>8}")
    rows = {}
    for name in args.only.split(","):
        memory, cycles = steps[name]()
        state = sum(memory.parts[part] for part in ("parameters", "optimizer", "batch")) / 2**20
        row = f"{name:22}{memory.total / 2**20:9,.0f}{state:8,.0f}{memory.total / 2**20 - state:11,.0f}"
        if cycles:
            row += f"{cycles.total / 1e6:10.1f}{1e3 * cycles.seconds:8.1f}{100 * cycles.mfu:7.1f}%"
        print(row, flush=True)
        rows[name] = {"memory": memory.parts, "total": memory.total, "cycles": cycles and dataclasses.asdict(cycles)}
    if args.json:
        with open(args.json, "w") as file:
            where = {"model": args.model, "depth": shape.depth, "batch": args.batch, "chip": args.chip}
            json.dump({**where, "libtpu": compiler.version(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
