"""Trains two steps, then runs out of memory; run as a script: python limited_run.py FOLDER [--jit].

The address space of the process is limited to a little more than it has, so that nothing else on the machine suffers.
"""

import os
import resource
import sys

TINY = [
    "--set", "model.width=16", "--set", "model.depth=1", "--set", "model.mlp_dim=32", "--set", "model.num_heads=2",
    "--set", "training.ema=null", "--set", "training.evaluate_ema=false", "--set", "data.mixup=0",
    "--set", "training.checkpoint_every=2", "--set", "model.patch_size=1", "--image_size=16", "--allow_config_change",
]  # fmt: skip


def main(folder, *flags):
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    from vit_tpu import command, train

    common = [*TINY, f"--workdir={folder}", *flags]
    code = train.main([*common, "--steps=2", "--batch_size=8", "--steps_per_execution=1"])
    assert code == 0, code
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, resource.RLIM_INFINITY))
    # 1024 images x 2 heads x 256 x 256 weights of attention take 512 MiB, and there are several such arrays.
    command.leave(train.main([*common, "--steps=4", "--batch_size=1024"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
