"""Kills a run again and again and shows that nothing was lost.

A small ViT trains on the embedded digits in a process of its own, which is killed (kill -9, or SIGTERM) at random
moments, some of them while a checkpoint is being written, and started again with the same command until it is done.
Then the whole state (weights, averages, optimizer, loss scale, counters) has to be equal, bit for bit, to that of a
run nobody disturbed, and the examples that were trained on, as the pipeline handed them out, have to be each example
once an epoch.

  python benchmarks/kill_test.py
      25 times kill -9
  python benchmarks/kill_test.py --signal=TERM --kills=5 --accumulation=4 --steps_per_execution=16 --ema --loss_scale
  python benchmarks/kill_test.py --kills=5 --replicas=2
  python benchmarks/kill_test.py --matrix --json=kills.json
      a few kills under each of several settings
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

MATRIX: tuple[dict[str, Any], ...] = (
    {"steps_per_execution": 1},
    {"steps_per_execution": 3, "accumulation": 4},
    {"steps_per_execution": 16, "signal": "TERM"},
    {"ema": True, "loss_scale": True},
    {"replicas": 2, "signal": "TERM"},
    {"replicas": 2, "accumulation": 4, "ema": True, "loss_scale": True},
)


def main() -> int:
    options = _options()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Read in once, here; every life is a fork of this process, which itself never computes.
    import vit_tpu.training.run  # noqa: F401

    results = []
    for changes in MATRIX if options.matrix else ({},):
        settings = {**vars(options), **changes}
        print(f"\n== {json.dumps(changes) if changes else 'default settings'}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results.append({**changes, **kill_test(settings, pathlib.Path(options.keep or folder))})
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    good = all(result["equal"] and result["once_an_epoch"] for result in results)
    print("\nnothing was lost" if good else "\nFAILED: see above")
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--signal", choices=("KILL", "TERM", "INT"), default="KILL")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint_every", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps_per_execution", type=int, default=3)
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--loss_scale", action="store_true")
    parser.add_argument("--replicas", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--writing", type=float, default=0.6, help="share of the kills that wait for a write to begin")
    parser.add_argument("--matrix", action="store_true", help="all the settings of MATRIX, one after the other")
    parser.add_argument("--keep", help="folder for the runs, kept")
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args()


def kill_test(settings: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Returns {"kills", "lives", "equal", "once_an_epoch", ...} of one undisturbed and one killed run."""
    dice = random.Random(settings["seed"])
    whole, cut = folder / "whole", folder / "cut"
    began = time.perf_counter()
    code = _wait(_start(settings, whole))
    if code:
        raise SystemExit(f"the undisturbed run ended with code {code}: {_log(whole)}")
    first = json.loads(pathlib.Path(f"{whole}.life-0").read_text().splitlines()[-1])
    seconds = max(first["seconds"], 0.1)  # shared out among the kills, so that most of them happen before the end
    print(f"undisturbed: {first['steps']} steps, {seconds:.1f} s of training", flush=True)
    kills, writing, life, codes, hit = 0, 0, 0, [], False
    while True:
        process = _start(settings, cut)
        if kills >= settings["kills"]:
            code = _wait(process)
        else:
            # One in four may come as early as the compilation, the others once this life has saved something.
            saved = _steps(cut) if dice.random() > 0.25 else None
            while _alive(process) and not (_training(cut, life) and _steps(cut) != saved):
                time.sleep(0.01)
            time.sleep(dice.uniform(0, 1.2 * seconds / settings["kills"]))
            hit = dice.random() < settings["writing"] and _wait_for_write(process, cut)
            if _alive(process):
                os.kill(process, getattr(signal, f"SIG{settings['signal']}"))
                kills, writing = kills + 1, writing + hit
            code = _wait(process)
        codes.append(code)
        life += 1
        note = ", while writing" if code and hit else ""
        print(f"life {life:2d}: exit code {code:3d}, checkpoints {_steps(cut)[-3:]}{note}", flush=True)
        if code not in (0, 75, -9):
            raise SystemExit(f"life {life} ended with code {code}: {_log(cut)}")
        if code == 0:
            break
        hit = False
    different = _different(whole, cut)
    order = _order(cut, life, settings)
    print(
        f"{kills} kills ({writing} while a checkpoint was being written), {life} lives, "
        f"{time.perf_counter() - began:.0f} s; "
        f"state: {'equal, bit for bit' if not different else f'DIFFERENT in {different[:5]}'}; "
        f"examples: {order['text']}",
        flush=True,
    )
    return {
        "kills": kills, "while_writing": writing, "lives": life, "codes": codes, "equal": not different,
        "once_an_epoch": order["good"], "examples": order["text"],
    }  # fmt: skip


