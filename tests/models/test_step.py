"""The rules of the training step on one device: scaling, averaging, clipping, skipping, latching, arguments."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
import tiny

from vit_tpu import optim
from vit_tpu.errors import UserError
from vit_tpu.models import accept, guard
from vit_tpu.optim.loss_scale import LossScale


def trained(gradients, batch, *, start=0.0, optimizer=None, images=None, weights=None, **options):
    """Trains `Scalar` for one epoch over examples with the given gradients; returns the model."""
    model = tiny.Scalar(start)
    model.compile(optimizer or optim.SGD(1.0), tiny.Given(), metrics=(), **options)
    model.fit(tiny.scalar_data(gradients, batch, images, weights), verbose=0)
    return model


def weight(model):
    return float(model.w.numpy()[0])


# Scaling.


def scaled_run(scale):
    images, labels = tiny.examples(8)
    inner = optim.AdamW(0.01, weight_decay=0.1)
    optimizer = inner if scale is None else LossScale(inner, initial_scale=scale, dynamic=False)
    model = tiny.Perceptron()
    model.compile(optimizer, grad_clip_norm=0.1)
    run = tiny.one_step(model)
    norms = [run(images, labels)["grad_norm"] for _ in range(3)]
    return tiny.values(model), norms


@pytest.fixture(scope="module")
def unscaled():
    return scaled_run(None)


@pytest.mark.parametrize("scale", [1.0, 4096.0, 2.0**15])
def test_loss_scale_changes_neither_the_update_nor_the_logged_norm(unscaled, scale):
    weights, norms = scaled_run(scale)
    # Powers of two: nothing is rounded differently.
    assert norms == pytest.approx(unscaled[1], rel=1e-7)
    for path, value in unscaled[0].items():
        np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-7, err_msg=path)
    assert min(norms) > 0.1, "the clip must be active for this to mean something"


def test_logged_norm_is_that_of_the_unscaled_mean_before_the_clip():
    model = tiny.Scalar()
    model.compile(
        LossScale(optim.SGD(1.0), initial_scale=1024.0),
        tiny.Given(),
        metrics=(),
        grad_clip_norm=1.0,
    )
    logs = tiny.one_step(model)(np.ones((2, 1), np.float32), np.float32([3.0, 5.0]))
    assert logs["grad_norm"] == 4.0
    assert weight(model) == -1.0


# Averaging and clipping.


def test_micro_batches_are_averaged_before_one_clip():
    model = trained([3.0, -1.0], 2, accumulation_steps=2, grad_clip_norm=1.0)
    assert weight(model) == pytest.approx(-1.0, abs=1e-6)  # mean 1; clipping each gives 0


def test_a_gradient_below_the_clip_is_left_alone():
    assert weight(trained([0.5, 0.25], 2, grad_clip_norm=1.0)) == pytest.approx(-0.375, abs=1e-7)


def test_a_zero_gradient_survives_the_clip():
    model = trained([0.0, 0.0], 2, grad_clip_norm=1.0, start=2.0)
    assert weight(model) == 2.0
    assert model.counters.values()["skipped"] == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_of_examples_give_the_mean_over_real_examples(accumulation):
    # Micro-batches of 2 and 1 real examples: (1 + 2 + 6) / 3, not ((1 + 2) / 2 + 6) / 2.
    model = trained([1.0, 2.0, 6.0, 100.0], 4, weights=[1, 1, 1, 0], accumulation_steps=accumulation)
    assert weight(model) == pytest.approx(-3.0, abs=1e-6)


def test_padding_with_an_impossible_label_does_no_harm():
    images, labels = tiny.examples(4)
    results = []
    for padding in (0, -1):
        model = tiny.Perceptron()
        model.compile(optim.SGD(0.1))
        labels[3] = padding
        data = tiny.batches(images, labels, np.float32([1, 1, 1, 0]), batch=4)
        history = model.fit(data, verbose=0).history
        results.append((tiny.values(model), history["loss"], history["accuracy"]))
    assert results[0][1:] == results[1][1:]
    for path, value in results[0][0].items():
        np.testing.assert_array_equal(results[1][0][path], value)


def test_a_batch_of_padding_alone_changes_nothing():
    model = trained([5.0, 5.0], 2, weights=[0, 0], start=1.0, optimizer=optim.SGD(1.0, weight_decay=0.5))
    assert weight(model) == 1.0
    assert int(model.optimizer.iterations) == 0


OPTIMIZERS = {
    "SGD": lambda: optim.SGD(0.05, weight_decay=0.1, momentum=0.9),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1, head_weight_decay=0.5),
    "LAMB": lambda: optim.LAMB(0.01, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_accumulation_gives_the_weights_of_the_large_batch(name):
    images, labels = tiny.examples(48)
    results = []
    for accumulation in (1, 4):
        model = tiny.Perceptron()
        model.compile(OPTIMIZERS[name](), accumulation_steps=accumulation, grad_clip_norm=0.5)
        history = model.fit(tiny.batches(images, labels, batch=16), verbose=0)
        assert int(model.optimizer.iterations) == 3
        results.append((tiny.values(model), history.history))
    for path, value in results[0][0].items():
        np.testing.assert_allclose(results[1][0][path], value, rtol=0, atol=1e-6, err_msg=path)
    for key in ("loss", "accuracy", "grad_norm", "step_loss"):
        assert results[1][1][key] == pytest.approx(results[0][1][key], rel=1e-6), key


def test_every_micro_batch_gets_its_own_dropout():
    seeds = []

    class Recording(tiny.Scalar):
        def call(self, images, training=False, seed=None):
            tf.py_function(lambda s: seeds.append(tuple(s.numpy())), [seed], [])
            return super().call(images)

    model = Recording()
    model.compile(optim.SGD(0.1), tiny.Given(), metrics=(), accumulation_steps=4)
    model.fit(tiny.scalar_data(np.ones(16), 8), verbose=0)
    assert len(seeds) == 8
    assert len(set(seeds)) == 8, "2 steps of 4 micro-batches: no seed twice"


def test_dropout_repeats_with_the_seed_and_differs_with_another():
    images, labels = tiny.examples(16)

    def run(seed):
        model = tiny.Perceptron(dropout=0.5)
        model.compile(optim.SGD(0.1), seed=seed)
        model.fit(tiny.batches(images, labels, batch=8), verbose=0)
        return tiny.values(model)["middle/kernel"]

    first = run(1)
    np.testing.assert_array_equal(first, run(1))
    assert np.abs(first - run(2)).max() > 1e-4


# Steps whose gradient is not finite.


def ratio_images(*gradients):
    """Images whose gradient under `Overflowing` is as given while the loss stays finite."""
    return np.asarray(gradients, np.float32)[:, None]


class Overflowing(tiny.Scalar):
    """A finite loss (0) with the gradient that the image says, infinities included."""

    def call(self, images, training=False, seed=None):
        @tf.custom_gradient
        def zero(w):
            return tf.zeros_like(images), lambda dy: tf.reduce_sum(images * dy)[None]

        return zero(self.w)


def overflowing(gradients, optimizer, **options):
    model = Overflowing()
    model.compile(optimizer, tiny.Given(), metrics=(), **options)
    images = ratio_images(*gradients)
    labels = np.ones(len(images), np.float32)
    model.fit(tiny.batches(images, labels, batch=1), verbose=0)
    return model


def state(optimizer):
    return [v.numpy().copy() for v in optimizer.variables]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_skipped_step_leaves_no_trace(name):
    infinite = float("inf")
    clean = overflowing([1.0, 2.0], OPTIMIZERS[name](), ema=0.9)
    skipped = overflowing([1.0, infinite, float("nan"), 2.0], OPTIMIZERS[name](), ema=0.9)
    np.testing.assert_array_equal(skipped.w.numpy(), clean.w.numpy())
    for ours, theirs in zip(state(skipped.optimizer), state(clean.optimizer)):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(skipped.averages.averages[0].numpy(), clean.averages.averages[0].numpy())
    assert int(skipped.optimizer.iterations) == 2
    assert skipped.counters.values() == {
        "steps": 4,
        "skipped": 2,
        "in_a_row": 0,
        "bad_step": 0,
        "bad_gradient": 0,
    }


def test_the_schedule_does_not_move_on_a_skipped_step():
    schedule = optim.schedules.Linear(1.0, total_steps=4)  # 1, .75, .5, .25
    model = overflowing([1.0, float("inf"), float("inf"), 1.0], optim.SGD(schedule))
    assert weight(model) == pytest.approx(-1.75)


def test_loss_scale_halves_on_overflow_and_recovers_below_one():
    optimizer = LossScale(optim.SGD(1.0), initial_scale=4.0, min_scale=0.25)
    model = overflowing([float("inf")] * 4 + [1.0], optimizer)
    assert float(optimizer.loss_scale) == 0.25
    assert weight(model) == pytest.approx(-1.0)
    assert int(optimizer.iterations) == 1


def test_too_many_skips_in_a_row_stop_training_and_name_the_parameter():
    optimizer = LossScale(optim.SGD(1.0), initial_scale=4.0, min_scale=0.5)
    with pytest.raises(guard.NonFiniteError, match=r"5 steps in a row at loss scale 0.5 .*first in w;") as caught:
        overflowing([1.0] + [float("inf")] * 5, optimizer, max_skipped=5)
    assert "\n" not in str(caught.value)


def test_fewer_skips_than_allowed_do_not_stop_training():
    model = overflowing([float("inf")] * 4 + [1.0] + [float("inf")] * 4, optim.SGD(1.0), max_skipped=5)
    assert model.counters.values()["skipped"] == 8


@pytest.mark.parametrize("per_execution", [1, 4, 16])
def test_after_a_nan_loss_nothing_changes_and_the_error_names_the_step(per_execution):
    gradients = np.ones(16, np.float32)
    images = np.ones((16, 1), np.float32)
    images[2] = float("nan")
    model = tiny.Scalar()
    model.compile(
        LossScale(optim.SGD(1.0, weight_decay=0.1)), tiny.Given(), metrics=(),
        steps_per_execution=per_execution, ema=0.5,
    )  # fmt: skip
    data = tiny.scalar_data(gradients, 1, images)
    with pytest.raises(guard.NonFiniteError, match="loss of step 3 is not finite.* after step 2"):
        model.fit(data, steps_per_epoch=16, verbose=0)
    good = tiny.Scalar()
    good.compile(optim.SGD(1.0, weight_decay=0.1), tiny.Given(), metrics=(), ema=0.5)
    good.fit(data.take(2), verbose=0)
    np.testing.assert_array_equal(model.w.numpy(), good.w.numpy())
    np.testing.assert_array_equal(model.averages.averages[0].numpy(), good.averages.averages[0].numpy())
    assert int(model.optimizer.iterations) == 2
    assert model.optimizer.loss_scale.numpy() == 2048  # halved once, by the bad step itself
    assert model.counters.values()["bad_step"] == 3


@pytest.mark.parametrize("jit", [False, True])
def test_check_numerics_stops_at_the_step_of_the_first_bad_gradient(jit):
    model = Overflowing()
    model.compile(optim.SGD(1.0), tiny.Given(), metrics=(), steps_per_execution=4, jit_compile=jit, check_numerics=True)
    images = ratio_images(1.0, 1.0, float("inf"), 1.0)
    with pytest.raises(guard.NonFiniteError, match="loss or gradient of step 3 is not finite.* after step 2"):
        model.fit(tiny.batches(images, np.ones(4, np.float32), batch=1), verbose=0)
    assert weight(model) == pytest.approx(-2.0)  # two steps of 1, and not the fourth


def test_check_numerics_lets_a_dynamic_loss_scale_find_its_height():
    optimizer = LossScale(optim.SGD(1.0), initial_scale=4.0, min_scale=0.25)
    model = overflowing([float("inf")] * 2 + [1.0], optimizer, check_numerics=True)
    assert model.counters.values()["bad_step"] == 0 and weight(model) == pytest.approx(-1.0)


# One compilation, the same numbers in every mode.


def fitted(epochs=2, **options):
    images, labels = tiny.examples(64)
    model = tiny.Perceptron(dropout=0.2)
    model.compile(optim.AdamW(0.01), metrics=("accuracy", "top5"), grad_clip_norm=1.0, **options)
    history = model.fit(tiny.batches(images, labels, batch=8).repeat(), steps_per_epoch=8, epochs=epochs, verbose=0)
    return model, history.history


@pytest.fixture(scope="module")
def plain_fit():
    return fitted()


@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": True},
        {"steps_per_execution": 4},
        {"run_eagerly": True},
        {"jit_compile": True, "steps_per_execution": 8},
    ],
    ids=lambda options: "-".join(options),
)
def test_modes_give_the_same_run(plain_fit, options):
    model, history = fitted(**options)
    for path, value in tiny.values(plain_fit[0]).items():
        np.testing.assert_allclose(tiny.values(model)[path], value, rtol=0, atol=2e-6, err_msg=path)
    assert history.keys() == plain_fit[1].keys()
    for key in history:
        assert history[key] == pytest.approx(plain_fit[1][key], rel=1e-5), key


@pytest.mark.parametrize("per_execution", [1, 4])
def test_the_step_is_traced_once(per_execution):
    traces = []

    class Counted(tiny.Perceptron):
        def call(self, images, training=False, seed=None):
            traces.append(training)
            return super().call(images, training, seed)

    images, labels = tiny.examples(32)
    model = Counted()
    model.compile(optim.LAMB(0.01), steps_per_execution=per_execution)
    data = tiny.batches(images, labels, batch=4)
    for _ in range(2):
        model.fit(data.repeat(), steps_per_epoch=8, epochs=2, verbose=0)
    # Keras' loop over the steps of an execution traces its body once more to learn its outputs.
    assert traces.count(True) == (1 if per_execution == 1 else 2)
    for _ in range(2):
        model.evaluate(data, verbose=0)
    assert traces.count(False) == (1 if per_execution == 1 else 2)
    assert model.compilations() == 1


# Arguments and refusals.


def compile_scalar(optimizer="sgd", loss="softmax", **options):
    model = tiny.Scalar()
    model.compile(optimizer, loss, **options)
    return model


@pytest.mark.parametrize("name", ["lamb", "adafactor", "adamw", "sgd"])
def test_optimizers_by_name(name):
    assert type(compile_scalar(name).optimizer).__name__.lower() == name


def test_compile_without_arguments_trains():
    images, labels = tiny.examples(8)
    model = tiny.Perceptron()
    model.compile()
    before = tiny.values(model)
    model.fit(tiny.batches(images, labels, batch=4), verbose=0)
    assert np.abs(tiny.values(model)["middle/kernel"] - before["middle/kernel"]).max() > 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"optimizer": keras.optimizers.Adam()}, "optimizer Adam is not one of vit_tpu.optim"),
        ({"optimizer": keras.optimizers.legacy.SGD()}, "optimizer SGD is not one of vit_tpu.optim"),
        ({"optimizer": "lamp"}, 'did you mean "lamb"'),
        ({"loss": "sofmax"}, 'did you mean "softmax"'),
        ({"loss": keras.losses.SparseCategoricalCrossentropy()}, "takes logits"),
        ({"metrics": ("acuracy",)}, 'did you mean "accuracy"'),
        ({"accumulation_steps": 0}, "accumulation_steps=0 is not a positive whole number"),
        ({"steps_per_execution": 1.5}, "steps_per_execution=1.5 is not a positive whole number"),
        ({"max_skipped": True}, "max_skipped=True is not a positive whole number"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm=-1.0 is not positive"),
        ({"freeze": ["kernle"]}, "matches no parameter"),
        (
            {"optimizer": optim.SGD(0.1, global_clipnorm=2.0), "grad_clip_norm": 1.0},
            "clipped twice: compile.grad_clip_norm=1.0. and the optimizer's global_clipnorm=2.0",
        ),
        (
            {"optimizer": LossScale(optim.LAMB(0.1, global_clipnorm=2.0)), "grad_clip_norm": 1.0},
            "clipped twice",
        ),
    ],
)  # fmt: skip
def test_compile_refuses_in_one_sentence(options, words):
    with pytest.raises(UserError, match=words) as caught:
        compile_scalar(**options)
    assert "\n" not in str(caught.value)


def test_objects_of_keras_3_are_refused_by_name():
    keras3 = pytest.importorskip("keras")
    assert int(keras3.__version__.split(".")[0]) >= 3
    with pytest.raises(UserError, match="Keras 3 is not one of vit_tpu.optim"):
        compile_scalar(keras3.optimizers.AdamW())
    with pytest.raises(UserError, match="Keras 3"):
        compile_scalar(metrics=(keras3.metrics.Mean(),))
    model = compile_scalar(loss=tiny.Given(), metrics=())
    with pytest.raises(UserError, match="callback EarlyStopping belongs to the package keras"):
        model.fit(tiny.scalar_data([1.0]), callbacks=[keras3.callbacks.EarlyStopping()], verbose=0)


def test_callbacks_that_would_do_nothing_are_refused():
    model = compile_scalar(loss=tiny.Given(), metrics=())
    for callback in (
        keras.callbacks.ReduceLROnPlateau(monitor="loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    ):
        with pytest.raises(UserError, match=f"{type(callback).__name__} has no effect"):
            model.fit(tiny.scalar_data([1.0]), callbacks=[callback], verbose=0)


def test_a_batch_that_does_not_divide_names_the_nearest_ones():
    with pytest.raises(UserError, match="batch of 6 a replica .*accumulation_steps=4 .*use 4 or 8$"):
        trained(np.ones(6), 6, accumulation_steps=4)
    with pytest.raises(UserError, match="batch of 2 a replica .*use 4$"):
        trained(np.ones(2), 2, accumulation_steps=4)


def test_a_batch_of_unknown_size_is_refused():
    model = compile_scalar(loss=tiny.Given(), metrics=())
    data = tf.data.Dataset.from_tensor_slices((np.ones((3, 1), np.float32), np.ones(3, np.float32))).batch(2)
    with pytest.raises(UserError, match="drop_remainder=True"):
        model.fit(data, verbose=0)


def test_another_error_is_not_taken_for_the_one_being_handled():
    try:
        raise UserError("an older one")
    except UserError:
        with pytest.raises(ZeroDivisionError), guard.plain_errors():
            1 / 0  # noqa: B018


def test_images_without_labels_are_refused():
    model = compile_scalar(loss=tiny.Given(), metrics=())
    with pytest.raises(UserError, match="a batch without labels"):
        model.fit(tiny.batches(np.ones((2, 1), np.float32), batch=2), verbose=0)


def test_mixed_float16_wraps_the_optimizer_once():
    with tf_policy("mixed_float16"):
        model = tiny.Scalar()
    model.compile(optim.SGD(0.1), tiny.Given(), metrics=())
    assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, optim.SGD)
    own = LossScale(optim.SGD(0.1), initial_scale=8.0)
    model.compile(own, tiny.Given(), metrics=())
    assert model.optimizer is own


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_other_policies_are_not_wrapped(policy):
    with tf_policy(policy):
        model = tiny.Scalar()
    optimizer = optim.SGD(0.1)
    model.compile(optimizer, tiny.Given(), metrics=())
    assert model.optimizer is optimizer


def tf_policy(policy):
    from vit_tpu import precision

    return precision.scope(policy)


def test_jit_is_chosen_off_on_a_cpu_and_is_the_users_to_set():
    strategy = tf.distribute.get_strategy()
    assert accept.choose_jit(None, strategy) is bool(tf.config.list_physical_devices("GPU"))
    assert accept.choose_jit(True, strategy) is True
    assert accept.choose_jit(False, strategy) is False
