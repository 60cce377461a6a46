"""Runs of a few updates in every mode, and a small ViT's parameters, for the optimizer tests."""

import numpy as np
import tensorflow as tf

from vit_tpu.optim import LAMB, SGD, Adafactor, AdamW
from vit_tpu.optim.decay import Parameter

MAKERS = {
    "LAMB": lambda **kw: LAMB(**{"learning_rate": 0.01, "weight_decay": 0.1, **kw}),
    "Adafactor": lambda **kw: Adafactor(**{"learning_rate": 0.01, "weight_decay": 0.1, **kw}),
    "AdamW": lambda **kw: AdamW(**{"learning_rate": 0.01, "weight_decay": 0.1, **kw}),
    "SGD": lambda **kw: SGD(**{"learning_rate": 0.01, "weight_decay": 0.1, "momentum": 0.9, **kw}),
}
SHAPES = {
    "stem/kernel": (33, 40),
    "attention/kernel": (40, 2, 32),
    "head/kernel": (40, 5),
    "bias": (5,),
}


def make_variables(shapes=None, seed=1):
    rng = np.random.default_rng(seed)
    return [
        tf.Variable(rng.normal(size=shape).astype("float32"), name=name) for name, shape in (shapes or SHAPES).items()
    ]


def make_gradients(steps, shapes=None, seed=2):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=shape).astype("float32") for shape in (shapes or SHAPES).values()] for _ in range(steps)]


def run(optimizer, variables, gradients, mode="eager", strategy=None, oks=None):
    """Applies the gradients; on n replicas each gets 1/n of every gradient."""

    def step(grads, ok):
        if strategy is not None:
            grads = [grad / strategy.num_replicas_in_sync for grad in grads]
        options = {} if oks is None else {"ok": ok}
        optimizer.apply_gradients(list(zip(grads, variables)), **options)

    def everywhere(grads, ok):
        if strategy is None:
            step(grads, ok)
        else:
            strategy.run(step, args=(grads, ok))

    if mode != "eager":
        everywhere = tf.function(everywhere, jit_compile=mode == "jit")
    for index, grads in enumerate(gradients):
        ok = True if oks is None else oks[index]
        everywhere([tf.constant(grad) for grad in grads], tf.constant(ok))
    return [variable.numpy() for variable in variables]


def state(optimizer):
    return [variable.numpy().copy() for variable in optimizer.variables]


def same_bits(one, two):
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def list_parameters(depth=2, width=40, heads=2, classes=5, stacked=False, seed=3):
    """A small ViT's parameters, as a model would list them."""
    rng = np.random.default_rng(seed)
    listed = []

    def add(path, shape, kind, part="body", at=0, stack=False):
        value = rng.normal(size=shape).astype("float32")
        listed.append(Parameter(path, tf.Variable(value, name=path), kind, part, at, stack))

    add("embedding/kernel", (4, 4, 3, width), "kernel")
    add("embedding/bias", (width,), "bias")
    add("posemb", (1, 36, width), "posemb")
    block = {
        "norm1/scale": ((width,), "norm"),
        "attention/query/kernel": ((width, heads, 32), "kernel"),
        "attention/query/bias": ((heads, 32), "bias"),
        "scale1": ((width,), "scale"),
    }
    values = [{k: rng.normal(size=s).astype("float32") for k, (s, _) in block.items()} for _ in range(depth)]
    if stacked:
        for key, (shape, kind) in block.items():
            add(f"blocks/{key}", (depth, *shape), kind, at=1, stack=True)
            listed[-1].variable.assign(np.stack([value[key] for value in values]))
    else:
        for index in range(depth):
            for key, (shape, kind) in block.items():
                add(f"blocks/{index}/{key}", shape, kind, at=index + 1)
                listed[-1].variable.assign(values[index][key])
    add("norm/scale", (width,), "norm", at=depth + 1)
    add("map/probe", (1, 1, width), "token", at=depth + 1)
    add("head/kernel", (width, classes), "kernel", "head", depth + 1)
    add("head/bias", (classes,), "bias", "head", depth + 1)
    return listed
