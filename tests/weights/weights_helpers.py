"""Tiny models with random weights, and their contents by path."""

import numpy as np

from vit_tpu.models.vit import ViT

SIZES = {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "patch_size": 4}


def build(seed=None, **settings):
    """Returns a ViT of width 16 on 16x16 images; with a seed, every weight is random."""
    model = ViT("mu/4", **{"image_size": 16, "num_classes": 5, **SIZES, **settings})
    if seed is not None:
        rng = np.random.default_rng(seed)
        for parameter in model.parameters():
            parameter.variable.assign(rng.normal(0, 0.3, parameter.variable.shape).astype(np.float32))
    return model


def values(model):
    return {p.path: p.variable.numpy() for p in model.parameters()}


def canonical(model):
    """Returns the weights with one entry per block, whether the model is scan or not."""
    out = {}
    for p in model.parameters():
        array = p.variable.numpy()
        if p.stacked:
            rest = p.path.removeprefix("blocks/")
            out |= {f"blocks/{i}/{rest}": array[i] for i in range(array.shape[0])}
        else:
            out[p.path] = array
    return out


def images(size=16, channels=3, seed=0):
    sides = (size, size) if isinstance(size, int) else size
    return np.random.default_rng(seed).uniform(-1, 1, (2, *sides, channels)).astype(np.float32)


def same(a, b):
    """True if two dicts of arrays are equal to the bit."""
    return a.keys() == b.keys() and all(x.tobytes() == b[k].tobytes() and x.shape == b[k].shape for k, x in a.items())