def _start(settings: dict[str, Any], workdir: pathlib.Path) -> int:
    """Starts one life of the run and returns its process."""
    workdir.parent.mkdir(parents=True, exist_ok=True)
    keys = ("steps", "checkpoint_every", "accumulation", "steps_per_execution", "ema", "loss_scale", "replicas")
    process = os.fork()
    if process:
        return process
    log = os.open(f"{workdir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        code = _live({key: settings[key] for key in keys} | {"workdir": str(workdir)})
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _alive(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _wait(process: int) -> int:
    """Returns the exit code, minus the signal if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _live(told: dict[str, Any]) -> int:
    """One life of a run: `vit_tpu.run`, with a note of every example that the pipeline hands out."""
    import tensorflow as tf

    if told["replicas"] > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * told["replicas"])
    import numpy as np

    import vit_tpu
    from vit_tpu.training import inputs

    workdir = pathlib.Path(told["workdir"])
    life = len(list(workdir.parent.glob(f"{workdir.name}.life-*")))
    notes = open(f"{workdir}.life-{life}", "w")  # noqa: SIM115
    original = inputs.train_data

    def watched(config: Any, source: Any, start: int, broken: Any, *hosts: int) -> Any:
        known = {image.tobytes(): number for number, image in enumerate(_pixels(source))}
        if len(known) != source.num_examples:
            raise SystemExit("two examples are alike: they cannot be told apart")
        notes.write(json.dumps({"start": start, "examples": source.num_examples}) + "\n")

        def note(images: Any) -> Any:
            pixels = np.rint((images + 1.0) * 127.5).astype(np.uint8)
            notes.write(json.dumps([known[image.tobytes()] for image in pixels]) + "\n")
            notes.flush()
            return images

        def through(images: Any, *rest: Any) -> Any:
            seen = tf.numpy_function(note, [images], tf.float32)
            seen.set_shape(images.shape)
            return (seen, *rest)

        return original(config, source, start, broken, *hosts).map(through)

    inputs.train_data = watched
    config = vit_tpu.load_config(
        None,
        {
            "width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 2, "mixup": 0.0, "training.epochs": None,
            "training.steps": told["steps"], "batch_size": 32, "accumulation_steps": told["accumulation"],
            "training.ema": 0.98 if told["ema"] else None, "evaluate_ema": told["ema"],
            "loss_scale.mode": "dynamic" if told["loss_scale"] else "off", "loss_scale.growth_steps": 40,
            "steps_per_execution": told["steps_per_execution"], "checkpoint_every": told["checkpoint_every"],
            "evaluate_every": max(told["steps"] // 4, 1), "log_every": max(told["steps"] // 20, 1),
            "dropout": 0.1, "strategy": "mirrored" if told["replicas"] > 1 else "cpu",
        },
    )  # fmt: skip
    result = vit_tpu.run(config, workdir)
    seconds = result.steps * 32 / result.images_per_second if result.images_per_second else 0.0
    notes.write(json.dumps({"steps": result.steps, "seconds": seconds}) + "\n")
    notes.close()
    return 75 if result.status == "interrupted" else 0


def _pixels(source: Any) -> Any:
    """Returns the images as the pipeline hands them out: resized to their own size, uint8."""
    import tensorflow as tf

    return source.get(tf.range(source.num_examples, dtype=tf.int64))["image"].numpy()


def _training(workdir: pathlib.Path, life: int) -> bool:
    """Whether the life has handed out its first batches, that is, trains or compiles."""
    path = pathlib.Path(f"{workdir}.life-{life}")
    return path.exists() and path.read_text().count("\n") > 2


def _wait_for_write(process: int, workdir: pathlib.Path) -> bool:
    """Waits until a checkpoint is being written; False if none is within two seconds."""
    until = time.perf_counter() + 2
    while time.perf_counter() < until and _alive(process):
        if any((workdir / "checkpoints").glob(".*.tmp")):
            return True
    return False


def _steps(workdir: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*") if p.name.isdigit())


def _different(whole: pathlib.Path, cut: pathlib.Path) -> list[str]:
    """Returns the names of the arrays that differ in a bit between the last checkpoints of two runs."""
    from vit_tpu.training import state
    from vit_tpu.training.checkpoints import read

    runs = []
    for workdir in (whole, cut):
        found = state.newest(workdir / "checkpoints")
        if found is None:
            return ["no checkpoint"]
        runs.append({name: (array.tobytes(), dtype) for name, array, dtype in read(*found)})
    return sorted(name for name in runs[0].keys() | runs[1].keys() if runs[0].get(name) != runs[1].get(name))


def _order(cut: pathlib.Path, lives: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Puts together what each step was trained on: of each life the batches up to where the next life began."""
    steps: dict[int, list[int]] = {}
    examples = 1
    for life in range(lives):
        head, *lines = pathlib.Path(f"{cut}.life-{life}").read_text().splitlines() or ["{}"]
        start = json.loads(head).get("start", 0)
        examples = json.loads(head).get("examples", examples)
        for number, line in enumerate(lines):
            if line.startswith("[") and line.endswith("]"):
                steps[start + number] = json.loads(line)  # a later life takes the place of an earlier one's
    stream = [number for step in range(settings["steps"]) for number in steps.get(step, [])]
    epochs = [stream[i : i + examples] for i in range(0, len(stream), examples)]
    full = [epoch for epoch in epochs if len(epoch) == examples]
    good = (
        len(stream) == settings["steps"] * 32 and all(len(set(epoch)) == len(epoch) for epoch in epochs) and bool(full)
    )
    return {
        "good": good,
        "text": f"{len(stream):,} over {len(stream) / examples:.1f} epochs of {examples:,}, "
        f"{'each once an epoch' if good else 'NOT each once an epoch'}",
    }


def _log(workdir: pathlib.Path) -> str:
    return "\n".join(pathlib.Path(f"{workdir}.log").read_text().splitlines()[-25:])


if __name__ == "__main__":
    sys.exit(main())
