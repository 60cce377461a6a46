"""A run small enough to repeat in tests: two blocks of width 16 on the digits."""

from vit_tpu import load_config

TINY = {
    "mixup": 0.0,
    "training.ema": None,
    "evaluate_ema": False,
    "learning_rate": 1e-3,
    "width": 16,
    "depth": 1,
    "mlp_dim": 32,
    "num_heads": 2,
    "pool": "gap",
    "batch_size": 32,
    "training.epochs": None,
    "training.steps": 12,
    "steps_per_execution": 2,
    "log_every": 4,
    "evaluate_every": 6,
}


def config(**changes):
    return load_config(None, {**TINY, **{key.replace("__", "."): value for key, value in changes.items()}})
