"""One table of what a step costs under each choice: precision, XLA, steps per execution, optimizer.

  python benchmarks/policies.py                     on the devices of this machine: about two CPU minutes
  python benchmarks/policies.py --width=384 --depth=12 --image=224 --patch=16 --batch=32 --json=policies.json

One model from the same weights on the same made-up images, trained --steps steps in each row. Step times are medians
over executions, divided by their steps, in CPU seconds of the process and in wall seconds; "first" is the wall time of
the first execution, which traces and compiles. Bytes are what XLA allocates for temporary values in the compiled step
(without XLA nobody knows beforehand). The loss shows that the rows train alike. A row changes one thing of the first.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import statistics
import tempfile
import time

DUMP = tempfile.mkdtemp(prefix="policies_")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP} --xla_dump_hlo_as_text"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

FIRST = {"precision": "float32", "jit": False, "per_execution": 1, "optimizer": "adamw"}
ROWS = [
    {},
    {"jit": True},
    {"precision": "mixed_bfloat16"},
    {"precision": "mixed_bfloat16", "jit": True},
    {"precision": "mixed_float16"},
    {"precision": "mixed_float16", "jit": True},
    {"per_execution": 10},
    {"per_execution": 50},
    {"optimizer": "lamb"},
    {"optimizer": "adafactor"},
]
RATES = {"adamw": 1e-3, "lamb": 5e-3, "adafactor": 1e-3}


def images(args):
    """Classes that differ in colour, so that there is something to learn."""
    import numpy as np

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, args.batch * 8)
    pixels = rng.normal(0, 1, (len(labels), args.image, args.image, 3)) + rng.normal(0, 1, (10, 1, 1, 3))[labels]
    return pixels.astype(np.float32), labels.astype(np.int32)


def measure(args, change):
    """Trains one row; returns its figures."""
    import tensorflow as tf
    import tf_keras as keras

    import vit_tpu

    row = FIRST | change
    keras.utils.set_random_seed(0)
    with vit_tpu.precision(row["precision"]):
        model = vit_tpu.ViT(
            "S/16", image_size=args.image, patch_size=args.patch, width=args.width, depth=args.depth,
            mlp_dim=4 * args.width, num_heads=args.heads, num_classes=10, pool="gap",
        )  # fmt: skip
        model.compile(
            vit_tpu.optim.build(row["optimizer"], RATES[row["optimizer"]], weight_decay=0.05), grad_clip_norm=1.0,
            steps_per_execution=row["per_execution"], jit_compile=row["jit"],
        )  # fmt: skip
        data = iter(tf.data.Dataset.from_tensor_slices(images(args)).repeat().batch(args.batch, drop_remainder=True))
        step, before, taken, times = model.make_train_function(), dumped(), 0, []
        while taken < args.steps:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = float(step(data)["loss"])
            taken += row["per_execution"]
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
        final = loss
        if len(times) == 1:  # all steps were the first execution: time another one
            wall, cpu = time.perf_counter(), time.process_time()
            step(data)
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
    later = times[1:]
    each = row["per_execution"]
    return row | {
        "cpu_ms": 1e3 * statistics.median(t[0] for t in later) / each,
        "wall_ms": 1e3 * statistics.median(t[1] for t in later) / each,
        "first_s": times[0][1],
        "temp_bytes": largest(dumped() - before) if row["jit"] else None,
        "loss": final,
    }


def dumped():
    return set(glob.glob(f"{DUMP}/*buffer-assignment.txt"))


def largest(files):
    """Returns the bytes of the largest temporary allocation in XLA's reports: the training step's."""
    sizes = [0]
    for file in files:
        with open(file) as report:
            found = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", report.read(), re.MULTILINE)
        sizes.append(sum(map(int, found)))
    return max(sizes)


def table(rows):
    """Returns the figures as Markdown."""
    lines = [
        "| precision | XLA | steps per execution | optimizer | CPU ms a step | wall ms a step | first, s "
        "| temporary MiB | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = f"{row['temp_bytes'] / 2**20:.1f}" if row["temp_bytes"] else "-"
        lines.append(
            f"| {row['precision']} | {'on' if row['jit'] else 'off'} | {row['per_execution']} | {row['optimizer']} "
            f"| {row['cpu_ms']:.1f} | {row['wall_ms']:.1f} | {row['first_s']:.1f} | {memory} | {row['loss']:.3f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50, help="in each row; a multiple of 50 gives all rows as many")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only the first so many")
    parser.add_argument("--threads", type=int, default=0, help="of TensorFlow; 0: its own choice")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    import tensorflow as tf

    if args.threads:
        tf.config.threading.set_intra_op_parallelism_threads(args.threads)
        tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    devices = [d.name for d in tf.config.list_physical_devices() if d.device_type != "CPU"] or ["CPU"]
    rows = []
    for change in ROWS[: args.rows]:
        rows.append(measure(args, change))
        print(json.dumps(rows[-1]), flush=True)
    print(
        f"\nViT of width {args.width}, {args.depth} blocks, {(args.image // args.patch) ** 2} tokens, batch "
        f"{args.batch}, {args.steps} steps, on {', '.join(devices)}, TensorFlow {tf.__version__}\n\n{table(rows)}"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "devices": devices, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
