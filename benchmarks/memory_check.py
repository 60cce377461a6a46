"""Compares the analytic memory of a training step (`vit_tpu.diagnose.memory`) with what compilers allocate for it.

  python benchmarks/memory_check.py --json memory.json       Ti, S and B for a TPU v3: about eight CPU minutes
  python benchmarks/memory_check.py --on cpu                 XLA's CPU compiler: three blocks of Ti, about two minutes

Nothing is trained and no weight is allocated. TPU: libtpu's figures without padding, as `python -m vit_tpu.plan` has
them; "activations" are those alive at the moment that the compiler finds fullest, "everything" is all that it
allocates. CPU: XLA's arguments and temporary memory, which it does not divide.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import tempfile

COMMON = [
    "mixup=0", "training.ema=null", "evaluate_ema=false", "source=synthetic", "data.channels=3", "pool=gap",
    "model.num_classes=1000", "image_size=224", "width=null", "depth=null", "mlp_dim=null", "num_heads=null",
    "batch_size=64", "precision=mixed_bfloat16",
]  # fmt: skip
REMAT, SCAN, MICRO, PLAIN = "model.remat=block", "model.scan=true", "accumulation_steps=4", "precision=float32"
CASES = [
    "", "pool=map", "pool=tok", PLAIN, "precision=mixed_float16", REMAT, SCAN, MICRO, f"{MICRO} {REMAT}",
    f"{MICRO} {SCAN}", f"{PLAIN} {REMAT}", f"{PLAIN} {SCAN}", f"{PLAIN} {MICRO}", "optimizer.name=adafactor",
]  # fmt: skip
ON_CPU = ["model.variant=Ti/8", "image_size=96", "depth=3", "batch_size=16", "model.num_classes=10", "jit=true"]
CPU_CASES = [PLAIN, f"{PLAIN} pool=map", f"{PLAIN} pool=tok", f"{PLAIN} {SCAN}", f"{PLAIN} {REMAT}",
             f"{PLAIN} {MICRO}", "", "precision=mixed_float16"]  # fmt: skip


def on_tpu(settings: list[str], cache: str | None) -> dict:
    """Returns bytes that libtpu allocates on a v3 core, padding left out: state, activations, everything."""
    import vit_tpu
    from vit_tpu.tpu import compiler, report, topologies, trace

    config, chip = vit_tpu.load_config(None, settings), topologies.chip("v3")
    hlo, arguments = trace.Step(config).hlo(config.training.batch_size)
    compiled = compiler.compile_hlo(hlo, chip, replicas=1, stage="memory", limit=1800.0, cache=cache)
    found = report.memory(compiled, arguments, chip, config.training.accumulation_steps)
    state = sum(found.parts[name] for name in ("parameters", "optimizer", "ema"))
    return {
        "state": state, "activations": found.parts["activations"], "everything": found.total - found.parts["padding"],
        "padding": found.parts["padding"],
    }  # fmt: skip


def on_cpu(settings: list[str], folder: str) -> dict:
    """Returns bytes of XLA's CPU program: everything (arguments and temporary memory)."""
    import vit_tpu
    from vit_tpu.tpu import trace

    config = vit_tpu.load_config(None, settings)
    for path in pathlib.Path(folder).iterdir():
        path.unlink()
    function, specs = trace.Step(config).function(config.training.batch_size, tpu=False)
    function.experimental_get_compiler_ir(*specs)(stage="optimized_hlo")
    return allocated(next(pathlib.Path(folder).glob("*buffer-assignment.txt")).read_text())


def allocated(text: str) -> dict:
    """Returns the bytes of an XLA buffer assignment: arguments, temporary memory and both."""
    sizes = {}
    for name, kind in (("arguments", "parameter"), ("temporary", "preallocated-temp")):
        found = re.findall(rf"^allocation \d+: size (\d+), {kind}", text, re.M)
        sizes[name] = sum(map(int, found))
    return {**sizes, "everything": sum(sizes.values())}


def estimate(settings: list[str], hardware: str) -> dict:
    import vit_tpu
    from vit_tpu.diagnose import memory

    found = memory.breakdown(vit_tpu.load_config(None, settings), hardware=hardware)
    return {"state": found.state, "activations": found.parts["activations"], "everything": found.total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("tpu", "cpu"), default="tpu")
    parser.add_argument("--models", default="Ti/16,S/16,B/16")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--cache", help="folder of the TPU compiler's answers")
    args = parser.parse_args()
    dumps = tempfile.mkdtemp()
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", TF_ENABLE_ONEDNN_OPTS="0")
    if args.on == "cpu":
        only = "--xla_dump_hlo_module_re=.*inference_step.*"
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dumps} --xla_dump_hlo_as_text {only}"
        rows = [(f"Ti/8, 3 blocks {case}".strip(), [*COMMON, *ON_CPU, *case.split()]) for case in CPU_CASES]
    else:
        names = args.models.split(",")
        rows = [
            (f"{n} {case}".strip(), [*COMMON, f"model.variant={n}", *case.split()]) for case in CASES for n in names
        ]
    results = {}
    print("| step | activations, compiled | estimated | | everything, compiled | estimated | |\n" + "|---" * 7 + "|")
    for name, settings in rows:
        compiled = on_cpu(settings, dumps) if args.on == "cpu" else on_tpu(settings, args.cache)
        ours = estimate(settings, args.on.upper())
        if "state" in compiled:
            assert ours["state"] == compiled["state"], (name, ours, compiled)
        results[name] = {"compiled": compiled, "estimated": ours}
        cells = []
        for what in ("activations", "everything"):
            if what in compiled:
                off = ours[what] / compiled[what] - 1
                cells += [f"{compiled[what] / 2**20:,.0f} MiB", f"{ours[what] / 2**20:,.0f} MiB", f"{off:+.1%}"]
            else:
                cells += ["-", f"{ours[what] / 2**20:,.0f} MiB", ""]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
