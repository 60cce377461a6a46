"""The layer-by-layer step: the same numbers as the compiled step, and the planted fault is the one that is named."""

import numpy as np
import pytest
import tensorflow as tf

import vit_tpu
from vit_tpu import optim
from vit_tpu.layers.attention import Attention
from vit_tpu.layers.mlp import Mlp
from vit_tpu.models import numerics

SETTINGS = {"width": 16, "depth": 3, "mlp_dim": 32, "num_heads": 2, "image_size": 8, "num_classes": 4, "pool": "map"}


def model_of(policy="float32", optimizer=None, accumulation_steps=1, **settings):
    with vit_tpu.precision(policy):
        model = vit_tpu.ViT("Ti/4", **{**SETTINGS, **settings})
    random = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.variable.assign(random.normal(size=parameter.variable.shape, scale=0.2).astype(np.float32))
    model.compile(optimizer or optim.SGD(1.0), accumulation_steps=accumulation_steps, seed=3)
    return model


def batch(count=4):
    random = np.random.default_rng(1)
    images = random.uniform(-1, 1, (count, 8, 8, 3)).astype(np.float32)
    return tf.constant(images), tf.constant(random.integers(0, 4, count), tf.int32)


@pytest.mark.parametrize("settings", [{}, {"scan": True}, {"dropout": 0.3, "drop_path": 0.2}, {"pool": "tok"}])
def test_walking_gives_the_steps_own_loss_and_gradients(settings):
    model = model_of(accumulation_steps=2, **settings)
    steps = numerics.walk(model, *batch(), step=1)
    before = {p.path: p.variable.numpy().copy() for p in model.parameters()}
    results = model.train_step(batch())
    assert np.mean([s.loss for s in steps]) == pytest.approx(float(results["step_loss"]), rel=1e-5)
    # SGD with rate 1 moves each weight by minus its gradient: the ranges of both micro-batches bound the sum.
    for p in model.parameters():
        moved = before[p.path] - p.variable.numpy()
        low = sum(s.gradients[p.path].low for s in steps)
        high = sum(s.gradients[p.path].high for s in steps)
        assert moved.min() >= low - 1e-5 and moved.max() <= high + 1e-5, p.path
    single = numerics.walk(model_of(**settings), *batch(), step=1)[0]
    again = model_of(**settings)
    before = again.head.params["bias"].numpy()
    again.train_step(batch())
    moved = before - again.head.params["bias"].numpy()
    assert single.gradients["head/bias"].high == pytest.approx(moved.max(), abs=1e-6)
    assert single.culprit is None


def planted(cls, owner, value, backward, monkeypatch):
    """Makes one layer's result (or its gradient) not finite."""
    forward = cls.forward

    @tf.custom_gradient
    def spoil(y):
        return (tf.identity(y) if backward else y * value), lambda dy: dy * (value if backward else 1.0)

    def broken(self, *args, **kwargs):
        y = forward(self, *args, **kwargs)
        return spoil(y) if self is owner() else y

    monkeypatch.setattr(cls, "forward", broken)


@pytest.mark.parametrize("name, cls, child", [("attention", Attention, "attention"), ("mlp", Mlp, "mlp")])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_planted_fault_is_named(name, cls, child, backward, monkeypatch):
    model = model_of()
    planted(cls, lambda: getattr(model.blocks[1], child), np.nan, backward, monkeypatch)
    found = numerics.walk(model, *batch(), step=1)[0]
    assert found.culprit.startswith(f"blocks/1/{name}, {'backward' if backward else 'forward'}: "), found.culprit
    assert "not finite" in found.culprit


def test_gradient_of_a_kernel_alone_is_named(monkeypatch):
    model = model_of()
    forward = Mlp.forward

    def broken(self, params, x, **kwargs):
        if self is model.blocks[2].mlp:
            spoil = tf.custom_gradient(lambda k: (tf.identity(k), lambda dk: dk * np.inf))
            params = {**params, "dense1/kernel": spoil(tf.convert_to_tensor(params["dense1/kernel"]))}
        return forward(self, params, x, **kwargs)

    monkeypatch.setattr(Mlp, "forward", broken)
    found = numerics.walk(model, *batch(), step=1)[0]
    assert found.culprit.startswith("blocks/2/mlp, backward: gradient of blocks/2/mlp/dense1/kernel"), found.culprit


def test_wrong_label_is_the_losss_fault():
    images, _ = batch()
    found = numerics.walk(model_of(), images, tf.constant([0.0, 1.0, np.nan, 0.0])[:, None] * tf.ones([4, 4]), step=1)[
        0
    ]
    assert found.culprit.startswith("loss, forward: nan")


def test_infinite_image_is_seen_at_the_embedding():
    images, labels = batch()
    images = tf.tensor_scatter_nd_update(images, [[2, 0, 0, 0]], [np.inf])
    assert numerics.walk(model_of(), images, labels, step=1)[0].culprit.startswith("embedding, forward: ")


def test_the_micro_batch_is_told():
    images, labels = batch()
    images = tf.tensor_scatter_nd_update(images, [[3, 0, 0, 0]], [np.nan])
    steps = numerics.walk(model_of(accumulation_steps=2), images, labels, step=1)
    assert [s.culprit is None for s in steps] == [True, False] and steps[-1].micro_batch == 1


def test_float16_overflow_is_where_the_scale_is_too_high():
    optimizer = optim.LossScale(optim.SGD(0.1), initial_scale=2.0**24)
    steps = numerics.walk(model_of("mixed_float16", optimizer), *batch(), step=1)
    assert "backward" in steps[0].culprit
    low = numerics.walk(model_of("mixed_float16", optim.LossScale(optim.SGD(0.1), initial_scale=8.0)), *batch(), step=1)
    assert low[0].culprit is None


def test_ranges_count_what_float16_would_lose():
    found = numerics.Range.of(tf.constant([1e5, 1.0, 1e-9, 0.0, np.inf]))
    assert (found.bad, found.size, found.overflow, found.flush) == (1, 5, 0.25, 0.25)
    assert (found.low, found.high) == (0.0, 1e5)
    table = numerics.walk(model_of("mixed_bfloat16"), *batch(), step=1)[0].table()
    dtypes = {line.split("  ")[0]: line.split("  ", 1)[1].split()[0] for line in table.splitlines()[1:]}
    assert dtypes["blocks/2/mlp + residual"] == "bfloat16" and dtypes["head"] == dtypes["norm"] == "float32"
