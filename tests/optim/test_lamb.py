"""LAMB in both conventions: float64 models, other implementations, hand-worked values."""

import importlib

import numpy as np
import pytest
import tensorflow as tf
from optim_helpers import list_parameters, make_gradients, make_variables, run, same_bits

from vit_tpu.errors import UserError
from vit_tpu.optim import LAMB, LossScale
from vit_tpu.optim.decay import Parameter, resolve

MIXED = {
    "dense/kernel": (6, 5),
    "dense/bias": (5,),
    "norm/scale": (5,),
    "query/kernel": (5, 2, 4),
    "zero/kernel": (5, 3),
    "posemb": (1, 7, 5),
}


def mixed_variables():
    variables = make_variables(MIXED)
    variables[4].assign(tf.zeros_like(variables[4]))
    return variables


def lamb_in_float64(variables, gradients, lr, decays, trusted, style, epsilon=1e-6):
    """An independent model: plain numpy, double precision."""
    weights = [v.numpy().astype(np.float64) for v in variables]
    m, v = [0 * w for w in weights], [0 * w for w in weights]
    for t, grads in enumerate(gradients, start=1):
        for i, grad in enumerate(grads):
            m[i] = 0.9 * m[i] + 0.1 * grad.astype(np.float64)
            v[i] = 0.999 * v[i] + 0.001 * grad.astype(np.float64) ** 2
            u = m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - 0.999**t)) + epsilon)
            inside, outside = (decays[i], 0) if style == "paper" else (0, decays[i])
            x = u + inside * weights[i]
            norms = np.linalg.norm(weights[i]), np.linalg.norm(x)
            ratio = norms[0] / norms[1] if trusted[i] and min(norms) > 0 else 1
            weights[i] = weights[i] - lr * (ratio * x + outside * weights[i])
    return weights


@pytest.mark.parametrize("style", ["decoupled", "paper"])
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_equals_a_float64_model_for_twenty_steps(style, mode):
    gradients, variables = make_gradients(20, MIXED), mixed_variables()
    decays, trusted = [0.1, 0, 0, 0.1, 0.1, 0.1], [1, 1, 0, 1, 1, 0]
    want = lamb_in_float64(variables, gradients, 0.01, decays, trusted, style)
    optimizer = LAMB(
        0.01,
        weight_decay=0.1,
        decay_style=style,
        exclude_from_weight_decay=["bias", "norm"],
        exclude_from_layer_adaptation=["norm", "posemb"],
    )
    got = run(optimizer, variables, gradients, mode)
    for one, two in zip(got, want):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def test_the_float64_model_tells_the_styles_apart():
    gradients, variables = make_gradients(20, MIXED), mixed_variables()
    one, two = (
        lamb_in_float64(variables, gradients, 0.01, [0.1] * 6, [1] * 6, style) for style in ("decoupled", "paper")
    )
    assert max(np.abs(a - b).max() for a, b in zip(one, two)) > 1e-3


def test_equals_tf_models_official_for_twenty_steps():
    lamb = pytest.importorskip("official.modeling.optimization.lamb")
    gradients = make_gradients(20, MIXED)
    ours, theirs = mixed_variables(), mixed_variables()
    run(
        LAMB(
            0.01,
            weight_decay=0.1,
            decay_style="paper",
            exclude_from_weight_decay=["bias", "norm"],
            exclude_from_layer_adaptation=["norm", "posemb"],
        ),
        ours,
        gradients,
    )
    other = lamb.LAMB(
        0.01,
        weight_decay_rate=0.1,
        exclude_from_weight_decay=["bias", "norm"],
        exclude_from_layer_adaptation=["norm", "posemb"],
    )
    for grads in gradients:
        other.apply_gradients([(tf.constant(g), v) for g, v in zip(grads, theirs)])
    for one, two in zip(ours, theirs):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=0, atol=1e-6)


