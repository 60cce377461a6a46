"""Loss scale: values of the scale, what a skipped step leaves alone, and every way to use it."""

import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from optim_helpers import make_gradients, make_variables, run, same_bits, state

from vit_tpu.errors import UserError
from vit_tpu.optim import LAMB, SGD, AdamW, LossScale, schedules
from vit_tpu.optim.loss_scale import all_finite, wrap

MODES = [("eager", 1), ("graph", 1), ("jit", 1), ("graph", 2)]


def build(strategy, inner=None, **options):
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        optimizer = LossScale((inner or (lambda: SGD(1.0)))(), **options)
        optimizer.build([weight])
    return weight, optimizer


def apply(optimizer, weight, strategy, mode, gradients, frozen=None):
    """Applies each gradient (the replicas' sum) and returns the scale after each."""

    def replica(grad, frozen_now):
        options = {} if frozen is None else {"frozen": frozen_now}
        grad = grad / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(grad, weight)], **options)

    def step(grad, frozen_now):
        if strategy.num_replicas_in_sync == 1:
            replica(grad, frozen_now)
        else:
            strategy.run(replica, args=(grad, frozen_now))

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit")
    scales = []
    for index, value in enumerate(gradients):
        step(tf.fill([2], float(value)), tf.constant(bool(frozen and frozen[index])))
        scales.append(float(optimizer.loss_scale))
    return scales


@pytest.fixture(params=MODES, ids=lambda mode: f"{mode[0]}-{mode[1]}")
def place(request, mirrored):
    mode, replicas = request.param
    return (mirrored if replicas == 2 else tf.distribute.get_strategy()), mode


def test_scale_halves_to_a_floor_below_one(place):
    strategy, mode = place
    weight, optimizer = build(strategy, initial_scale=4, min_scale=0.25)
    assert not bool(optimizer.at_floor)
    scales = apply(optimizer, weight, strategy, mode, [np.inf] * 5)
    assert scales == [2, 1, 0.5, 0.25, 0.25]
    assert bool(optimizer.at_floor)
    np.testing.assert_array_equal(weight.numpy(), [1, 2])
    assert int(optimizer.iterations.numpy()) == 0
    assert int(optimizer.skipped.numpy()) == int(optimizer.skipped_in_a_row.numpy()) == 5


def test_scale_doubles_after_growth_steps_good_ones_and_counts_apart(place):
    strategy, mode = place
    weight, optimizer = build(strategy, initial_scale=8, growth_steps=3)
    gradients = [1, 1, np.nan, 1, 1, 1, 1]
    assert apply(optimizer, weight, strategy, mode, gradients) == [8, 8, 4, 4, 4, 8, 8]
    assert int(optimizer.dynamic_counter.numpy()) == 1
    assert int(optimizer.iterations.numpy()) == 6
    assert (int(optimizer.skipped.numpy()), int(optimizer.skipped_in_a_row.numpy())) == (1, 0)
    np.testing.assert_array_equal(weight.numpy(), [1 - 6, 2 - 6])


def test_frozen_steps_change_nothing_at_all(place):
    strategy, mode = place
    weight, optimizer = build(strategy, initial_scale=8, growth_steps=2)
    frozen = [False, True, True, False]
    assert apply(optimizer, weight, strategy, mode, [1, 1, np.nan, 1], frozen) == [8, 8, 8, 16]
    assert int(optimizer.iterations.numpy()) == 2
    assert int(optimizer.skipped.numpy()) == 0
    np.testing.assert_array_equal(weight.numpy(), [-1, 0])


def test_an_optimizer_of_keras_skips_too_and_counts_applied_updates(place):
    strategy, mode = place
    inner = lambda: keras.optimizers.SGD(1.0, jit_compile=False)  # noqa: E731
    weight, optimizer = build(strategy, inner, initial_scale=8)
    assert apply(optimizer, weight, strategy, mode, [1, np.inf, 1]) == [8, 4, 4]
    np.testing.assert_array_equal(weight.numpy(), [-1, 0])
    assert int(optimizer.iterations.numpy()) == 2


def test_nan_on_one_replica_skips_on_both(mirrored):
    weight, optimizer = build(mirrored, initial_scale=8)

    @tf.function
    def step():
        def replica():
            first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
            optimizer.apply_gradients([(tf.where(first, [np.inf, 1.0], [1.0, 1.0]), weight)])

        mirrored.run(replica)

    step()
    for local in mirrored.experimental_local_results(weight):
        np.testing.assert_array_equal(local.numpy(), [1, 2])
    assert float(optimizer.loss_scale) == 4


