"""What micro-batches, averages and checkpoints of a compiled model must hold beside the matrix."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
import tiny

from vit_tpu import optim, precision
from vit_tpu.models.vit import ViT
from vit_tpu.optim.loss_scale import LossScale


def scalar(gradients, batch, optimizer, start=0.0, **options):
    model = tiny.Scalar(start)
    model.compile(optimizer, tiny.Given(), metrics=(), **options)
    model.fit(tiny.scalar_data(gradients, batch), verbose=0)
    return model


# Micro-batches.


def test_the_schedule_moves_once_for_all_micro_batches():
    # Rates 1 and 7/8 at updates 0 and 1. Counting micro-batches would read 5/8 and 1/8: -0.75.
    model = scalar(np.ones(16), 8, optim.SGD(optim.schedules.Linear(1.0, total_steps=8)), accumulation_steps=4)
    assert float(model.w.numpy()[0]) == -1.875
    assert int(model.optimizer.iterations) == 2


@pytest.mark.parametrize("start, want", [(1.0, 0.7811), (2.0, 1.7612)])
def test_decay_and_bias_correction_act_once_for_all_micro_batches(start, want):
    # Gradients of 1: the direction is 1, so w <- w - 0.1 * (1 + 0.1 * w), twice.
    optimizer = optim.AdamW(0.1, weight_decay=0.1)
    model = scalar(np.ones(16), 8, optimizer, start, accumulation_steps=4)
    assert float(model.w.numpy()[0]) == pytest.approx(want, abs=1e-6)


def test_micro_batches_of_four_and_two_examples_weigh_four_and_two_sixths():
    model = tiny.Scalar()
    model.compile(optim.SGD(1.0), tiny.Given(), metrics=(), accumulation_steps=2)
    data = tiny.scalar_data([3.0] * 4 + [9.0, 9.0, 50.0, 50.0], weights=[1] * 6 + [0] * 2)
    model.fit(data, verbose=0)
    assert float(model.w.numpy()[0]) == pytest.approx(-(4 / 6 * 3 + 2 / 6 * 9), abs=1e-6)


def test_no_half_window_outlives_an_epoch_because_nothing_is_kept_between_steps():
    whole, cut = (scalar(np.ones(40), 4, optim.SGD(0.1), accumulation_steps=micro) for micro in (1, 4))
    assert int(cut.optimizer.iterations) == cut.counters.values()["steps"] == 10
    names = [[v.name for v in tf.train.Checkpoint(model=m).model.optimizer.variables] for m in (whole, cut)]
    assert names[0] == names[1]
    assert len(cut.weights) == len(whole.weights)


def test_micro_batches_cost_one_more_gradient():
    # The loop inside the step carries one float32 sum for each weight, and nothing else of that size.
    model = tiny.Perceptron(hidden=64)
    model.compile(optim.SGD(0.1), accumulation_steps=4)
    images, labels = map(tf.convert_to_tensor, tiny.examples(8))

    def step():
        return model._gradients(images, labels, tf.ones([8]), None, tf.constant([0, 0]))[0]

    graph = tf.function(step, autograph=False).get_concrete_function().graph
    (loop,) = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    # Inputs that the body changes; the weights themselves are only read there.
    carried = [tuple(t.shape) for t in loop.outputs if t.dtype == tf.float32 and t.shape.rank is not None]
    weights = [tuple(p.variable.shape) for p in model.trained]
    assert sorted(shape for shape in carried if shape in weights) == sorted(weights)


# Averages.


def test_a_uniform_mean_can_be_asked_for():
    # Weights -1, -2, -3, -4 after each update; the mean of those from the third on is -3.5.
    wanted = optim.Ema(decay=None, start_step=2)
    model = scalar(np.ones(4), 1, optim.SGD(1.0), ema=wanted)
    assert float(model.averages.averages[0].numpy()[0]) == pytest.approx(-3.5)
    assert model.averages is not wanted and not wanted.averages
    with model.averaged_weights():
        assert float(model.w.numpy()[0]) == pytest.approx(-3.5)
    assert float(model.w.numpy()[0]) == -4.0


@pytest.mark.parametrize("scale, micro", [(None, 4), (4096.0, 1), (2.0**15, 4)])
def test_averages_do_not_depend_on_the_loss_scale_or_on_micro_batches(scale, micro):
    images, labels = tiny.examples(48)
    found = []
    for with_scale, steps in ((None, 1), (scale, micro)):
        optimizer = optim.AdamW(0.01)
        model = tiny.Perceptron()
        model.compile(
            optimizer if with_scale is None else LossScale(optimizer, with_scale), ema=0.9, accumulation_steps=steps
        )
        model.fit(tiny.batches(images, labels, batch=16), verbose=0)
        found.append([a.numpy() for a in model.averages.averages])
    for ours, theirs in zip(*found):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


# Evaluation.


@pytest.fixture(scope="module")
def strategy(mirrored):
    return mirrored


def test_two_replicas_count_ten_thousand_and_one_examples_exactly(strategy):
    images, labels = tiny.examples(10_001)
    padding = 128 - 10_001 % 128
    padded = [np.concatenate([a, np.zeros((padding, *a.shape[1:]), a.dtype)]) for a in (images, labels)]
    weights = np.float32([1] * 10_001 + [0] * padding)
    with strategy.scope():
        model = tiny.Perceptron()
        model.compile(optim.SGD(0.1), metrics=("accuracy",))
    logs = model.evaluate(tiny.batches(*padded, weights, batch=128), return_dict=True, verbose=0)
    assert logs["count"] == 10_001
    assert logs["accuracy"] == np.float32(np.mean(model(images).numpy().argmax(-1) == labels))


# Saving and policies.


def vit(policy, name="lamb", **options):
    with precision.scope(policy):
        model = ViT(
            "Ti/4", width=8, depth=1, mlp_dim=16, num_heads=2, image_size=8, num_classes=3, channels=1, pool="gap"
        )  # fmt: skip
    model.compile(name, **options)
    return model


def pictures(count=8):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, (count, 8, 8, 1)).astype(np.float32), np.arange(count, dtype=np.int32) % 3


def values(model):
    return {p.path: p.variable.numpy() for p in model.parameters()}


@pytest.mark.parametrize("name", ["model-{epoch}.keras", "only-{epoch}.weights.h5"])
def test_keras_saves_every_epoch_under_mixed_float16(tmp_path, name):
    model = vit("mixed_float16")
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / name), save_weights_only=name.endswith(".h5"))
    images, labels = pictures()
    model.fit(tiny.batches(images, labels, batch=4), epochs=2, verbose=0, callbacks=[saver])
    path = tmp_path / name.format(epoch=2)
    assert path.exists() and (tmp_path / name.format(epoch=1)).exists()
    if name.endswith(".h5"):
        again = vit("mixed_float16")
        again.load_weights(path)
    else:
        again = keras.models.load_model(path)
    for weight, value in values(model).items():
        np.testing.assert_array_equal(values(again)[weight], value, err_msg=weight)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints and weights of a model trained for two steps under each policy."""
    folder, found = tmp_path_factory.mktemp("policies"), {}
    images, labels = pictures()
    for policy in precision.POLICIES:
        model = vit(policy)
        model.fit(tiny.batches(images, labels, batch=4), verbose=0)
        path = tf.train.Checkpoint(model=model).write(str(folder / policy))
        found[policy] = (path, values(model), [v.numpy() for v in model.inner_optimizer.variables])
    return found


@pytest.mark.parametrize("written", precision.POLICIES)
@pytest.mark.parametrize("read", precision.POLICIES)
def test_a_checkpoint_of_one_policy_is_whole_under_another(saved, written, read):
    path, weights, slots = saved[written]
    model = vit(read)
    # A loss scale that only one side has is left out; weights and optimizer state are whole.
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    for weight, value in values(model).items():
        np.testing.assert_array_equal(value, weights[weight], err_msg=weight)
    for ours, theirs in zip(model.inner_optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs, err_msg=ours.name)
    assert int(model.optimizer.iterations) == 2
    assert {v.dtype for v in model.weights} <= {tf.float32, tf.int64}
