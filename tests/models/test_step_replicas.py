"""The training step on MirroredStrategy over two logical CPUs equals the step on one device."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny

from vit_tpu import optim
from vit_tpu.models import guard
from vit_tpu.optim.loss_scale import LossScale

OPTIMIZERS = {
    "SGD": lambda: optim.SGD(0.05, weight_decay=0.1, momentum=0.9),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1, head_weight_decay=0.5),
    "LAMB": lambda: optim.LAMB(0.01, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(0.01, weight_decay=0.1),
}


@pytest.fixture(scope="module")
def strategy(mirrored):
    return mirrored


def scalar(strategy, gradients, batch, weights=None, images=None, optimizer=None, **options):
    with strategy.scope():
        model = tiny.Scalar()
        model.compile(optimizer() if optimizer else optim.SGD(1.0), tiny.Given(), metrics=(), **options)
    history = model.fit(tiny.scalar_data(gradients, batch, images, weights), verbose=0)
    return model, history.history


def copies(variable, strategy):
    return [v.numpy() for v in strategy.experimental_local_results(variable)]


@pytest.fixture(scope="module")
def one_device():
    return functools.cache(perceptron)


def perceptron(name, strategy=None, **options):
    strategy = strategy or tf.distribute.get_strategy()
    images, labels = tiny.examples(48)
    with strategy.scope():
        model = tiny.Perceptron()
        model.compile(OPTIMIZERS[name](), grad_clip_norm=0.5, ema=0.9, **options)
    history = model.fit(tiny.batches(images, labels, batch=16), verbose=0).history
    averages = [a.numpy() for a in model.averages.averages]
    return tiny.values(model), averages, history, model


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_two_replicas_and_micro_batches_give_the_weights_of_one(strategy, one_device, name, accumulation):
    weights, averages, history, _ = one_device(name)
    others, other_averages, other_history, model = perceptron(name, strategy, accumulation_steps=accumulation)
    for path, value in weights.items():
        np.testing.assert_allclose(others[path], value, rtol=0, atol=1e-6, err_msg=path)
    for ours, theirs in zip(other_averages, averages):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 3
    assert model.counters.values()["steps"] == 3
    for key in ("loss", "accuracy", "grad_norm", "step_loss"):
        assert other_history[key] == pytest.approx(history[key], rel=1e-5), key


def test_jit_of_forward_and_backward_agrees(strategy, one_device):
    weights, _, _, _ = one_device("AdamW")
    others, _, _, model = perceptron("AdamW", strategy, jit_compile=True, accumulation_steps=2)
    assert model.split_jit is not None
    for path, value in weights.items():
        np.testing.assert_allclose(others[path], value, rtol=0, atol=1e-6, err_msg=path)


def test_the_clip_comes_after_the_average(strategy):
    model, history = scalar(strategy, [10.0, -8.0], 2, grad_clip_norm=1.0)
    assert copies(model.w, strategy) == [pytest.approx(-1.0, abs=1e-6)] * 2
    assert history["grad_norm"] == [1.0]


def test_padding_on_one_replica_does_not_weigh_the_gradient(strategy):
    # Replica 0 has two real examples, replica 1 one: the mean over three, not the mean of means.
    model, history = scalar(strategy, [1.0, 2.0, 6.0, 100.0], 4, weights=[1, 1, 1, 0])
    assert copies(model.w, strategy) == [pytest.approx(-3.0, abs=1e-6)] * 2
    single, single_history = scalar(tf.distribute.get_strategy(), [1.0, 2.0, 6.0, 100.0], 4, weights=[1, 1, 1, 0])
    assert float(single.w.numpy()[0]) == pytest.approx(-3.0, abs=1e-6)
    assert history["loss"] == pytest.approx(single_history["loss"])


def test_a_replica_without_a_real_example_does_no_harm(strategy):
    model, _ = scalar(strategy, [1.0, 2.0, 50.0, 50.0], 4, weights=[1, 1, 0, 0])
    assert copies(model.w, strategy) == [pytest.approx(-1.5, abs=1e-6)] * 2


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_one_replica_stops_both(strategy, bad):
    images = np.ones((8, 1), np.float32)
    images[4 + bad] = float("nan")  # step 3 of 4
    with strategy.scope():
        model = tiny.Scalar()
        optimizer = LossScale(optim.SGD(1.0, weight_decay=0.1))
        model.compile(optimizer, tiny.Given(), metrics=(), steps_per_execution=4)
    with pytest.raises(guard.NonFiniteError, match="loss of step 3"):
        model.fit(tiny.scalar_data(np.ones(8), 2, images), verbose=0)
    good, _ = scalar(tf.distribute.get_strategy(), np.ones(4), 2, optimizer=lambda: optim.SGD(1.0, weight_decay=0.1))
    first, second = copies(model.w, strategy)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, good.w.numpy(), rtol=1e-7)
    assert int(model.optimizer.iterations.numpy()) == 2
    assert float(model.optimizer.loss_scale) == 2048


class Overflowing(tiny.Scalar):
    def call(self, images, training=False, seed=None):
        @tf.custom_gradient
        def zero(w):
            return tf.zeros_like(images), lambda dy: tf.reduce_sum(images * dy)[None]

        return zero(self.w)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_infinite_gradient_on_one_replica_skips_the_step_on_both(strategy, bad):
    images = np.ones((6, 1), np.float32)
    images[2 + bad] = float("inf")  # step 2 of 3
    with strategy.scope():
        model = Overflowing()
        model.compile(optim.SGD(1.0), tiny.Given(), metrics=())
    model.fit(tiny.scalar_data(np.ones(6), 2, images), verbose=0)
    assert copies(model.w, strategy) == [pytest.approx(-2.0)] * 2
    assert int(model.optimizer.iterations.numpy()) == 2
    assert model.counters.values()["skipped"] == 1


def test_replicas_draw_different_dropout(strategy):
    # Both replicas hold the same example: with one seed for both, their gradients would be equal.
    seen = []

    class Recording(tiny.Scalar):
        def call(self, images, training=False, seed=None):
            tf.py_function(lambda s: seen.append(tuple(s.numpy())), [seed], [])
            return super().call(images)

    with strategy.scope():
        model = Recording()
        model.compile(optim.SGD(1.0), tiny.Given(), metrics=(), accumulation_steps=2)
    model.fit(tiny.scalar_data(np.ones(8), 4), verbose=0)
    assert len(seen) == 8  # 2 steps x 2 replicas x 2 micro-batches
    assert len(set(seen)) == 8


def test_evaluation_counts_every_example_once(strategy):
    images, labels = tiny.examples(100)
    weights = np.ones(104, np.float32)
    weights[100:] = 0
    padded = np.concatenate([images, images[:4]]), np.concatenate([labels, labels[:4]]), weights
    with strategy.scope():
        model = tiny.Perceptron()
        model.compile(optim.SGD(1.0), metrics=("accuracy", "top5"))
    logs = model.evaluate(tiny.batches(*padded, batch=8), return_dict=True, verbose=0)
    logits = model(images).numpy().astype(np.float64)
    assert logs["count"] == 100
    assert logs["accuracy"] == np.float32(np.mean(logits.argmax(-1) == labels))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert logs["loss"] == pytest.approx(-np.mean(log_p[np.arange(100), labels]), rel=1e-6)