def test_a_fixed_scale_never_moves_but_still_skips():
    strategy = tf.distribute.get_strategy()
    weight, optimizer = build(strategy, initial_scale=16, dynamic=False, growth_steps=1)
    assert apply(optimizer, weight, strategy, "eager", [1, np.nan, 1]) == [16, 16, 16]
    np.testing.assert_array_equal(weight.numpy(), [-1, 0])
    assert optimizer.dynamic is False and optimizer.dynamic_counter is None
    assert int(optimizer.skipped) == 1


def test_growth_stops_while_the_reciprocal_is_still_exact():
    strategy = tf.distribute.get_strategy()
    weight, optimizer = build(strategy, initial_scale=2**23, growth_steps=1)
    assert apply(optimizer, weight, strategy, "eager", [1] * 3) == [2**24] * 3


def test_the_callers_verdict_decides_and_without_one_the_gradients_are_looked_at():
    weight, optimizer = build(tf.distribute.get_strategy(), initial_scale=8)
    optimizer.apply_gradients([(tf.ones([2]), weight)], ok=tf.constant(False))
    np.testing.assert_array_equal(weight.numpy(), [1, 2])
    assert float(optimizer.loss_scale) == 4
    optimizer.apply_gradients([(tf.fill([2], np.nan), weight)])
    np.testing.assert_array_equal(weight.numpy(), [1, 2])
    assert float(optimizer.loss_scale) == 2


def test_schedule_and_bias_correction_follow_applied_updates():
    # [ok, inf, inf, ok]: applied 2, skipped 2, and the second update runs at the rate of step 1.
    schedule = schedules.Linear(1.0, 4)
    weight, optimizer = build(tf.distribute.get_strategy(), lambda: SGD(schedule))
    apply(optimizer, weight, tf.distribute.get_strategy(), "eager", [1, np.inf, np.inf, 1])
    assert (int(optimizer.iterations), int(optimizer.skipped)) == (2, 2)
    np.testing.assert_allclose(weight.numpy(), np.array([1, 2]) - 1 - 0.75)
    gradients = make_gradients(2)
    bad = [np.full_like(grad, -np.inf) for grad in gradients[0]]
    results = []
    for steps in ([gradients[0], bad, bad, gradients[1]], gradients):
        variables, inner = make_variables(), LAMB(0.1, weight_decay=0.1)
        run(LossScale(inner), variables, steps, "jit")
        results.append([v.numpy() for v in variables] + state(inner))
    assert same_bits(*results)


def test_by_hand_the_clip_sees_unscaled_gradients():
    # True gradient 0.5, scale 1024, clip 1: the weight moves by -0.5, not by -1.
    weight = tf.Variable(0.0)
    optimizer = LossScale(SGD(1.0, global_clipnorm=1.0), initial_scale=1024)
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(0.5 * weight)
    grads = tape.gradient(scaled, [weight])
    assert float(grads[0]) == 512
    optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(grads), [weight]))
    assert float(weight) == -0.5
    optimizer.minimize(lambda: 0.5 * weight, [weight])
    assert float(weight) == -1.0


@pytest.mark.parametrize("jit", [False, True])
def test_in_plain_keras_fit_the_clip_sees_unscaled_gradients(jit):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    model.compile(
        optimizer=LossScale(SGD(1.0, global_clipnorm=1.0), initial_scale=1024),
        loss=lambda y, out: 0.5 * out,
        jit_compile=jit,
    )
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=4, epochs=1, verbose=0)
    assert float(model.layers[0].kernel[0, 0]) == -0.5


def test_gradients_that_are_still_scaled_are_an_error():
    weight = tf.Variable(0.0)
    optimizer = LossScale(SGD(1.0))
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(0.5 * weight)
    grads = tape.gradient(scaled, [weight])
    with pytest.raises(UserError, match="get_unscaled_gradients"):
        optimizer.apply_gradients(zip(grads, [weight]))
    assert float(weight) == 0.0


def test_low_precision_losses_and_gradients_are_scaled_in_float32():
    optimizer = LossScale(SGD(1.0), initial_scale=2**24)
    assert float(optimizer.get_scaled_loss(tf.constant(2.0, tf.float16))) == 2.0**25
    (grad, none) = optimizer.get_unscaled_gradients([tf.constant(2.0, tf.float16), None])
    assert float(grad) == 2.0**-23 and grad.dtype == tf.float32 and none is None