def test_equals_addons_for_twenty_steps():
    try:
        bridge = importlib.import_module("vit_tpu.optim.addons_bridge")
        addons_lamb = bridge.load_lamb()
    except (ImportError, UserError) as error:
        pytest.skip(f"the extra `addons` is not installed: {error}")
    gradients = make_gradients(20, MIXED)
    ours, theirs = mixed_variables(), mixed_variables()
    exclusions = {
        "exclude_from_weight_decay": ["bias", "norm"],
        "exclude_from_layer_adaptation": ["norm", "posemb"],
    }
    run(LAMB(0.01, weight_decay=0.1, decay_style="paper", **exclusions), ours, gradients)
    other = addons_lamb(0.01, weight_decay=0.1, **exclusions)
    for grads in gradients:
        other.apply_gradients([(tf.constant(g), v) for g, v in zip(grads, theirs)])
    for one, two in zip(ours, theirs):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("style", ["decoupled", "paper"])
def test_zero_weights_take_a_plain_step_and_zero_gradients_none(style):
    weights, still = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])
    optimizer = LAMB(1.0, decay_style=style)
    optimizer.apply_gradients([(tf.ones([2]), weights), (tf.zeros([2]), still)])
    np.testing.assert_allclose(weights.numpy(), [-1, -1], rtol=2e-6)
    np.testing.assert_array_equal(still.numpy(), [0, 0])
    moved = tf.Variable([3.0, 4.0])
    LAMB(1.0, decay_style=style).apply_gradients([(tf.zeros([2]), moved)])
    np.testing.assert_array_equal(moved.numpy(), [3, 4])


@pytest.mark.parametrize(("style", "decay", "want"), [("paper", 0.1, [0, 0]), ("decoupled", 0.5, [1.5, 2])])
def test_where_decay_goes(style, decay, want):
    weights = tf.Variable([3.0, 4.0])
    optimizer = LAMB(1.0, weight_decay=decay, decay_style=style)
    optimizer.apply_gradients([(tf.zeros([2]), weights)])
    np.testing.assert_allclose(weights.numpy(), want, atol=1e-6)


@pytest.mark.parametrize("style", ["decoupled", "paper"])
def test_excluded_from_decay_is_still_trust_scaled(style):
    # direction [1, 1], |w| = 5, |direction| = sqrt(2): w - 5 / sqrt(2), not the plain Adam step.
    weights = tf.Variable([3.0, 4.0], name="w")
    optimizer = LAMB(1.0, weight_decay=0.1, decay_style=style, exclude_from_weight_decay=["w"])
    optimizer.apply_gradients([(tf.ones([2]), weights)])
    step = 5 / np.sqrt(2)
    np.testing.assert_allclose(weights.numpy(), [3 - step, 4 - step], atol=1e-5)


@pytest.mark.parametrize(("style", "want"), [("decoupled", [1.7, 2.6]), ("paper", [1.7, 2.6])])
def test_excluded_from_trust_ratio_still_decays(style, want):
    # w - (1 + 0.1 * w): without a trust ratio the two conventions are one.
    weights = tf.Variable([3.0, 4.0], name="w")
    optimizer = LAMB(1.0, weight_decay=0.1, decay_style=style, exclude_from_layer_adaptation=["w"])
    optimizer.apply_gradients([(tf.ones([2]), weights)])
    np.testing.assert_allclose(weights.numpy(), want, atol=1e-5)


def test_by_default_kernels_alone_are_decayed_and_those_of_the_body_trust_scaled():
    parameters = list_parameters()
    optimizer = LAMB(weight_decay=0.1)
    optimizer.assign_groups(resolve(parameters))
    for parameter in parameters:
        rule = optimizer.rule(parameter.variable)
        kernel = parameter.kind == "kernel"
        body = kernel and parameter.path != "head/kernel"
        assert (rule.trust, rule.decay != "none") == (body, kernel), parameter.path


def test_a_head_that_starts_at_zero_grows_as_with_adam_by_default():
    # With a trust ratio its own length |w| / |direction| would be its rate, and 50 steps would bring it to 0.06.
    head = tf.Variable(tf.zeros([2, 2]))
    optimizer = LAMB(0.02)
    optimizer.assign_groups(resolve([Parameter("head/kernel", head, "kernel", "head", 2)]))
    for _ in range(50):
        optimizer.apply_gradients([(tf.ones([2, 2]), head)])
    np.testing.assert_allclose(head.numpy(), -np.ones([2, 2]), rtol=1e-4)


