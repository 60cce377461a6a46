"""The whole way of an evaluation: pipeline, model, replicas, metrics."""

import numpy as np
import pytest
import tensorflow as tf

import vit_tpu
from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.pipeline import eval_pipeline


@pytest.mark.parametrize("replicas", [1, 2])
def test_10001_examples_in_batches_of_128_are_counted_once_and_judged_as_by_numpy(replicas, mirrored):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10_001, 4, 4, 1), np.uint8)
    source = from_arrays(images, rng.integers(0, 3, 10_001), num_classes=3)
    strategy = mirrored if replicas == 2 else tf.distribute.get_strategy()
    shape = {"width": 8, "depth": 1, "mlp_dim": 8, "num_heads": 1, "patch_size": 4}
    with strategy.scope():
        model = vit_tpu.ViT("Ti/16", image_size=4, num_classes=3, channels=1, pool="gap", **shape)
        model.compile(optimizer=vit_tpu.optim.AdamW(1e-3), metrics=["accuracy"])
    head = next(v for v in model.trainable_variables if v.shape.as_list() == [8, 3])
    head.assign(rng.normal(size=(8, 3)))
    found = model.evaluate(eval_pipeline(source, batch_size=128, image_size=4), verbose=0, return_dict=True)
    logits = np.concatenate([model(images[i : i + 512] / np.float32(127.5) - 1) for i in range(0, 10_001, 512)])
    right = logits.argmax(axis=1) == source.labels
    assert 0.2 < right.mean() < 0.5 and right[-17:].mean() != right.mean()
    assert found["count"] == 10_001
    assert found["accuracy"] == pytest.approx(right.mean(), abs=1e-7)
    log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert found["loss"] == pytest.approx(-log[np.arange(10_001), source.labels].mean(), rel=1e-5)