def test_keras_takes_it_for_its_own_and_wraps_no_further():
    optimizer = LossScale(AdamW(0.1))
    assert isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="float32")])
        model.compile(optimizer=optimizer, loss="mse")
        assert model.optimizer is optimizer
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_wrapping_twice_is_wrapping_once(tmp_path):
    inner = LAMB(0.1)
    assert wrap(wrap(inner)) is wrap(inner)
    assert wrap(inner, initial_scale=2).inner_optimizer is inner
    path = tf.train.Checkpoint(optimizer=wrap(wrap(inner))).save(str(tmp_path / "c"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert sum("current_loss_scale" in name for name in names) == 1


def test_optimizers_that_scale_already_or_belong_elsewhere_are_refused():
    with pytest.raises(UserError, match="already scales"):
        LossScale(LossScale(SGD(1.0)))
    with pytest.raises(UserError, match="already scales"):
        LossScale(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD()))
    inner = keras.optimizers.SGD()
    keras.mixed_precision.LossScaleOptimizer(inner)
    with pytest.raises(UserError, match="already scales"):
        wrap(inner)
    with pytest.raises(TypeError, match="legacy"):
        LossScale(keras.optimizers.legacy.SGD())
    with pytest.raises(TypeError, match="tf_keras optimizer"):
        LossScale("adam")
    with pytest.raises(UserError, match="min_scale"):
        LossScale(SGD(1.0), initial_scale=1, min_scale=2)
    with pytest.raises(UserError, match="growth_steps"):
        LossScale(SGD(1.0), growth_steps=0)


def test_config_round_trip():
    optimizer = LossScale(LAMB(schedules.Cosine(0.1, 10)), 512, False, 7, 0.5, 2**20)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(config)
    assert type(again) is LossScale and type(again.inner_optimizer) is LAMB
    assert again.get_config() == optimizer.get_config()


def test_checkpoint_keeps_scale_good_steps_and_skips(tmp_path):
    strategy = tf.distribute.get_strategy()
    weight, optimizer = build(strategy, lambda: AdamW(0.1), initial_scale=4096)
    apply(optimizer, weight, strategy, "eager", [np.inf] + [1] * 7)
    path = tf.train.Checkpoint(optimizer=optimizer, weight=weight).save(str(tmp_path / "c"))
    other_weight, other = build(strategy, lambda: AdamW(0.1), initial_scale=16)
    status = tf.train.Checkpoint(optimizer=other, weight=other_weight).restore(path)
    status.assert_consumed()
    assert float(other.loss_scale) == 2048 and int(other.dynamic_counter) == 7
    assert int(other.skipped) == 1 and int(other.iterations) == 7
    for one, name in ((optimizer, weight), (other, other_weight)):
        apply(one, name, strategy, "eager", [3, 5])
    assert same_bits(state(optimizer), state(other))
    np.testing.assert_array_equal(weight.numpy(), other_weight.numpy())


def test_checkpoint_of_the_wrapper_or_of_its_inner_optimizer_holds_the_same_tree(tmp_path):
    strategy = tf.distribute.get_strategy()
    weight, optimizer = build(strategy, lambda: AdamW(0.1))
    apply(optimizer, weight, strategy, "eager", [1, 2])
    names = []
    for index, one in enumerate((optimizer, optimizer.inner_optimizer)):
        path = tf.train.Checkpoint(optimizer=one).save(str(tmp_path / str(index)))
        names.append([name for name, _ in tf.train.list_variables(path)])
    assert names[0] == names[1]
    assert any("current_loss_scale" in name for name in names[0])


def test_checkpoint_with_a_scale_restores_an_optimizer_without(tmp_path):
    strategy = tf.distribute.get_strategy()
    weight, optimizer = build(strategy, lambda: AdamW(0.1))
    apply(optimizer, weight, strategy, "eager", [1, 2])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "c"))
    bare, fresh = AdamW(0.1), tf.Variable([1.0, 2.0])
    bare.build([fresh])
    status = tf.train.Checkpoint(optimizer=bare).restore(path)
    status.assert_existing_objects_matched()
    assert same_bits(state(bare), state(optimizer.inner_optimizer))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_fit_of_a_keras_model_under_each_policy(make, policy, replicas, mirrored):
    strategy = mirrored if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, "relu", dtype=policy),
                keras.layers.Dense(2, dtype="float32"),
            ]
        )
        model.compile(optimizer=LossScale(make()), loss="mse")
    x, y = np.ones((12, 3), "f"), np.ones((12, 2), "f")
    losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert int(model.optimizer.iterations.numpy()) == 6
    assert int(model.optimizer.skipped.numpy()) == 0


def test_saved_keras_model_keeps_the_scale_optimizer(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=LossScale(LAMB(0.1, exclude_from_weight_decay=["bias"])), loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is LossScale
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert same_bits(state(again.optimizer), state(model.optimizer))


def test_finite_check_sees_every_element():
    good, bad = tf.ones([3]), tf.constant([1.0, -np.inf, 0.0])
    assert bool(all_finite([good, None, good]))
    assert not bool(all_finite([good, bad]))
    assert not bool(all_finite([tf.IndexedSlices(bad, tf.range(3), tf.constant([5]))]))
    assert bool(all_finite([]))
