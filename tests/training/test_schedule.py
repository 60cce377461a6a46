"""Lengths and intervals of a run."""

from tiny_run import config

from vit_tpu.training import schedule


def test_epochs_are_rounded_once_over_the_run():
    plan = schedule.plan(config(training__steps=None, training__epochs=10), 1437)
    assert plan.total_steps == round(10 * 1437 / 32) == 449


def test_intervals_are_multiples_of_an_execution_and_changes_are_said():
    plan = schedule.plan(config(training__steps=32, steps_per_execution=3, training__checkpoint_every=8), 1437)
    assert plan.checkpoint_every == 9
    assert "checkpoint_every 8 -> 9 (a multiple of steps_per_execution 3)" in plan.changed


def test_warm_up_in_epochs_and_percent():
    c = config(training__steps=200, schedule__warmup="2 epochs")
    rate = schedule.learning_rate(c, schedule.plan(c, 320))
    assert rate.warmup_steps == 20
    c = config(training__steps=200, schedule__warmup="5%")
    assert schedule.learning_rate(c, schedule.plan(c, 320)).warmup_steps == 10


def test_reciprocal_square_root_gets_its_timescale():
    c = config(training__steps=200, schedule__name="reciprocal_sqrt", schedule__timescale=50, schedule__cooldown=20)
    rate = schedule.learning_rate(c, schedule.plan(c, 320))
    assert rate.timescale == 50 and rate.cooldown_steps == 20