def test_trust_clip_bounds_the_ratio():
    weights = tf.Variable([3.0, 4.0])
    LAMB(1.0, trust_clip=2.0).apply_gradients([(tf.ones([2]), weights)])
    np.testing.assert_allclose(weights.numpy(), [1, 2], atol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_trust_ratios_of_the_last_applied_update(mode):
    weights = tf.Variable([3.0, 4.0], name="w")
    plain = tf.Variable([1.0], name="b")
    optimizer = LAMB(1.0, record_trust_ratios=True, exclude_from_layer_adaptation=["b"])
    ones = [np.ones(2, "f"), np.ones(1, "f")]
    run(optimizer, [weights, plain], [ones], mode, oks=[True])
    ratios = optimizer.trust_ratios()
    assert set(ratios) == {"w"}
    assert float(ratios["w"]) == pytest.approx(5 / np.sqrt(2), rel=1e-5)
    run(optimizer, [weights, plain], [ones], mode, oks=[False])
    assert float(optimizer.trust_ratios()["w"]) == float(ratios["w"])
    assert not any("trust" in v.name for v in optimizer.variables)


def test_trust_ratios_cost_nothing_when_not_asked_for():
    optimizer = LAMB()
    optimizer.build(make_variables())
    assert not optimizer._ratios
    with pytest.raises(UserError, match="record_trust_ratios=True"):
        optimizer.trust_ratios()


def test_stacked_kernels_have_one_ratio_for_each_slice():
    parameters = list_parameters(stacked=True)
    kernel = next(p for p in parameters if p.path == "blocks/attention/query/kernel")
    kernel.variable.assign(kernel.variable * tf.reshape([1.0, 10.0], [2, 1, 1, 1]))
    norms = np.linalg.norm(kernel.variable.numpy().reshape(2, -1), axis=1)
    optimizer = LAMB(record_trust_ratios=True)
    optimizer.assign_groups(resolve(parameters))
    optimizer.apply_gradients([(tf.ones_like(p.variable), p.variable) for p in parameters])
    got = optimizer.trust_ratios()[kernel.path].numpy()
    np.testing.assert_allclose(got, norms / np.sqrt(40 * 2 * 32), rtol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_every_power_of_two_loss_scale_gives_the_same_bits(mode):
    gradients, results = make_gradients(5), []
    for scale in (1, 4096, 2**15):
        variables = make_variables()
        optimizer = LossScale(LAMB(0.01, weight_decay=0.1, global_clipnorm=1.0), scale)

        def step(grads, variables=variables, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(g * v) for g, v in zip(grads, variables)])
                scaled = optimizer.get_scaled_loss(loss)
            unscaled = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
            optimizer.apply_gradients(zip(unscaled, variables))

        step = tf.function(step, jit_compile=True) if mode == "jit" else step
        for grads in gradients:
            step([tf.constant(g) for g in grads])
        results.append([v.numpy() for v in variables])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_wrong_options_are_named():
    with pytest.raises(UserError, match='did you mean "decoupled"'):
        LAMB(decay_style="decopled")
    with pytest.raises(UserError, match="trust_clip"):
        LAMB(trust_clip=0.0)
    with pytest.raises(UserError, match="beta_2"):
        LAMB(beta_2=1.0)


def test_epsilon_zero_is_a_value_not_a_missing_one():
    weights = tf.Variable([0.0])
    optimizer = LAMB(1.0, epsilon=0.0)
    optimizer.apply_gradients([(tf.constant([1e-12]), weights)])
    np.testing.assert_allclose(weights.numpy(), [-1.0], rtol=1e-6)
    assert optimizer.get_config()["epsilon"] == 0.0


def test_two_updates_around_skipped_ones_equal_two_clean_updates():
    gradients = make_gradients(2)
    bad = [np.full_like(g, np.inf) for g in gradients[0]]
    variables, optimizer = make_variables(), LossScale(LAMB(0.01, weight_decay=0.1))
    run(optimizer, variables, [gradients[0], bad, bad, gradients[1]])
    clean = make_variables()
    run(LossScale(LAMB(0.01, weight_decay=0.1)), clean, gradients)
    assert same_bits([v.numpy() for v in variables], [v.numpy() for v in clean])
    assert int(optimizer.iterations) == 2
    assert int(optimizer.skipped) == 2
