"""A recipe beside a plain ViT of the same shape, length and cost: accuracy on data that neither was trained on.

  python benchmarks/recipe.py --data=DIR                               experiments/cifar10.yaml, three seeds each
  python benchmarks/recipe.py --data=DIR --epochs=20 --precision=mixed_bfloat16 --json=recipe.json

The baseline is what a typical tutorial has: class token, learnt positions, Adam at a constant rate of 1e-3, and neither
augmentation nor weight decay, clipping, label smoothing or averaging. Both are built by this package, see the same
number of images in batches of the same size and are judged once, after the last step, so nothing is chosen on the
validation data. The same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BASELINE_RATE = 1e-3


def plain(config):
    """Returns the baseline of equal cost: shape, images, batch and length of `config`, and nothing else of it."""
    from vit_tpu import settings

    t = config.training
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, pool="tok", posemb="learn", drop_path=0.0, dropout=0.0),
        data=settings.Data(source=config.data.source, path=config.data.path),
        optimizer=settings.Optimizer(name="adamw", learning_rate=BASELINE_RATE, weight_decay=0.0),
        schedule=settings.Schedule(name="constant"),
        training=settings.Training(
            batch_size=t.batch_size, epochs=t.epochs, steps=t.steps, grad_clip_norm=None, seed=t.seed,
            evaluate_every=t.evaluate_every,
        ),
    )  # fmt: skip


def measured(config, workdir):
    """Trains once, or reads what an earlier call has trained: the row of the table."""
    import tf_keras as keras

    import vit_tpu

    kept = pathlib.Path(workdir, "recipe.json")
    if kept.exists():
        return json.loads(kept.read_text())
    began = time.process_time()
    summary = vit_tpu.run(config, workdir)
    if summary.status != "done":
        raise SystemExit("stopped and saved: the same command goes on")
    row = {
        "accuracy": summary.validation["accuracy"], "loss": summary.validation["loss"],
        "train_loss": summary.train.get("loss"), "steps": summary.steps, "cpu_seconds": time.process_time() - began,
        "count": summary.validation["count"],
    }  # fmt: skip
    kept.write_text(json.dumps(row))
    keras.backend.clear_session()
    return row


def table(found) -> str:
    """Returns the measurements as Markdown: {"recipe": [a row a seed], "baseline": [...]}."""
    lines = ["| | accuracy, by seed | mean | smallest to largest | CPU s a run |", "|---|---|---|---|---|"]
    for name, rows in found.items():
        scores = [100 * row["accuracy"] for row in rows]
        seconds = sum(row["cpu_seconds"] for row in rows) / len(rows)
        lines.append(
            f"| {name} | {', '.join(f'{score:.1f}' for score in scores)} | **{sum(scores) / len(scores):.1f} %** "
            f"| {min(scores):.1f} to {max(scores):.1f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with train/<class>/* and test/<class>/*")
    parser.add_argument("--config", default="experiments/cifar10.yaml")
    parser.add_argument("--set", action="append", default=[], help="key=value of the recipe; may be repeated")
    parser.add_argument("--epochs", type=float, help="default: the recipe's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workdir", default="runs/recipe", help="a folder a run goes below it")
    parser.add_argument("--json", help="also write the numbers to this file")
    args = parser.parse_args()
    import tensorflow as tf

    import vit_tpu

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    overrides = [f"precision={args.precision}", *args.set]
    if args.data:
        overrides.append(f"data.path={args.data}")
    if args.epochs:
        overrides += [f"training.epochs={args.epochs:g}", "training.steps=null"]
    config = vit_tpu.load_config(args.config, overrides)
    once = f"{config.training.epochs:g} epochs" if config.training.epochs else config.training.steps
    found = {"recipe": [], "baseline": []}
    for seed in range(args.seeds):
        training = dataclasses.replace(config.training, seed=seed, evaluate_every=once)
        recipe = dataclasses.replace(config, training=training)
        for name, kind in (("recipe", recipe), ("baseline", plain(recipe))):
            found[name].append(measured(kind, os.path.join(args.workdir, f"{name}_{seed}")))
        print(f"\nafter {seed + 1} of {args.seeds} seeds\n{table(found)}\n", flush=True)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
