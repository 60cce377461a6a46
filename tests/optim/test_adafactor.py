"""The paper's Adafactor against numbers from its own code, and against a float64 model."""

import numpy as np
import pytest
import tensorflow as tf
from optim_helpers import list_parameters

from vit_tpu.errors import UserError
from vit_tpu.optim import Adafactor
from vit_tpu.optim.adafactor import factored_axes
from vit_tpu.optim.decay import resolve

SETTINGS = {
    "default": {},
    "f32mom": {"momentum_dtype": "float32"},
    "clip1": {"clipping_threshold": 1.0},
    "nomom": {"beta_1": 0.0},
}


def directions(refs, setting, steps=6):
    """Yields (step, name -> update direction, optimizer) of our optimizer on the reference's."""
    reference = refs("adafactor.npz")
    names = sorted({key.split("/")[2] for key in reference.files if key.startswith("grads/step0")})
    variables = {name: tf.Variable(tf.zeros(reference[f"grads/step0/{name}"].shape), name=name) for name in names}
    optimizer = Adafactor(1.0, **SETTINGS[setting])
    for step in range(steps):
        for variable in variables.values():
            variable.assign(tf.zeros_like(variable))
        optimizer.apply_gradients([(reference[f"grads/step{step}/{name}"], v) for name, v in variables.items()])
        yield step, {name: -v.numpy() for name, v in variables.items()}, optimizer


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_papers_code(refs, setting):
    reference, compared = refs("adafactor.npz"), 0
    for step, found, _ in directions(refs, setting):
        for name, got in found.items():
            key = f"{setting}/step{step}/{name}"
            if key not in reference.files:
                continue
            want, compared = reference[key], compared + 1
            error = np.abs(got - want) / np.abs(want).max()
            if setting in ("default", "clip1"):
                # Where float32 rounding decides how a momentum is rounded to bfloat16, one unit
                # in its last place (2^-8) remains: in a few elements among thousands.
                assert np.mean(error > 1e-6) < 2e-3, (key, np.mean(error > 1e-6))
                assert error.max() < 2.0**-8, (key, error.max())
            else:
                assert error.max() < 1e-6, (key, error.max())
    assert compared == 13 * (3 if setting == "default" else 1)


def test_stored_state_equals_the_papers_code(refs):
    reference = refs("adafactor.npz")
    *_, (_, found, optimizer) = directions(refs, "default")
    slots = {"1": "second_moment_row", "2": "second_moment_col", "3": "second_moment"}
    for name in found:
        momentum = optimizer._slots["momentum"][name]
        assert momentum.dtype == tf.bfloat16
        want = reference[f"default/state/2/1/{name}"]
        got = tf.cast(momentum, tf.float32).numpy()
        assert np.mean(got != want) < 2e-3
        for index, slot in slots.items():
            want = reference[f"default/state/0/{index}/{name}"]
            made = optimizer._slots[slot].get(name)
            if made is None:
                assert want.shape == (1,)  # the reference's placeholder
            else:
                np.testing.assert_allclose(made.numpy(), want, rtol=1e-6)


def test_what_is_factored_over_which_axes(refs):
    record = refs("adafactor_state_shapes.json")
    for name, shape in record["shapes"].items():
        axes = factored_axes(shape)
        row, col = (record["state"][f"0/{index}/{name}"][0] for index in (1, 2))
        if axes is None:
            assert (row, col) == ([1], [1]), name
        else:
            second, largest = axes
            assert row == [n for i, n in enumerate(shape) if i != largest], name
            assert col == [n for i, n in enumerate(shape) if i != second], name
    assert factored_axes((14, 14, 3, 1664)) is None  # the patch kernel of G/14


def adafactor_in_float64(weight, gradients, lr, decay, cap):
    """An independent model of one matrix, float64, without bfloat16."""
    weight = weight.astype(np.float64)
    row, col, momentum = 0.0, 0.0, 0 * weight
    for t, grad in enumerate(gradients, start=1):
        beta = min(cap, 1 - t**-0.8)
        squares = grad.astype(np.float64) ** 2 + 1e-30
        row = beta * row + (1 - beta) * squares.mean(1)
        col = beta * col + (1 - beta) * squares.mean(0)
        update = grad / np.sqrt(np.outer(row, col) / row.mean())
        momentum = 0.9 * momentum + 0.1 * update
        weight = weight - lr * (momentum + decay * weight)
    return weight


@pytest.mark.parametrize("cap", [0.999, 0.6])
def test_equals_a_float64_model_with_decay_and_cap(cap):
    rng = np.random.default_rng(0)
    start = rng.normal(size=(32, 48)).astype("f")
    gradients = [rng.normal(size=(32, 48)).astype("f") * 10.0 ** (i % 2) for i in range(8)]
    weights = tf.Variable(start)
    optimizer = Adafactor(0.1, weight_decay=0.3, beta2_cap=cap, momentum_dtype="float32")
    for grad in gradients:
        optimizer.apply_gradients([(grad, weights)])
    want = adafactor_in_float64(start, gradients, 0.1, 0.3, cap)
    np.testing.assert_allclose(weights.numpy(), want, rtol=0, atol=2e-6)
    other = adafactor_in_float64(start, gradients, 0.1, 0.3, 0.999 if cap < 0.9 else 0.6)
    assert np.abs(other - want).max() > 1e-4  # the comparison can tell the caps apart


def test_attention_kernels_are_factored_for_each_head():
    # The same numbers as [D, H, h] and as [D, H * h]: the heads' own statistics differ.
    rng = np.random.default_rng(0)
    grad = rng.normal(size=(40, 2, 32)).astype("f") * np.array([1, 100], "f")[:, None]
    heads, flat = tf.Variable(tf.zeros([40, 2, 32])), tf.Variable(tf.zeros([40, 64]))
    Adafactor(1.0).apply_gradients([(grad, heads), (grad.reshape(40, 64), flat)])
    difference = np.abs(heads.numpy().reshape(40, 64) - flat.numpy())
    assert difference.max() > 0.01


def test_stacked_norms_are_not_factored_across_blocks():
    parameters = list_parameters(depth=34, stacked=True)
    optimizer = Adafactor()
    optimizer.assign_groups(resolve(parameters))
    optimizer.build([p.variable for p in parameters])
    slots = {slot: set(paths) for slot, paths in optimizer._slots.items()}
    assert "blocks/norm1/scale" in slots["second_moment"]
    kernel = "blocks/attention/query/kernel"
    assert optimizer._slots["second_moment_row"][kernel].shape == (34, 2, 32)
    assert optimizer._slots["second_moment_col"][kernel].shape == (34, 40, 2)


def test_zero_gradients_and_the_first_step_are_finite():
    weights = tf.Variable(tf.ones([32, 32]))
    optimizer = Adafactor(0.1)
    optimizer.apply_gradients([(tf.zeros([32, 32]), weights)])
    np.testing.assert_array_equal(weights.numpy(), np.ones((32, 32)))
    optimizer.apply_gradients([(tf.ones([32, 32]), weights)])
    assert np.isfinite(weights.numpy()).all()


def test_wrong_options_are_named():
    with pytest.raises(UserError, match="beta2_cap"):
        Adafactor(beta2_cap=1.0)
    with pytest.raises(UserError, match="clipping_threshold"):
        Adafactor(clipping_threshold=0.0)
