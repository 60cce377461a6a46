"""The smallest compiled model with every kind of state: loss scale, bfloat16 momentum, moving average."""

import numpy as np

from vit_tpu import ViT, optim


def model(width=8, momentum_dtype="bfloat16", scaled=True, ema=0.9, **compile_options):
    made = ViT("Ti/4", image_size=8, num_classes=3, width=width, depth=1, mlp_dim=16, num_heads=2)
    optimizer = optim.AdamW(1e-2, momentum_dtype=momentum_dtype)
    options = {"run_eagerly": True, **compile_options}
    made.compile(optim.LossScale(optimizer) if scaled else optimizer, ema=ema, **options)
    return made


def images(count=6):
    return np.random.default_rng(0).uniform(-1, 1, (count, 8, 8, 3)).astype(np.float32), np.arange(count) % 3
