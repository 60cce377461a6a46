"""From a config to a compiled model."""

import pytest
from tiny_run import config

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.training import build, schedule


def test_polyak_is_the_plain_mean_since_the_warm_up():
    c = config(training__steps=200, schedule__warmup="5%", training__ema="polyak")
    average = build.averaging(c, schedule.plan(c, 320))
    assert average.decay is None and average.start_step == 10


def test_a_decay_is_passed_on_and_other_words_are_refused():
    c = config(training__steps=200, training__ema=0.99)
    assert build.averaging(c, schedule.plan(c, 320)) == 0.99
    with pytest.raises(UserError, match='training.ema is "polyakk": give a decay such as 0.9999, or polyak'):
        configs.load_config(None, ["training.ema=polyakk"])
