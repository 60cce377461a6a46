"""fit, evaluate, predict, averages, freezing, saving: what a Keras user relies on."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
import tiny

from vit_tpu import optim, precision
from vit_tpu.errors import UserError
from vit_tpu.models.vit import ViT
from vit_tpu.optim.loss_scale import LossScale


def vit(**settings):
    size = {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "image_size": 8, "num_classes": 5}
    return ViT("Ti/4", **{**size, "channels": 1, "pool": "gap", **settings})


def images_and_labels(count, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.uniform(-1, 1, (count, 8, 8, 1)).astype(np.float32)
    return images, rng.integers(0, 5, count).astype(np.int32)


def cross_entropy(logits, labels):
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -log_p[np.arange(len(labels)), labels]


@pytest.fixture(scope="module")
def trained():
    """A tiny ViT after 8 steps with an average, and its data."""
    keras.utils.set_random_seed(0)
    images, labels = images_and_labels(32)
    model = vit(pool="map")
    model.compile(optim.AdamW(0.01), metrics=("accuracy", "top5"), ema=0.9, grad_clip_norm=1.0)
    history = model.fit(tiny.batches(images, labels, batch=8), epochs=2, verbose=0)
    return model, images, labels, history.history


# Data.


def test_integer_labels_and_one_hot_rows_give_the_same_run():
    images, labels = tiny.examples(16)
    results = []
    for given in (labels, np.eye(5, dtype=np.float32)[labels], labels[:, None], labels.astype(np.int64)):
        model = tiny.Perceptron()
        model.compile(optim.SGD(0.1))
        history = model.fit(tiny.batches(images, given, batch=8), verbose=0).history
        results.append((tiny.values(model)["middle/kernel"], history["loss"], history["accuracy"]))
    for kernel, loss, accuracy in results[1:]:
        np.testing.assert_allclose(kernel, results[0][0], rtol=0, atol=1e-6)
        assert loss == pytest.approx(results[0][1], rel=1e-6)
        assert accuracy == results[0][2]


def test_arrays_train_like_a_dataset():
    images, labels = tiny.examples(16)
    kernels = []
    for arguments in ((tiny.batches(images, labels, batch=8),), (images, labels)):
        model = tiny.Perceptron()
        model.compile(optim.SGD(0.1))
        options = {} if len(arguments) == 1 else {"batch_size": 8, "shuffle": False}
        model.fit(*arguments, verbose=0, **options)
        kernels.append(tiny.values(model)["middle/kernel"])
    np.testing.assert_allclose(kernels[1], kernels[0], rtol=0, atol=1e-6)


def test_evaluation_counts_ten_thousand_and_one_examples_exactly():
    images, labels = tiny.examples(10_001)
    padding = 128 - 10_001 % 128
    padded = [np.concatenate([a, np.zeros((padding, *a.shape[1:]), a.dtype)]) for a in (images, labels)]
    weights = np.float32([1] * 10_001 + [0] * padding)
    model = tiny.Perceptron()
    model.compile(optim.SGD(0.1), metrics=("accuracy",))
    logs = model.evaluate(tiny.batches(*padded, weights, batch=128), return_dict=True, verbose=0)
    logits = model(images).numpy()
    assert logs["count"] == 10_001
    assert logs["accuracy"] == np.float32(np.sum(logits.argmax(-1) == labels) / 10_001)
    assert logs["loss"] == pytest.approx(cross_entropy(logits, labels).mean(), rel=1e-6)


def test_training_metrics_are_those_of_the_epoch_over_real_examples():
    images, labels = tiny.examples(12)
    weights = np.float32([1] * 9 + [0] * 3)
    model = tiny.Perceptron()
    model.compile(optim.SGD(0.0), metrics=("accuracy",))
    data = tiny.batches(images, labels, weights, batch=4)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    logits = model(images[:9]).numpy()
    loss = cross_entropy(logits, labels[:9]).mean()
    accuracy = np.float32(np.mean(logits.argmax(-1) == labels[:9]))
    assert history["loss"] == pytest.approx([loss] * 2, rel=1e-6)
    assert history["accuracy"] == [accuracy] * 2
    assert history["val_accuracy"] == [accuracy] * 2
    assert history["val_loss"] == pytest.approx([loss] * 2, rel=1e-6)
    assert history["val_count"] == [9, 9]


@pytest.mark.parametrize("batch", [4, 5, 16])
def test_predict_gives_the_rows_of_a_direct_call(trained, batch):
    model, images, _, _ = trained
    rows = model.predict(images[:5], batch_size=batch, verbose=0)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, model(images[:5]), rtol=0, atol=1e-6)


def test_training_lowers_the_loss(trained):
    loss = trained[3]["loss"]
    assert loss[1] < loss[0] < np.log(5) + 0.5


# Precision.


@pytest.mark.parametrize(
    "policy, name",
    [("float32", "lamb"), ("mixed_bfloat16", "adafactor"), ("mixed_float16", "lamb"), ("mixed_float16", "adamw")],
)
def test_optimizers_train_under_the_policies(policy, name):
    images, labels = images_and_labels(8)
    with precision.scope(policy):
        model = vit(depth=1)
    model.compile(name, grad_clip_norm=1.0, accumulation_steps=2)
    before = tiny.values(model)
    history = model.fit(tiny.batches(images, labels, batch=4), verbose=0).history
    after = tiny.values(model)
    assert all(np.isfinite(value).all() for value in after.values())
    assert np.isfinite(history["loss"] + history["grad_norm"]).all()
    assert np.abs(after["head/bias"] - before["head/bias"]).max() > 0
    assert int(model.optimizer.iterations) == 2
    assert isinstance(model.optimizer, LossScale) == (policy == "mixed_float16")
    assert {v.dtype for v in model.weights} <= {tf.float32, tf.int64}
    slots = getattr(model.optimizer, "inner_optimizer", model.optimizer).variables
    low = {v.name.split("/")[0] for v in slots if v.dtype in (tf.bfloat16, tf.float16)}
    assert low <= {"momentum"}, "only a first moment may be bfloat16, and only Adafactor's is"
    assert (low == {"momentum"}) == (name == "adafactor")


def test_policies_train_alike():
    losses = {}
    images, labels = images_and_labels(8)
    for policy in precision.POLICIES:
        keras.utils.set_random_seed(3)
        with precision.scope(policy):
            model = vit(depth=1)
        model.compile(optim.SGD(0.5))
        data = tiny.batches(images, labels, batch=8).repeat(6)
        losses[policy] = model.fit(data, verbose=0).history["step_loss"][-1]
    for policy in ("mixed_bfloat16", "mixed_float16"):
        assert losses[policy] == pytest.approx(losses["float32"], rel=5e-2)
    assert losses["float32"] < 0.5


# Averages and freezing.


def test_averaged_weights_are_swapped_in_and_out_bit_exactly(trained):
    model, images, _, _ = trained
    before, averages = tiny.values(model), [a.numpy() for a in model.averages.averages]
    with model.averaged_weights():
        inside = tiny.values(model)
        logits = model(images).numpy()
    for value, average in zip(inside.values(), averages):
        np.testing.assert_array_equal(value, average)
    for path, value in tiny.values(model).items():
        np.testing.assert_array_equal(value, before[path])
    assert np.abs(logits - model(images)).max() > 1e-4
    with pytest.raises(RuntimeError), model.averaged_weights():
        raise RuntimeError
    for path, value in tiny.values(model).items():
        np.testing.assert_array_equal(value, before[path])


def test_the_average_is_the_documented_one():
    model = tiny.Scalar()
    model.compile(optim.SGD(1.0), tiny.Given(), metrics=(), ema=0.5)
    model.fit(tiny.scalar_data([1.0, 1.0, 1.0], 1), verbose=0)
    average = 0.0  # w is -1, -2, -3; d_t = min(.5, (1 + t) / (10 + t))
    for t, w in enumerate((-1.0, -2.0, -3.0)):
        d = min(0.5, (1 + t) / (10 + t))
        average = d * average + (1 - d) * w
    assert float(model.averages.averages[0].numpy()[0]) == pytest.approx(average, rel=1e-6)
    assert float(model.w.numpy()[0]) == -3.0


def test_without_an_average_asking_for_it_says_how():
    model = tiny.Scalar()
    model.compile(optim.SGD(1.0), tiny.Given(), metrics=())
    with pytest.raises(UserError, match="compile.ema=0.9999"), model.averaged_weights():
        pass


@pytest.mark.parametrize("freeze, moves", [(["body"], {"head/kernel", "head/bias"}), (["blocks/0", "embedding"], None)])
def test_frozen_weights_stay_bit_equal(freeze, moves):
    images, labels = images_and_labels(16)
    model = vit()
    optimizer = optim.AdamW(0.01, weight_decay=0.1)
    model.compile(optimizer, freeze=freeze)
    before = tiny.values(model)
    # The head starts at zero, so that the body has a gradient from the second step only.
    model.fit(tiny.batches(images, labels, batch=8).repeat(2), verbose=0)
    after = tiny.values(model)
    frozen = {p for p in before if p.startswith(("blocks/0/", "embedding/"))}
    moves = moves or before.keys() - frozen
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    # Key biases have gradient zero but for rounding.
    assert changed | {p for p in moves if p.endswith("key/bias")} == set(moves)
    slots = {v.name for v in optimizer.variables}
    assert not any("embedding/kernel" in name for name in slots)
    assert any("head/kernel" in name for name in slots)
    assert len(model.trained) == len(moves)


def test_layer_decay_scales_the_rate_by_depth():
    images, labels = images_and_labels(8)
    model = vit()
    model.compile(optim.SGD(0.1), layer_decay=0.5)
    scales = {path: group.lr_scale for group in model.groups for path in group.paths}
    assert scales["head/kernel"] == 1.0
    assert scales["norm/scale"] == 1.0
    assert scales["blocks/1/mlp/dense1/kernel"] == 0.5
    assert scales["blocks/0/mlp/dense1/kernel"] == 0.25
    assert scales["posemb"] == scales["embedding/kernel"] == 0.125


# Saving.


def test_a_saved_model_loads_with_equal_logits(trained, tmp_path):
    model, images, _, _ = trained
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded) is ViT
    np.testing.assert_array_equal(loaded(images), model(images))
    assert [p.path for p in loaded.parameters()] == [p.path for p in model.parameters()]
    loaded.compile("sgd")
    loaded.fit(tiny.batches(*images_and_labels(4), batch=4), verbose=0)


def test_saved_weights_load_into_a_new_model(trained, tmp_path):
    model, images, _, _ = trained
    path = tmp_path / "some.weights.h5"
    model.save_weights(path)
    other = vit(pool="map")
    assert np.abs(other(images) - model(images)).max() > 1e-3
    other.load_weights(path)
    np.testing.assert_array_equal(other(images), model(images))


def test_a_checkpoint_brings_back_weights_optimizer_and_average(trained, tmp_path):
    model, images, labels, _ = trained
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    other = vit(pool="map")
    other.compile(optim.AdamW(0.01), ema=0.9, grad_clip_norm=1.0)
    tf.train.Checkpoint(model=other).read(path).assert_existing_objects_matched()
    data = tiny.batches(images, labels, batch=8).take(2)
    for each in (model, other):
        each.fit(data, verbose=0)
    for path, value in tiny.values(model).items():
        np.testing.assert_array_equal(tiny.values(other)[path], value)
    for ours, theirs in zip(other.averages.averages, model.averages.averages):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_compiling_again_starts_afresh():
    images, labels = tiny.examples(8)
    model = tiny.Perceptron()
    for options in ({}, {"accumulation_steps": 2}, {"ema": 0.5}):
        model.compile(optim.SGD(0.1), **options)
        model.fit(tiny.batches(images, labels, batch=8), verbose=0)
        assert model.counters.values()["steps"] == 1
        assert model.compilations() == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_wrong_use_is_one_sentence_whatever_the_steps_per_execution(steps):
    """AutoGraph, which makes a loop of the steps, tells an error in the body as one of its own."""
    model = vit()
    model.compile(accumulation_steps=4, steps_per_execution=steps)
    with pytest.raises(UserError, match="^a batch of 6 a replica does not divide .*: use 4 or 8$"):
        model.fit(*images_and_labels(12), batch_size=6, verbose=0)


def test_functions_can_be_run_eagerly_with_several_steps_per_execution():
    model = vit(depth=1)
    model.compile("adamw", steps_per_execution=2)
    tf.config.run_functions_eagerly(True)
    try:
        model.fit(*images_and_labels(12), batch_size=6, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    assert model.counters.values()["steps"] == 2
