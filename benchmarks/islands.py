"""What the float32 islands buy: training under each policy, with each island taken away, and with each optimizer.

  python benchmarks/islands.py                                   the digits, 3 seeds: about eight CPU minutes
  python benchmarks/islands.py --data DIR --epochs 1 --seeds 2   a tree DIR/train/CLASS/IMAGE of small images
  python benchmarks/islands.py --seeds 1 --epochs 3 --only islands --json islands.json

Under a mixed policy a ViT computes attention logits and softmax, LayerNorm, GELU and the head in float32. This script
computes each of them in the policy's dtype instead (by patching vit_tpu.layers here; the package has no such switch)
and prints one table: validation accuracy over the seeds, skipped steps, and how far the logits of one trained model
are from those that float32 gives with the same weights. A second table shows inputs made to bring each island out.

Mixed policies are compiled by XLA (CPUs without bfloat16 units emulate it, and far slower without XLA), which is told
to round wherever the program rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import numpy as np
import tensorflow as tf
import tf_keras as keras

from vit_tpu import optim, precision
from vit_tpu.data import digits, folders, in_memory, pipeline
from vit_tpu.layers import attention, base, mlp, norm
from vit_tpu.models import vit
from vit_tpu.models.guard import NonFiniteError

ISLANDS = ("softmax", "LayerNorm", "GELU", "head")
HALF = {"mixed_bfloat16": tf.bfloat16, "mixed_float16": tf.float16}
OPTIMIZERS = {
    "adamw": lambda rate: optim.AdamW(rate(3e-3), weight_decay=0.05),
    "adafactor": lambda rate: optim.Adafactor(rate(3e-3), weight_decay=0.05),
    "lamb": lambda rate: optim.LAMB(rate(2e-2), weight_decay=0.05),
    # The head starts at zero: scaled by its own length it can only grow by a share of itself in each step.
    "lamb, head scaled": lambda rate: optim.LAMB(
        rate(2e-2), weight_decay=0.05, exclude_from_layer_adaptation=["bias", "norm*", "posemb"]
    ),
    "sgd": lambda rate: optim.SGD(rate(0.1), momentum=0.9, weight_decay=1e-3),
}


@contextlib.contextmanager
def without(islands, policy):
    """Inside the block these islands compute in the policy's dtype."""
    dtype = HALF.get(policy)
    places = {
        "softmax": [(attention, "probabilities", half_probabilities), (attention, "_wide_matmul", half_matmul)],
        "LayerNorm": [(norm, "layer_norm", half_layer_norm(dtype))],
        "GELU": [(mlp, "gelu", half_gelu)],
        "head": [(vit.Head, "forward", half_head(dtype))],
    }
    patched = [place for island in islands for place in places[island]]
    before = [getattr(owner, name) for owner, name, _ in patched]
    try:
        for owner, name, new in patched:
            setattr(owner, name, new)
        yield
    finally:
        for (owner, name, _), old in zip(patched, before):
            setattr(owner, name, old)


def half_probabilities(q, k):
    return tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * tf.cast(q.shape[-1] ** -0.5, q.dtype))


def half_matmul(a, b):
    return tf.cast(tf.matmul(a, b, transpose_b=True), tf.float32)


def half_layer_norm(dtype):
    def layer_norm(x, scale, bias, epsilon):
        x, scale, bias = (tf.cast(value, dtype) for value in (x, scale, bias))
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        return tf.cast(centred * tf.math.rsqrt(variance + tf.cast(epsilon, dtype)) * scale + bias, tf.float32)

    return layer_norm


def half_gelu(x, kind="tanh"):
    return mlp._gelu(x, kind)


def half_head(dtype):
    def forward(self, params, x):
        return tf.cast(base.dense(x, params["kernel"], params["bias"], dtype), tf.float32)

    return forward


def make_model(args, policy):
    with precision.scope(policy):
        return vit.ViT("Ti/16", pool="gap", **args.model)


