"""Trains a Vision Transformer.

Examples:
  python -m vit_tpu.train
      the embedded digits: a small ViT to about 98 % in about a minute on a CPU
  python -m vit_tpu.train --config=experiments/cifar10.yaml --set data.path=/data/cifar10
      an experiment file with one key changed
  python -m vit_tpu.train --config=experiments/cifar10.yaml --set data.path=/data/cifar10 --optimizer=lamb
  --workdir=runs/lamb
      flags win over the file, the file over the defaults
  python -m vit_tpu.train --workdir=runs/lamb ...
      the same command again continues a run that was interrupted or killed
  python -m vit_tpu.train --resume=runs/a/checkpoints/00010000 --workdir=runs/cool --steps=12000
  --set schedule.cooldown=2000 --allow_config_change
      a cooldown from an older checkpoint of another run
  python -m vit_tpu.train --workers=10.0.0.2:12345,10.0.0.3:12345 --worker=0 --workdir=/shared/run ...
      two machines: the same on the other one with --worker=1

Exit codes: 0 done, 1 failed, 2 wrong use, 75 interrupted and saved, or another worker is gone (run it again to go on).
"""

from __future__ import annotations

from typing import Any

from vit_tpu.command import INTERRUPTED, check_file, execute, leave, write_json
from vit_tpu.errors import UserError

# flag -> (key, what it is)
SHORTCUTS = {
    "model": ("model.variant", "shape and patch size, such as S/16 or G/14"),
    "image_size": ("model.image_size", "side in pixels, or height,width"),
    "pool": ("model.pool", "tok, gap or map"),
    "optimizer": ("optimizer.name", "adamw, lamb, adafactor or sgd"),
    "learning_rate": ("optimizer.learning_rate", "peak of the schedule"),
    "weight_decay": ("optimizer.weight_decay", "of the body's kernels"),
    "head_weight_decay": ("optimizer.head_weight_decay", "of the classifier's kernel"),
    "gradient_clipping": ("training.grad_clip_norm", "largest global norm of the gradient"),
    "batch_size": ("training.batch_size", "examples a step, over all devices"),
    "accumulation_steps": ("training.accumulation_steps", "micro-batches a batch is cut into"),
    "epochs": ("training.epochs", "length of the run (or --steps)"),
    "steps": ("training.steps", "length of the run (or --epochs)"),
    "precision": ("precision", "float32, mixed_bfloat16 or mixed_float16"),
    "loss_scale": ("loss_scale", "auto, off, a number to start a dynamic scale from, or fixed:NUMBER"),
    "steps_per_execution": ("training.steps_per_execution", "steps between two returns to Python"),
    "strategy": ("strategy", "auto, cpu, gpu, mirrored, multi_worker or tpu"),
    "tpu": ("tpu", "local, or the name or address of a TPU"),
    "virtual_devices": ("virtual_devices", "parts to cut the CPU into, to try out several devices"),
    "workers": ("workers", "host:port,host:port of all processes of a run on several machines"),
    "worker": ("worker", "which of the workers this process is, from 0"),
    "mesh": ("mesh", "cores of a TPU that one model copy is divided over, such as data=4,model=2"),
    "shard": ("shard", "none, state (moments, average, gradients) or full (weights too), over the mesh's data axis"),
    "profile": ("training.profile", "START,STOP: record these training steps"),
    "seed": ("training.seed", "of order, augmentation, weights and dropout"),
    "init_from": ("init_from", "weight file to start from, or a run's folder or checkpoint"),
    "resume": ("resume", "auto, never, or a run's folder or checkpoint to continue from"),
    "on_nonfinite": ("training.on_nonfinite", "stop, or rollback past the bad data"),
    "data_service": ("data.data_service", "host:port of processes that read images, see vit_tpu.data_service"),
}


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments)


def _define(flags: Any, values: Any) -> None:
    flags.DEFINE_string("config", None, "YAML file of an experiment; none for the embedded digits", flag_values=values)
    flags.DEFINE_string(
        "workdir", None, "folder of the run; default runs/<data>, or the next free name", flag_values=values
    )
    flags.DEFINE_multi_string("set", [], "key=value for any key of the config; may be repeated", flag_values=values)
    for name, (key, text) in SHORTCUTS.items():
        flags.DEFINE_string(name, None, f"{text} ({key})", flag_values=values)
    flags.DEFINE_boolean(
        "jit", None, "compile the step with XLA; default: on for GPUs (training.jit)", flag_values=values
    )
    flags.DEFINE_boolean(
        "check_numerics",
        False,
        "stop at the first NaN and say where it is from (training.check_numerics)",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "deterministic", False, "the same bits in every run (training.deterministic)", flag_values=values
    )
    flags.DEFINE_boolean(
        "allow_config_change", False, "continue although learning rate, batch, data, ... changed (allow_config_change)",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_boolean("dry_run", False, "print what would run, and stop", flag_values=values)
    flags.DEFINE_string("json", None, "also write the summary to this file", flag_values=values)


def overrides(values: Any) -> list[str]:
    """Returns the flags as config overrides, --set first, so that a named flag wins over it."""
    # Another --model brings its own shape: what a file says of width and the like belongs to the model it names.
    shape = ("width", "depth", "mlp_dim", "num_heads", "patch_size") if values.model is not None else ()
    found = [*(f"model.{name}=null" for name in shape), *values.set]
    for name, (key, _) in SHORTCUTS.items():
        value = getattr(values, name)
        if value is None:
            continue
        if name == "loss_scale":
            found += _loss_scale(value)
        else:
            found.append(f"{key}={value}")
    if values.steps is not None and values.epochs is None:
        found.append("training.epochs=null")
    if values.epochs is not None and values.steps is None:
        found.append("training.steps=null")
    for name in ("jit", "check_numerics", "deterministic"):
        if values[name].present:
            found.append(f"training.{name}={str(values[name].value).lower()}")
    if values["allow_config_change"].present:
        found.append(f"allow_config_change={str(values.allow_config_change).lower()}")
    return found


def _loss_scale(value: str) -> list[str]:
    if value in ("auto", "off", "dynamic"):
        return [f"loss_scale.mode={value}"]
    try:
        float(value.removeprefix("fixed:"))
    except ValueError:
        raise UserError(f"--loss_scale={value} is none of auto, off, dynamic, a number or fixed:NUMBER") from None
    mode = "fixed" if value.startswith("fixed:") else "dynamic"
    return [f"loss_scale.mode={mode}", f"loss_scale.initial={value.removeprefix('fixed:')}"]


def _run(values: Any) -> int:
    import dataclasses

    from vit_tpu.config import load_config

    config = load_config(values.config, overrides(values))
    check_file("json", values.json)
    from vit_tpu.training.run import dry_run, run  # TensorFlow loads here, after the cheap checks

    if values.dry_run:
        print(dry_run(config))
        return 0
    summary = run(config, values.workdir)
    if values.json:
        write_json(values.json, dataclasses.asdict(summary))
    return INTERRUPTED if summary.status == "interrupted" else 0


if __name__ == "__main__":
    leave(main())
