"""What a checkpoint in the background costs: slower steps while it is written, and host memory.

Trains a ViT of about 300 M parameters (24 blocks of width 1024; few patches, so that a CPU can) with AdamW, and takes
turns: some steps alone, then steps while a checkpoint is written. Prints the median step of both kinds, the time of
the copy and of the writing, and the peaks of resident memory in both kinds of turn.

On a CPU this is the worst case: the steps use the cores and the memory that the writer needs, too. `--threads=1` on a
machine with two cores leaves it one, as the host of an accelerator would.

  python benchmarks/checkpoint_cost.py
  python benchmarks/checkpoint_cost.py --depth=4 --turns=2 --json=cost.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps alone in each turn")
    parser.add_argument("--threads", type=int, default=0, help="of TensorFlow; 0: all cores")
    parser.add_argument("--folder", help="where to write; a temporary folder if not given")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    result = measure(options)
    for name, value in result.items():
        print(f"  {name:<40} {value:,.3f}" if isinstance(value, float) else f"  {name:<40} {value:,}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures as a flat dict."""
    import numpy as np
    import tensorflow as tf

    import vit_tpu
    from vit_tpu.training import checkpoints, state
    from vit_tpu.training.background import Background

    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    model = vit_tpu.ViT(
        "L/16", image_size=32, num_classes=10, pool="gap", depth=options.depth, width=options.width,
        mlp_dim=4 * options.width, num_heads=16,
    )  # fmt: skip
    model.compile(vit_tpu.optim.AdamW(1e-4), grad_clip_norm=1.0)
    parameters = sum(int(np.prod(p.variable.shape)) for p in model.parameters())
    images = tf.random.uniform([options.batch_size, 32, 32, 3])
    labels = tf.zeros([options.batch_size], tf.int32)

    @tf.function
    def step() -> None:
        model.train_step((images, labels))

    def timed() -> float:
        before = time.perf_counter()
        step()
        return time.perf_counter() - before

    for _ in range(3):
        timed()
    alone: list[float] = []
    beside: list[float] = []
    copies: list[float] = []
    writes: list[float] = []
    peaks: dict[str, list[float]] = {"alone": [], "beside": []}
    held: dict[str, list[float]] = {"alone": [], "beside": []}
    size = sum(array.nbytes for array, _ in state.snapshot(model).values())
    writer = Background()
    with _folder(options.folder) as folder:
        for turn in range(options.turns):
            _forget_peak()
            alone += [timed() for _ in range(options.steps)]
            peaks["alone"].append(_memory("VmHWM"))
            held["alone"].append(_memory("VmRSS"))
            _forget_peak()
            before = time.perf_counter()
            arrays = state.snapshot(model)
            copies.append(time.perf_counter() - before)
            done: list[float] = []
            writer.submit(_job(checkpoints.write, folder, turn, arrays, done))
            del arrays
            while writer.busy():
                beside.append(timed())
                held["beside"].append(_memory("VmRSS"))
            writer.wait()
            writes.append(done[0] - before)
            peaks["beside"].append(_memory("VmHWM"))
            shutil.rmtree(folder, ignore_errors=True)
    slow = statistics.median(beside) / statistics.median(alone) - 1
    return {
        "parameters": parameters, "state GiB": size / 2**30,
        "step alone s (median)": statistics.median(alone), "step alone s (fastest)": min(alone),
        "step while writing s (median)": statistics.median(beside), "step while writing s (fastest)": min(beside),
        "steps while writing": len(beside), "slowdown while writing %": 100 * slow,
        "training waits for the copy s": statistics.median(copies), "writing s": statistics.median(writes),
        "peak GiB, steps alone": peaks["alone"][0] / 2**30, "peak GiB, while writing": max(peaks["beside"]) / 2**30,
        "extra copies of the state, at the peak": (max(peaks["beside"]) - peaks["alone"][0]) / size,
        "extra copies, between two steps": (max(held["beside"]) - held["alone"][0]) / size,
    }  # fmt: skip


def _job(write: Any, folder: str, turn: int, arrays: dict[str, Any], done: list[float]) -> Any:
    def job(abandoned: Any) -> None:
        write(folder, turn, arrays, {}, abandoned)
        arrays.clear()
        done.append(time.perf_counter())

    return job


@contextlib.contextmanager
def _folder(wanted: str | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=wanted) as place:
        yield f"{place}/checkpoints"


def _forget_peak() -> None:
    """Starts the kernel's record of peak resident memory anew (Linux)."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    """Returns the peak (VmHWM) or the present (VmRSS) resident memory in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
