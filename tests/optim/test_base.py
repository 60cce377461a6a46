"""What every optimizer must do: masks, groups, slots, configuration, modes, checkpoints."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from optim_helpers import (
    list_parameters,
    make_gradients,
    make_variables,
    run,
    same_bits,
    state,
)
from tf_keras.src.mixed_precision import autocast_variable

from vit_tpu.errors import UserError
from vit_tpu.optim import LAMB, SGD, AdamW, GroupedOptimizer, schedules
from vit_tpu.optim.base import bias_correction
from vit_tpu.optim.decay import resolve


def test_modes_and_replicas_agree(make, mirrored):
    gradients, results = make_gradients(3), {}
    for mode, strategy in (("eager", None), ("graph", None), ("jit", None), ("graph", mirrored)):
        with (strategy or tf.distribute.get_strategy()).scope():
            variables, optimizer = make_variables(), make(momentum_dtype="float32")
        results[mode, strategy] = run(optimizer, variables, gradients, mode, strategy)
        assert int(optimizer.iterations.numpy()) == 3
    for weights in results.values():
        for got, want, start in zip(weights, results["eager", None], make_variables()):
            assert np.abs(want - start.numpy()).max() > 1e-3
            np.testing.assert_allclose(got, want, rtol=0, atol=3e-7)


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_skipped_updates_leave_every_bit_and_the_count(make, mode):
    gradients = make_gradients(4)
    gradients[1] = [np.full_like(grad, np.nan) for grad in gradients[1]]
    schedule = schedules.Cosine(0.1, 10, warmup_steps=2)
    variables, optimizer = make_variables(), make(learning_rate=schedule)
    run(optimizer, variables, gradients, mode, oks=[True, False, False, True])
    clean, other = make_variables(), make(learning_rate=schedule)
    run(other, clean, [gradients[0], gradients[3]], mode, oks=[True, True])
    assert same_bits([v.numpy() for v in variables], [v.numpy() for v in clean])
    assert same_bits(state(optimizer), state(other))
    assert int(optimizer.iterations) == 2


def test_skipped_update_on_two_replicas_changes_nothing(make, mirrored):
    with mirrored.scope():
        variables, optimizer = make_variables(), make()
    gradients = make_gradients(2)
    run(optimizer, variables, gradients[:1], "graph", mirrored, oks=[True])
    before = state(optimizer) + [v.numpy() for v in variables]
    run(optimizer, variables, gradients[1:], "graph", mirrored, oks=[False])
    assert same_bits(before, state(optimizer) + [v.numpy() for v in variables])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_variables_are_refused_with_the_fix(make, dtype):
    variable = tf.Variable(tf.cast([300.0], dtype), name="w")
    with pytest.raises(TypeError, match=f"{dtype}.*float32.*mixed"):
        make().apply_gradients([(tf.ones([1], dtype), variable)])


def test_under_a_mixed_policy_the_float32_value_is_updated():
    layer = keras.layers.Dense(1, use_bias=False, dtype="mixed_bfloat16")
    layer.build((None, 1))
    fine = 1 + 2.0**-12
    layer.kernel.assign([[fine]])
    optimizer = SGD(1.0)
    with autocast_variable.enable_auto_cast_variables(tf.bfloat16):
        assert float(tf.convert_to_tensor(layer.kernel)[0, 0]) == 1  # what a layer would see
        optimizer.apply_gradients([(tf.constant([[2.0**-13]]), layer.kernel)])
    assert layer.kernel.numpy()[0, 0] == fine - 2.0**-13


@pytest.mark.parametrize(
    ("option", "advice"),
    [("clipnorm", "grad_clip_norm"), ("clipvalue", "grad_clip_norm"), ("use_ema", "ema=")],
)
def test_keras_arguments_with_a_better_place_are_refused(make, option, advice):
    with pytest.raises(UserError, match=advice):
        make(**{option: 1.0})


def test_bad_arguments_name_the_nearest(make):
    with pytest.raises(UserError, match='"weight_decay"'):
        make(weight_decya=0.1)
    with pytest.raises(UserError, match="weight_decay is -1"):
        make(weight_decay=-1.0)
    with pytest.raises(UserError, match="learning_rate"):
        make(learning_rate=-1e-3)
    with pytest.raises(UserError, match="LearningRateSchedule"):
        make(learning_rate="0.1")
    with pytest.raises(UserError, match="bfloat16"):
        make(momentum_dtype="float16")


def test_global_clipnorm_acts_on_the_sum_over_replicas(mirrored):
    # Gradients 10 and -8: the sum 2 is clipped to 1. Clipping first would give 0.
    with mirrored.scope():
        variable, optimizer = tf.Variable([0.0]), SGD(1.0, global_clipnorm=1.0)

    @tf.function
    def step():
        def replica():
            first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
            optimizer.apply_gradients([(tf.where(first, [10.0], [-8.0]), variable)])

        mirrored.run(replica)

    step()
    np.testing.assert_allclose(variable.numpy(), [-1.0], atol=1e-6)
    assert optimizer.get_config()["global_clipnorm"] == 1.0


def test_decay_follows_the_schedule_with_a_value_of_its_own_for_the_head(make):
    # Half of the peak at step 1 of 2; zero gradient: w <- w - 0.5 * peak * decay * w.
    schedule = schedules.Linear(0.2, total_steps=2)
    optimizer = make(learning_rate=schedule, weight_decay=0.03, head_weight_decay=3.0)
    parameters = list_parameters()
    optimizer.assign_groups(resolve(parameters))
    variables = [p.variable for p in parameters]
    optimizer.build(variables)
    optimizer.iterations.assign(1)
    before = [v.numpy() for v in variables]
    optimizer.apply_gradients([(tf.zeros_like(v), v) for v in variables])
    for parameter, old in zip(parameters, before):
        decay = {"head/kernel": 3.0}.get(parameter.path, 0.03 * (parameter.kind == "kernel"))
        want = old * (1 - 0.1 * decay)
        np.testing.assert_allclose(parameter.variable.numpy(), want, rtol=1e-6)


def test_config_round_trip_keeps_every_update(make):
    options = {
        "learning_rate": schedules.ReciprocalSqrt(0.1, 20, warmup_steps=1, timescale=5),
        "head_weight_decay": 3.0,
        "exclude_from_weight_decay": ["bias", "norm*"],
        "exclude_from_layer_adaptation": ["head/*"],
        "global_clipnorm": 2.0,
    }
    results = []
    for trip in range(3):
        parameters = list_parameters()
        optimizer = make(**options)
        optimizer.assign_groups(resolve(parameters, layer_decay=0.5, freeze=["posemb"]))
        if trip:  # 1: by order and shape; 2: the model assigns its (other) groups by path
            optimizer = type(optimizer).from_config(optimizer.get_config())
        if trip == 2:
            optimizer.assign_groups(resolve(parameters))
        variables = [p.variable for p in parameters]
        rng = np.random.default_rng(5)
        gradients = [[rng.normal(size=v.shape).astype("f") for v in variables] for _ in range(3)]
        results.append(run(optimizer, variables, gradients) + state(optimizer))
        bias = parameters[-1]
        assert optimizer.rule(bias.variable).decay == "none"
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_config_is_plain_and_keras_rebuilds_our_class(make):
    import json

    optimizer = make(learning_rate=schedules.Cosine(0.1, 10))
    optimizer.assign_groups(resolve(list_parameters(), layer_decay=0.5))
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


def test_exclusions_survive_before_any_variable_is_known(make):
    optimizer = make(learning_rate=1.0, exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=["stem/*"])
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    variables = make_variables()
    again.build(variables)
    kept = {again.rule(v).path: (again.rule(v).decay, again.rule(v).trust) for v in variables}
    assert kept["bias"] == ("none", True)
    assert kept["stem/kernel"] == ("body", False)


@pytest.mark.parametrize("stacked", [False, True])
def test_layer_decay_scales_the_step_and_the_decay(stacked):
    # w <- w - lr * scale * (g + decay * w), gradient 1, lr 0.5, weight decay 0.2.
    parameters = list_parameters(stacked=stacked)
    optimizer = SGD(0.5, weight_decay=0.2)
    optimizer.assign_groups(resolve(parameters, layer_decay=0.5))
    before = {p.path: p.variable.numpy() for p in parameters}
    optimizer.apply_gradients([(tf.ones_like(p.variable), p.variable) for p in parameters])
    after = {p.path: p.variable.numpy() for p in parameters}
    scales = {"embedding/kernel": 0.125, "head/kernel": 1.0}
    if stacked:
        scales["blocks/attention/query/kernel"] = np.reshape([0.25, 0.5], [2, 1, 1, 1])
    else:
        scales |= {"blocks/0/attention/query/kernel": 0.25, "blocks/1/attention/query/kernel": 0.5}
    for path, scale in scales.items():
        want = before[path] - 0.5 * scale * (1 + 0.2 * before[path])
        np.testing.assert_allclose(after[path], want, rtol=1e-5, atol=1e-6)


def test_saved_groups_of_another_model_are_an_error(make):
    optimizer = make()
    optimizer.assign_groups(resolve(list_parameters()))
    again = type(optimizer).from_config(optimizer.get_config())
    with pytest.raises(UserError, match="assign the new model's groups"):
        again.build(make_variables())


def test_settings_asked_for_win_over_saved_ones_when_told_so():
    optimizer = AdamW()
    optimizer.assign_groups(resolve(list_parameters(), layer_decay=0.5))
    again = AdamW.from_config(optimizer.get_config())
    parameters = list_parameters()
    again.assign_groups(resolve(parameters), keep_saved=False)
    assert again.rule(parameters[0].variable).lr_scale == 1


def test_exclusions_are_globs_of_whole_words_not_substrings():
    # 'bias' must not catch 'unbiased_proj/kernel'; a pattern that catches nothing is an error.
    shapes = {"unbiased_proj/kernel": (2, 2), "dense/bias": (2,)}
    variables, optimizer = make_variables(shapes), AdamW(exclude_from_weight_decay=["bias"])
    optimizer.build(variables)
    assert [optimizer.rule(v).decay for v in variables] == ["body", "none"]
    with pytest.raises(UserError, match=r'"biass" matches no parameter \(did you mean "bias"'):
        AdamW(exclude_from_weight_decay=["biass"]).build(variables)
    with pytest.raises(UserError, match="list of patterns"):
        AdamW(exclude_from_weight_decay="bias")


def test_empty_exclusion_list_excludes_nothing_and_none_leaves_it_to_the_groups():
    parameters = list_parameters()
    bias, head = parameters[-1].variable, parameters[-2].variable
    for patterns, decay in ((None, "none"), ([], "body")):
        optimizer = LAMB(exclude_from_weight_decay=patterns, exclude_from_layer_adaptation=patterns)
        optimizer.assign_groups(resolve(parameters))
        assert optimizer.rule(bias).decay == decay
        assert optimizer.rule(bias).trust is (patterns == [])
        assert optimizer.rule(head).decay == "head"


def test_without_groups_every_variable_decays_by_the_body_value(make):
    variables, optimizer = make_variables(), make(learning_rate=1.0, weight_decay=0.25)
    before = [v.numpy() for v in variables]
    optimizer.apply_gradients([(tf.zeros_like(v), v) for v in variables])
    for variable, old in zip(variables, before):
        np.testing.assert_allclose(variable.numpy(), old * 0.75, rtol=1e-6)


def test_frozen_variables_stay_and_have_no_slots(make):
    parameters = list_parameters()
    optimizer = make()
    optimizer.assign_groups(resolve(parameters, freeze=["body"]))
    variables = [p.variable for p in parameters]
    before = [v.numpy() for v in variables]
    optimizer.apply_gradients([(tf.ones_like(v), v) for v in variables])
    for parameter, old in zip(parameters, before):
        moved = not np.array_equal(parameter.variable.numpy(), old)
        assert moved == (parameter.part == "head"), parameter.path
    paths = {path for slots in optimizer._slots.values() for path in slots}
    assert paths == {"head/kernel", "head/bias"}


def test_slot_names_say_what_they_are(make):
    parameters = list_parameters()
    optimizer = make()
    optimizer.assign_groups(resolve(parameters))
    optimizer.build([p.variable for p in parameters])
    names = {v.name for v in optimizer.variables}
    assert "momentum/blocks/0/attention/query/kernel:0" in names


def test_bfloat16_momentum_saves_two_bytes_a_parameter_and_touches_nothing_else(make):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        variables, optimizer = make_variables(), make(momentum_dtype=dtype)
        optimizer.build(variables)
        for variable in optimizer.variables:
            kind = variable.name.split("/")[0]
            expected = {"momentum": dtype, "iteration:0": "int64"}.get(kind, "float32")
            assert variable.dtype == expected, variable.name
        sizes[dtype] = sum(v.dtype.size * np.prod(v.shape) for v in optimizer.variables)
    parameters = sum(np.prod(v.shape) for v in variables)
    assert sizes["float32"] - sizes["bfloat16"] == 2 * parameters


def test_bfloat16_momentum_learns_as_float32(make):
    # 200 steps of least squares with noise: the loss differs by less than 1 %.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("f")
    y = x @ rng.normal(size=(8, 3)).astype("f") + rng.normal(size=(64, 3)).astype("f")
    losses = {}
    for dtype in ("float32", "bfloat16"):
        w, schedule = tf.Variable(tf.ones([8, 3])), schedules.Cosine(0.1, 200)
        optimizer = make(learning_rate=schedule, momentum_dtype=dtype, weight_decay=0.0)

        @tf.function
        def step(w=w, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            return loss

        losses[dtype] = [float(step()) for _ in range(200)][-1]
    assert losses["float32"] < 2
    assert abs(losses["bfloat16"] / losses["float32"] - 1) < 0.01


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_stacked_blocks_train_as_unrolled_ones(make, layer_decay):
    results = []
    for stacked in (False, True):
        parameters = list_parameters(stacked=stacked)
        optimizer = make(exclude_from_layer_adaptation=[], momentum_dtype="float32")
        optimizer.assign_groups(resolve(parameters, layer_decay=layer_decay))
        named = {p.path: p.variable for p in parameters}
        for step in range(3):
            rng = np.random.default_rng(step)
            made = {}  # the same gradient for "blocks/0/x" and slice 0 of "blocks/x"
            for p in list_parameters():
                made[p.path] = rng.normal(size=p.variable.shape).astype("f")
            if stacked:
                for path in [p.path for p in parameters if p.stacked]:
                    rest = path.removeprefix("blocks/")
                    made[path] = np.stack([made[f"blocks/{i}/{rest}"] for i in range(2)])
            optimizer.apply_gradients([(made[path], v) for path, v in named.items()])
        values = {path: v.numpy() for path, v in named.items()}
        if stacked:
            for path in [p.path for p in parameters if p.stacked]:
                rest = path.removeprefix("blocks/")
                values.update({f"blocks/{i}/{rest}": values[path][i] for i in range(2)})
        results.append(values)
    for path, value in results[0].items():
        np.testing.assert_allclose(results[1][path], value, rtol=0, atol=5e-7, err_msg=path)


def test_checkpoint_resumes_bit_for_bit_also_when_restored_before_building(make, tmp_path):
    gradients = make_gradients(6)
    schedule = schedules.Cosine(0.1, 10, warmup_steps=2)
    whole, variables = make(learning_rate=schedule), make_variables()
    want = run(whole, variables, gradients, "graph")

    first, variables = make(learning_rate=schedule), make_variables()
    run(first, variables, gradients[:3], "graph")
    path = tf.train.Checkpoint(optimizer=first, weights=variables).save(str(tmp_path / "c"))
    for built_first in (True, False):
        second, variables = make(learning_rate=schedule), make_variables(seed=9)
        if built_first:
            second.build(variables)
        status = tf.train.Checkpoint(optimizer=second, weights=variables).restore(path)
        if built_first:
            status.assert_consumed()
        got = run(second, variables, gradients[3:], "graph")
        assert same_bits(got, want)
        assert same_bits(state(second), state(whole))


def test_checkpoint_saved_once_before_building_still_gets_the_slots(make, tmp_path):
    optimizer, variables = make(), make_variables()
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    checkpoint.save(str(tmp_path / "early"))
    run(optimizer, variables, make_gradients(1))
    path = checkpoint.save(str(tmp_path / "late"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("momentum" in name and "head.Skernel" in name for name in names), names


def test_keras_model_saves_and_reloads_with_the_optimizer(make, tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=make(learning_rate=0.05), loss="mse")
    x, y = np.ones((8, 3), "f"), np.ones((8, 2), "f")
    model.fit(x, y, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is type(model.optimizer)
    assert same_bits(state(again.optimizer), state(model.optimizer))
    for one in (model, again):
        one.fit(x, y, epochs=2, verbose=0)
    assert same_bits(model.get_weights(), again.get_weights())


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_plain_keras_fit_under_each_policy(make, policy):
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "relu", dtype=policy),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    model.compile(optimizer=make(), loss="mse", jit_compile=True)
    history = model.fit(np.ones((12, 3)), np.ones((12, 2)), batch_size=4, epochs=3, verbose=0)
    losses = history.history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_sparse_and_missing_gradients():
    table, idle = tf.Variable(tf.zeros([4, 2])), tf.Variable([1.0])
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([4, 2]))
    optimizer = SGD(1.0)
    optimizer.apply_gradients([(slices, table), (None, idle)])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-2, -2], [0, 0], [0, 0]])
    assert idle.numpy() == [1.0]


def test_unknown_variable_is_named():
    optimizer = SGD(1.0)
    optimizer.build([tf.Variable([1.0], name="known")])
    with pytest.raises(UserError, match="stranger"):
        optimizer.apply_gradients([(tf.ones([1]), tf.Variable([1.0], name="stranger"))])


def test_learning_rate_is_settable_and_a_schedule_refuses_to_be_overwritten():
    optimizer = SGD(1.0)
    optimizer.learning_rate = 0.5
    assert float(optimizer.lr) == 0.5
    scheduled = SGD(schedules.Linear(1.0, 10))
    scheduled.build([tf.Variable([1.0])])
    scheduled.iterations.assign(5)
    assert float(scheduled.learning_rate) == 0.5
    with pytest.raises(UserError, match="follows a schedule"):
        scheduled.learning_rate = 0.1


def test_older_keras_calls():
    variable, optimizer = tf.Variable([1.0]), SGD(1.0)
    optimizer.apply_gradients([(tf.ones([1]), variable)], experimental_aggregate_gradients=False)
    assert variable.numpy() == [0.0]
    optimizer.minimize(lambda: tf.reduce_sum(variable * 2), [variable])
    assert variable.numpy() == [-2.0]
    with pytest.raises(UserError, match=r"exclude_from_weight_decay=\[patterns\]"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def test_groups_may_change_after_building_unless_slots_would():
    parameters = list_parameters()
    optimizer = AdamW()
    optimizer.assign_groups(resolve(parameters))
    optimizer.build([p.variable for p in parameters])
    optimizer.assign_groups(resolve(parameters, layer_decay=0.5))
    assert optimizer.rule(parameters[0].variable).lr_scale == 0.5**3
    with pytest.raises(UserError, match="make a new optimizer"):
        optimizer.assign_groups(resolve(parameters, freeze=["posemb"]))


@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_bias_correction_is_exact_for_few_and_for_many_steps(beta):
    for step in (1, 2, 1000, 10**6, 2**24 + 1, 2**40):
        got = float(bias_correction(beta, tf.constant(step, tf.int64)))
        assert got == pytest.approx(-np.expm1(step * np.log(beta)), rel=3e-7)
    assert got == 1.0


def test_iterations_count_beyond_what_float32_can():
    optimizer, variable = SGD(1.0), tf.Variable([0.0])
    optimizer.build([variable])
    optimizer.iterations.assign(2**24)
    for _ in range(3):
        optimizer.apply_gradients([(tf.ones([1]), variable)])
    assert optimizer.iterations.dtype == tf.int64
    assert int(optimizer.iterations) == 2**24 + 3


def test_all_are_new_style_keras_optimizers(make):
    assert isinstance(make(), keras.optimizers.Optimizer)
    assert isinstance(make(), GroupedOptimizer)
