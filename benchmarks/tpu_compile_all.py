"""Compiles the whole training step with the TPU compiler for every kind of model and option, at tiny sizes.

  python benchmarks/tpu_compile_all.py                       to the end of memory planning, about 8 CPU seconds a case
  python benchmarks/tpu_compile_all.py --full --json=a.json  finished programs, a nightly job of an hour
  python benchmarks/tpu_compile_all.py pool remat            the cases whose names contain one of the words
  python benchmarks/tpu_compile_all.py --list                only say what there is

Prints a line a case and ends with 1 if any failed: a failure is a step that would not have started on a TPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.tpu import show
from vit_tpu.tpu.compiler import CompilerError
from vit_tpu.tpu.planner import Options, make_plans

CORES = 8
BASE: dict[str, Any] = {
    "model": {"variant": "Ti/4", "image_size": 32, "depth": 2, "width": 128, "mlp_dim": 256, "num_heads": 2,
              "pool": "map", "num_classes": 10},
    "data": {"source": "synthetic", "classes": 10},
    "optimizer": {"name": "adamw"},
    "training": {"steps": 100, "batch_size": 16},
    "precision": "mixed_bfloat16",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pool tok": {"model.pool": "tok"},
    "pool gap": {"model.pool": "gap"},
    "pool gap, norm after": {"model.pool": "gap", "model.norm_position": "after"},
    "posemb sincos2d": {"model.posemb": "sincos2d"},
    "registers": {"model.registers": 4, "model.pool": "tok"},
    "layer_scale": {"model.layer_scale": 1e-4},
    "dropout": {"model.dropout": 0.1},
    "drop_path": {"model.drop_path": 0.1},
    "representation_size": {"model.representation_size": 64, "model.pool": "tok"},
    "gelu erf": {"model.gelu": "erf"},
    "image not square": {"model.image_size": [32, 48]},
    "grey images": {"data.channels": 1},
    "remat block": {"model.remat": "block"},
    "remat block, drop_path": {"model.remat": "block", "model.drop_path": 0.1},
    "scan": {"model.scan": True},
    "scan, drop_path, layer_scale": {"model.scan": True, "model.drop_path": 0.1, "model.layer_scale": 0.1},
    "optimizer lamb": {"optimizer.name": "lamb", "optimizer.weight_decay": 0.1},
    "optimizer lamb, paper decay": {"optimizer.name": "lamb", "optimizer.decay_style": "paper"},
    "optimizer lamb, scan": {"optimizer.name": "lamb", "model.scan": True},
    "optimizer adafactor": {"optimizer.name": "adafactor", "optimizer.head_weight_decay": 3.0},
    "optimizer adafactor, scan": {"optimizer.name": "adafactor", "model.scan": True},
    "optimizer sgd": {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": True},
    "momentum bfloat16": {"optimizer.momentum_dtype": "bfloat16"},
    "layer_decay": {"optimizer.layer_decay": 0.75},
    "freeze": {"optimizer.freeze": ["embedding/*"]},
    "precision float32": {"precision": "float32"},
    "precision mixed_float16": {"precision": "mixed_float16"},
    "accumulation": {"training.accumulation_steps": 4},
    "accumulation, scan": {"training.accumulation_steps": 4, "model.scan": True},
    "no clipping": {"training.grad_clip_norm": None},
    "loss scale fixed": {"loss_scale.mode": "fixed"},
    "loss scale dynamic": {"loss_scale.mode": "dynamic"},
    "ema": {"training.ema": 0.999},
    "ema polyak": {"training.ema": "polyak"},
    "sigmoid loss": {"training.loss": "sigmoid"},
    "label smoothing": {"training.label_smoothing": 0.1},
    "mixup labels": {"data.mixup": 0.2},
    "schedule reciprocal_sqrt": {"schedule.name": "reciprocal_sqrt", "schedule.warmup": 10, "schedule.cooldown": 10},
    "check_numerics": {"training.check_numerics": True},
    "8 cores, replicas": {"mesh": "data=8", "training.batch_size": 128},
    "mesh data=8, state": {"mesh": "data=8", "shard": "state", "training.ema": 0.9},
    "mesh data=8, full": {"mesh": "data=8", "shard": "full", "optimizer.name": "adafactor"},
    "mesh data=4,model=2": {"mesh": "data=4,model=2", "optimizer.name": "lamb"},
    "mesh data=4,model=2, full, scan": {"mesh": "data=4,model=2", "shard": "full", "model.scan": True},
    "mesh data=4,model=2, full, remat, accumulation": {
        "mesh": "data=4,model=2", "shard": "full", "model.remat": "block", "training.accumulation_steps": 2,
    },
}  # fmt: skip


def config(changes: dict[str, Any]) -> Config:
    found = configs.from_dict(BASE)
    for key, value in changes.items():
        found = configs.replace(found, key, value)
    if found.mesh is not None:
        found = configs.replace(found, "training.batch_size", 128)
    return configs.validate(found)


def attempt(chip: str, changes: dict[str, Any], full: bool) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as cache:
            [plan] = make_plans(config(changes), [chip], options=Options(cycles=full, cache=cache))
    except Exception as error:  # whatever it is, the other cases run
        name = "" if isinstance(error, (CompilerError, UserError)) else f"{type(error).__name__}: "
        why = name + " ".join(str(error).split())[:300]
        return {"ok": False, "why": why, "seconds": time.perf_counter() - began}
    found = {"ok": True, "bytes": plan.memory.total, "seconds": time.perf_counter() - began}
    return found | ({"cycles": plan.cycles.total} if plan.cycles is not None else {})


def line(name: str, found: dict[str, Any]) -> str:
    what = show.gib(found["bytes"]) if found["ok"] else found["why"]
    if "cycles" in found:
        what += f", {found['cycles'] / 1e6:,.2f} M cycles"
    return f"{'ok  ' if found['ok'] else 'FAIL'} {name:<48} {found['seconds']:6.1f} s  {what}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--full", action="store_true", help="compile to the finished program")
    parser.add_argument("--chips", default="v3", help="v3 by default; several with commas")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--list", action="store_true", help="only print the names")
    given = parser.parse_args(arguments)
    names = [name for name in CASES if not given.words or any(word in name for word in given.words)]
    if not names:
        print(f"no case contains {' or '.join(given.words)}: --list prints all names", file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(names))
        return 0
    results: dict[str, dict[str, Any]] = {}
    for chip in given.chips.split(","):
        for name in names:
            results[f"{chip}: {name}"] = found = attempt(chip, CASES[name], given.full)
            print(line(f"{chip}: {name}", found), flush=True)
    failed = [name for name, found in results.items() if not found["ok"]]
    print(
        f"{len(results) - len(failed)} of {len(results)} compile" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(results, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