def trained(args, policy, islands, name):
    """Trains one compiled model from each seed.

    Returns accuracies, skipped steps, the last weights, and a function from weights to logits of the validation images.
    """
    with without(islands, policy):
        model = make_model(args, policy)
        total = max(1, round(args.epochs * args.train.num_examples / args.batch))
        schedule = lambda peak: optim.schedules.Cosine(peak, total, warmup_steps=max(1, total // 20))  # noqa: E731
        model.compile(OPTIMIZERS[name](schedule), grad_clip_norm=1.0, jit_compile=policy in HALF)
        clean = [(v, v.numpy()) for v in [*model.optimizer.variables, *model.counters.variables]]
        accuracies, skipped, run = [], 0, compiled(model, policy)
        for seed in range(args.seeds):
            keras.utils.set_random_seed(seed)
            for parameter, fresh in zip(model.parameters(), make_model(args, "float32").parameters()):
                parameter.variable.assign(fresh.variable)
            for variable, value in clean:
                variable.assign(value)
            data = pipeline.train_pipeline(
                args.train, batch_size=args.batch, image_size=args.model["image_size"], seed=seed,
                channels=args.model["channels"],
            )  # fmt: skip
            with contextlib.suppress(NonFiniteError):  # the weights are then those before it
                model.fit(data, steps_per_epoch=total, verbose=0)
            skipped += int(model.counters.skipped.numpy())
            accuracies.append(100 * float(np.mean(logits_of(args, run).argmax(-1) == args.labels)))
        last = [p.variable.numpy() for p in model.parameters()]

        def logits_with(weights):
            for parameter, value in zip(model.parameters(), weights):
                parameter.variable.assign(value)
            return logits_of(args, run)

    return accuracies, skipped, last, logits_with


def compiled(model, policy):
    """Returns images -> logits, traced now, while the islands are as they shall be."""
    run = tf.function(lambda images: model(images, training=False), jit_compile=policy in HALF, autograph=False)
    size = [120, *model.image_size, model.channels]
    return run.get_concrete_function(tf.TensorSpec(size))


def logits_of(args, run):
    return np.concatenate([run(images).numpy() for images in args.images])[: len(args.labels)]


def rows_to_run(args):
    """(policy, islands taken away, optimizer), float32 first."""
    rows = [("float32", (), "adamw")]
    if args.only in ("all", "islands"):
        rows += [(p, i, "adamw") for p in HALF for i in [(), *((x,) for x in ISLANDS), ISLANDS]]
    if args.only in ("all", "optimizers"):
        rows += [(p, (), name) for name in OPTIMIZERS for p in precision.POLICIES if (p, (), name) not in rows]
    return rows


def made_cases():
    """Inputs made to bring out each island: (what, in float32, in bfloat16, in float16) as text."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 2, 197, 16)) for _ in range(2))
    logits = rng.normal(0, 3, (1, 29_593))
    exact = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[0, 0]
    x = np.linspace(-4, 4, 2001)
    wide = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    near, large = np.array([10.0, 10.02]), rng.normal(300, 1, (4, 64))
    normal = (large - large.mean(-1, keepdims=True)) / large.std(-1, keepdims=True)
    rows = []

    def case(what, function, form):
        rows.append([what, *(form.format(float(function(dtype))) for dtype in (tf.float32, tf.bfloat16, tf.float16))])

    def entropy(dtype):
        z = tf.cast(logits, dtype)
        return tf.abs(tf.cast(tf.reduce_logsumexp(z) - z[0, 0], tf.float64) - exact) / exact

    def row_sum(dtype):
        p = half_probabilities(tf.cast(6 * q, dtype), tf.cast(k, dtype))
        return tf.reduce_max(tf.abs(tf.reduce_sum(tf.cast(p, tf.float64), -1) - 1))

    def gelu(dtype):
        got = tf.cast(half_gelu(tf.cast(x, dtype)), tf.float64)
        return tf.reduce_max(tf.abs(got - wide))

    def layer_norm(dtype):
        got = half_layer_norm(dtype)(large, np.ones(64), np.zeros(64), 1e-6)
        return tf.reduce_max(tf.abs(tf.cast(got, tf.float64) - normal))

    case("softmax of 197 tokens, logits of std 6: a row sums to 1 +-", row_sum, "{:.1e}")
    case("LayerNorm of N(300, 1): largest error", layer_norm, "{:.2g}")
    case("LayerNorm of +-72,000: largest value (1 is right)", lambda d: tf.reduce_max(
        half_layer_norm(d)(np.array([[72e3, -72e3] * 4]), np.ones(8), np.zeros(8), 1e-6)), "{:.3g}")  # fmt: skip
    case("GELU on [-4, 4]: largest error", gelu, "{:.1e}")
    case("argmax of the logits 10.00 and 10.02 (1 is right)", lambda d: tf.argmax(tf.cast(near, d)), "{:.0f}")
    case("cross-entropy over 29,593 classes, logits of std 3: error as a share", entropy, "{:.1e}")
    return rows


def table(head, rows):
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    line = lambda row: "| " + " | ".join(str(cell).ljust(w) for cell, w in zip(row, widths)) + " |"  # noqa: E731
    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])


def prepare(args):
    """Sets the sources, the validation batches and the model's size."""
    if args.data is None:
        args.train, valid = digits.digits("train"), digits.digits("validation")
        size = {"image_size": 8, "patch_size": 2, "channels": 1}
    else:
        args.train, valid = (
            in_memory.load_into_memory(folders.from_folders(args.data, split), 32) for split in ("train", "validation")
        )
        size = {"image_size": 32, "patch_size": 8, "channels": 3}
    shape = {"width": args.width, "depth": args.depth, "mlp_dim": 4 * args.width, "num_heads": 4}
    args.model = {**size, **shape, "num_classes": args.train.num_classes}
    batches = pipeline.eval_pipeline(
        valid, batch_size=120, image_size=size["image_size"], channels=size["channels"]
    )  # fmt: skip
    args.images = [images for images, *_ in batches]
    args.labels = valid.labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="tree of class folders (default: the digits)")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--only", choices=("all", "islands", "optimizers", "made"), default="all")
    parser.add_argument("--json")
    args = parser.parse_args()
    began, found = time.process_time(), {"made": made_cases(), "rows": []}
    if args.only != "made":
        prepare(args)
        weights = exact = scale = None
        for policy, islands, name in rows_to_run(args):
            accuracies, skipped, last, logits_with = trained(args, policy, islands, name)
            if weights is None:
                weights = last  # of the last seed, in float32, for every row's logits
                exact = logits_with(weights)
                scale = float(np.abs(exact).max())
            error = float(np.abs(logits_with(weights) - exact).max())
            row = {
                "policy": policy, "without": list(islands), "optimizer": name, "accuracy": accuracies,
                "skipped": skipped, "logit_error": error, "largest_logit": scale,
            }  # fmt: skip
            found["rows"].append(row)
            print(f"[{time.process_time() - began:.0f} s] {json.dumps(row)}", flush=True)
    print("\n" + report(found))
    print(f"\n{time.process_time() - began:.0f} CPU seconds")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


def report(found):
    """Returns both tables as Markdown."""
    rows = []
    for row in found["rows"]:
        mean, spread = np.mean(row["accuracy"]), np.ptp(row["accuracy"])
        taken = "all four" if len(row["without"]) == len(ISLANDS) else ", ".join(row["without"]) or "none"
        error = "0" if row["logit_error"] == 0 else f"{100 * row['logit_error'] / row['largest_logit']:.2g} %"
        rows.append([row["policy"], taken, row["optimizer"], f"{mean:.1f} %", f"{spread:.1f}", row["skipped"], error])
    head = ["policy", "island in the policy's dtype", "optimizer", "accuracy", "spread", "skipped", "logit error"]
    made = table(["made input", "float32", "bfloat16", "float16"], found["made"])
    return (table(head, rows) + "\n\n" if rows else "") + made


if __name__ == "__main__":
    main()
