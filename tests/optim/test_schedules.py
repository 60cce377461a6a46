"""Schedules against the paper's own code, at extreme steps, and across a configuration."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError
from vit_tpu.optim import schedules
from vit_tpu.optim.schedules import Constant, Cosine, Linear, ReciprocalSqrt, steps_from

KINDS = {"rsqrt": ReciprocalSqrt, "cosine": Cosine, "linear": Linear}


def build(kw, peak=1.0):
    names = ("total_steps", "warmup_steps", "cooldown_steps", "timescale", "shift")
    options = {name: kw[name] for name in names if name in kw}
    if "linear_end" in kw:
        options["end"] = kw["linear_end"]
    return KINDS[kw["decay_type"]](peak, **options)


@pytest.mark.parametrize(
    "case",
    ["paper_g14_1M", "rsqrt_short", "rsqrt_shift", "rsqrt_nowarm", "cosine_ft_20k", "linear"],
)
def test_equals_the_papers_code(refs, case):
    entry = refs("schedules.json")[case]
    schedule = build(entry["kw"])
    for step, want in zip(entry["steps"], entry["mult"]):
        got = float(schedule(step))
        # The reference turns negative after the end. Near it, its 1 - progress and 1 + cos lose
        # digits: one unit in the last place of the peak is allowed there.
        tolerance = 1e-6 * abs(want) + (1e-12 if case.startswith("rsqrt") else 6e-8)
        assert got == pytest.approx(max(want, 0.0), rel=0, abs=tolerance), step


def exact_paper(step):
    rate = 1 / math.sqrt(1 + max(step - 10_000, 0) / 10_000)
    return rate * min(1, step / 10_000) * max(0, min(1, (1_000_000 - step) / 50_000))


def test_the_peak_multiplies_and_the_first_update_of_a_warm_up_is_zero():
    schedule = ReciprocalSqrt(8e-4, 1_000_000, warmup_steps=10_000, cooldown_steps=50_000)
    for step in (0, 1, 10_000, 500_000, 975_000, 999_999):
        assert float(schedule(step)) == pytest.approx(8e-4 * exact_paper(step), rel=1e-6)
    assert float(schedule(0)) == 0.0


ALL = {
    "rsqrt": lambda total: ReciprocalSqrt(1.0, total, warmup_steps=10, cooldown_steps=1000),
    "cosine": lambda total: Cosine(1.0, total, warmup_steps=10),
    "linear": lambda total: Linear(1.0, total, warmup_steps=10),
    "constant": lambda total: Constant(1.0, total, warmup_steps=10, cooldown_steps=1000),
}


@pytest.mark.parametrize("kind", ALL)
def test_never_negative_and_zero_from_the_end_on(kind):
    schedule = ALL[kind](2000)
    values = [float(schedule(step)) for step in range(0, 2000, 50)]
    assert min(values) >= 0 and max(values) > 0.5 and float(schedule(1999)) > 0
    for step in (2000, 2001, 10**9, 2**40):
        assert float(schedule(step)) == 0.0


@pytest.mark.parametrize("kind", ALL)
def test_neighbouring_steps_beyond_2_to_the_24_differ(kind):
    # float32 cannot tell 2^25 from 2^25 + 1: subtracting floats would repeat values.
    total = 2**25 + 500
    schedule = ALL[kind](total)
    got = [float(schedule(total - left)) for left in (5, 4, 3, 2, 1)]
    assert all(one > two > 0 for one, two in zip(got, got[1:]))
    if kind in ("constant", "linear"):
        length = 1000 if kind == "constant" else total - 10
        np.testing.assert_allclose(got, np.array([5, 4, 3, 2, 1]) / length, rtol=1e-6)


def test_warm_up_beyond_2_to_the_24_is_exact():
    schedule = Constant(1.0, warmup_steps=2**26)
    step = 2**26 - 3
    assert float(schedule(step)) == pytest.approx(np.float32(step) / 2**26, rel=1e-7)
    late = ReciprocalSqrt(1.0, warmup_steps=2**25, timescale=10)
    assert float(late(2**25 + 1)) == pytest.approx(1 / math.sqrt(1.1), rel=1e-6)


def test_cosine_keeps_its_digits_near_the_end():
    schedule = Cosine(1.0, 20_000, warmup_steps=500)
    for step in (19_000, 19_990, 19_999):
        want = math.sin(math.pi / 2 * (20_000 - step) / 19_500) ** 2
        assert float(schedule(step)) == pytest.approx(want, rel=1e-6)


def test_ends_other_than_zero_are_shares_of_the_peak():
    assert float(Cosine(2.0, 10, end=0.1)(10)) == pytest.approx(0.2)
    assert float(Linear(2.0, 10, end=0.1)(5)) == pytest.approx(1.1)
    assert float(Linear(2.0, 10, end=0.1)(99)) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ALL)
def test_configuration_round_trip(kind):
    schedule = ALL[kind](2000)
    config = keras.optimizers.schedules.serialize(schedule)
    again = keras.optimizers.schedules.deserialize(config)
    assert type(again) is type(schedule)
    assert again.get_config() == schedule.get_config()
    assert all(float(again(s)) == float(schedule(s)) for s in (0, 7, 500, 1500, 1999))


def test_every_option_survives_the_configuration():
    one = ReciprocalSqrt(1.0, 100, 10, 20, timescale=7.5, shift=3, name="x")
    two = ReciprocalSqrt.from_config(one.get_config())
    assert two.get_config() == one.get_config()
    assert one.get_config()["timescale"] == 7.5 and one.get_config()["shift"] == 3
    assert Linear.from_config(Linear(1.0, 10, end=0.5).get_config()).end == 0.5


def test_in_a_compiled_function_with_an_int64_counter():
    schedule = Cosine(1.0, 100, warmup_steps=10)
    compiled = tf.function(lambda step: schedule(step), jit_compile=True)
    value = compiled(tf.constant(50, tf.int64))
    assert value.dtype == tf.float32
    assert float(value) == pytest.approx(float(schedule(50)), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(1.0, 10, warmup_steps=11), "do not fit into 10 steps"),
        (lambda: Cosine(-1.0, 10), "learning_rate"),
        (lambda: Cosine(1.0, 10, warmup_steps=-1), "warmup_steps"),
        (lambda: Cosine(1.0, 10, warmup_steps=1.5), "warmup_steps"),
        (lambda: Linear(1.0, 10, end=2.0), "share of the peak"),
        (lambda: ReciprocalSqrt(1.0, cooldown_steps=5), "give total_steps"),
        (lambda: ReciprocalSqrt(1.0, timescale=0), "timescale"),
        (lambda: Cosine(1.0, None), "give total_steps"),
    ],
)
def test_wrong_lengths_are_one_clear_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_durations_equal_the_papers_code(refs):
    for case in refs("small_fns.json")["steps"]:
        examples, batch, total = case["args"]
        ((key, amount),) = case["cfg"].items()
        duration = {key.removeprefix("warmup_"): amount}
        got = steps_from(duration, total_steps=total, examples_per_epoch=examples, batch_size=batch)
        assert got == case["out"], case


def test_durations_as_text():
    known = {"total_steps": 500, "steps_per_epoch": 40, "batch_size": 100}
    for text, want in {
        "10": 10,
        "500 steps": 500,
        "1 step": 1,
        "1.5 epochs": 60,
        "10%": 50,
        "2.5 percent": 12,
        "1234 examples": 12,
        "0%": 0,
        "1e-6 epochs": 1,
    }.items():
        assert steps_from(text, **known) == want, text
    assert steps_from(7) == 7
    assert steps_from(0) == 0


def test_wrong_durations_say_what_is_missing():
    with pytest.raises(UserError, match="needs steps_per_epoch"):
        steps_from("3 epochs")
    with pytest.raises(UserError, match="needs batch_size"):
        steps_from("3 examples")
    with pytest.raises(UserError, match="needs total_steps"):
        steps_from("3%")
    with pytest.raises(UserError, match='did you mean "epochs"'):
        steps_from("3 epoches")
    with pytest.raises(UserError, match="more than the whole run"):
        steps_from("300%", total_steps=10)
    for nonsense in (-1, True, None, "soon", {"steps": 1, "epochs": 2}):
        with pytest.raises(UserError):
            steps_from(nonsense)


def test_public_names():
    assert {"ReciprocalSqrt", "Cosine", "Linear", "Constant", "steps_from"} <= set(dir(schedules))
