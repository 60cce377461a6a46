"""Trains with every optimizer on 1 and on N virtual devices and evaluates 10,001 examples; run in its own process.

Usage: python replicas_script.py N. Prints JSON: optimizer -> largest difference, and the evaluation's figures.
"""

import json
import os
import sys

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
COUNT = int(sys.argv[1])

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tiny  # noqa: E402

from vit_tpu import devices, optim  # noqa: E402

OPTIMIZERS = {
    "SGD": lambda: optim.SGD(0.05, weight_decay=0.1, momentum=0.9),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1, head_weight_decay=0.5),
    "LAMB": lambda: optim.LAMB(0.01, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(0.01, weight_decay=0.1),
}
here = devices.choose("auto", virtual=COUNT)
assert here.replicas == COUNT and f"{COUNT} virtual devices" in here.line, here.line
images, labels = tiny.examples(60)
weights = np.ones(64, np.float32)
weights[60:] = 0  # the last batch of 16 holds 12 examples and padding: one device has only that
padded = np.concatenate([images, images[:4]]), np.concatenate([labels, labels[:4]]), weights


def trained(name, strategy):
    with strategy.scope():
        model = tiny.Perceptron()
        model.compile(OPTIMIZERS[name](), metrics=("accuracy", "top5"), grad_clip_norm=0.5, ema=0.9,
                      accumulation_steps=2)  # fmt: skip
    model.fit(tiny.batches(*padded, batch=16), verbose=0)
    return model


found = {}
for name in OPTIMIZERS:
    one, several = trained(name, tf.distribute.get_strategy()), trained(name, here.strategy)
    ours, theirs = tiny.values(several), tiny.values(one)
    found[name] = max(float(np.abs(ours[path] - theirs[path]).max()) for path in ours)
    assert int(several.optimizer.iterations.numpy()) == 4
many, targets = tiny.examples(10_001, seed=5)
short = -10_001 % 128
weights = np.concatenate([np.ones(10_001, np.float32), np.zeros(short, np.float32)])
batches = tiny.batches(
    np.concatenate([many, many[:short]]), np.concatenate([targets, targets[:short]]), weights, batch=128
)
logs = several.evaluate(batches, return_dict=True, verbose=0)
logits = several(many).numpy().astype(np.float64)
logs = {key: float(value) for key, value in logs.items()}
expected = float(np.float32(np.mean(logits.argmax(-1) == targets)))
print(json.dumps({"differences": found, "evaluation": logs, "accuracy": expected}))
