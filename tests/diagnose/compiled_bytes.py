"""Compiles tiny training steps with XLA for the CPU and prints what each needs, and the estimate; run as a script.

python compiled_bytes.py FOLDER
"""

import json
import os
import pathlib
import re
import sys

BASE = {
    "mixup": 0.0, "training.ema": None, "evaluate_ema": False, "data.source": "synthetic", "model.num_classes": 10,
    "model.image_size": 64, "patch_size": 4, "batch_size": 8, "width": 64, "depth": 2, "mlp_dim": 256, "num_heads": 2,
    "training.jit": True, "pool": "gap",
}  # fmt: skip
CASES = {
    "plain": {},
    "map, bfloat16": {"pool": "map", "precision": "mixed_bfloat16"},
    "tok, scan, micro-batches": {"pool": "tok", "model.scan": True, "training.accumulation_steps": 2},
}


def main(folder):
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*inference_step.*"
    flags += " --xla_backend_optimization_level=0"  # of machine code, which is not run
    os.environ.update(XLA_FLAGS=flags, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    import vit_tpu
    from vit_tpu.diagnose import memory
    from vit_tpu.tpu import trace

    found = {}
    for name, changes in CASES.items():
        config = vit_tpu.load_config(None, {**BASE, **changes})
        function, specs = trace.Step(config).function(config.training.batch_size, tpu=False)
        function.experimental_get_compiler_ir(*specs)(stage="optimized_hlo")
        (path,) = pathlib.Path(folder).glob("*buffer-assignment.txt")
        sizes = re.findall(r"^allocation \d+: size (\d+), (parameter|preallocated-temp)", path.read_text(), re.M)
        ours = memory.breakdown(config, channels=3, hardware="CPU")
        found[name] = {
            "arguments": sum(int(size) for size, kind in sizes if kind == "parameter"),
            "everything": sum(int(size) for size, _ in sizes),
            "state and batch": ours.state + ours.parts["batch"], "estimate": ours.total,
        }  # fmt: skip
        for old in pathlib.Path(folder).iterdir():
            old.unlink()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
