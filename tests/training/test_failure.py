"""A step that is not finite: named by layer, kept, and found again by the doctor's replay."""

import json

import numpy as np
import pytest
import tensorflow as tf
from tiny_run import config

from vit_tpu import doctor
from vit_tpu.diagnose import replay
from vit_tpu.errors import UserError
from vit_tpu.layers.mlp import Mlp
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.training import build, failure
from vit_tpu.training.run import run

BLOCKS, BAD_STEP = 3, 5


@pytest.fixture
def planted(monkeypatch):
    """From step 5 on, the gradient through block 2's MLP is not finite (in half precision only, if asked)."""
    built, wanted = {}, {"half_only": False}
    make, forward = build.build_model, Mlp.forward

    def build_model(*args, **kwargs):
        built["model"] = make(*args, **kwargs)
        return built["model"]

    def broken(self, params, x, **kwargs):
        y, model = forward(self, params, x, **kwargs), built.get("model")
        late = hasattr(model, "counters") and self is model.blocks[2].mlp
        if not late or (wanted["half_only"] and y.dtype == tf.float32):
            return y
        wrong = tf.where(model.counters.steps.read_value() >= BAD_STEP - 1, np.nan, 1.0)
        return tf.custom_gradient(lambda y: (tf.identity(y), lambda dy: dy * tf.cast(wrong, dy.dtype)))(y)

    monkeypatch.setattr(build, "build_model", build_model)
    monkeypatch.setattr(Mlp, "forward", broken)
    return wanted


def settings(**changes):
    return config(**{"model__depth": BLOCKS, "steps_per_execution": 16, "training__steps": 16, "log_every": 16,
                     "training__check_numerics": True, "training__jit": True, **changes})  # fmt: skip


def test_planted_fault_is_named_kept_and_found_again(planted, tmp_path, capsys):
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=f"loss or gradient of step {BAD_STEP} is not finite"):
        run(settings(), folder)
    said = capsys.readouterr().out
    assert f"step {BAD_STEP}: first not finite: blocks/2/mlp, backward: " in said
    images, labels, step = failure.read(folder)
    assert step == BAD_STEP and images.shape == (32, 8, 8, 1) and labels.shape == (32,)
    again = replay.replay(folder)
    assert again.step == BAD_STEP and again.float32 is None
    assert again.run.culprit.startswith("blocks/2/mlp, backward: ")
    out = tmp_path / "found.json"
    assert doctor.main([f"--replay={folder}", f"--json={out}"]) == 1
    said = capsys.readouterr().out
    assert "first not finite: blocks/2/mlp, backward" in said and "float32 does not help" in said
    assert json.loads(out.read_text())["step"] == BAD_STEP


def test_a_fault_of_the_precision_is_told_from_one_of_the_model(planted, tmp_path):
    planted["half_only"] = True
    with pytest.raises(NonFiniteError):
        run(settings(precision="mixed_bfloat16"), tmp_path / "run")
    again = replay.replay(tmp_path / "run")
    assert again.run.culprit.startswith("blocks/2/mlp, backward: ") and again.float32.culprit is None
    assert "mixed_bfloat16 is the cause" in again.verdict()


def test_a_run_without_a_failed_step_has_nothing_to_replay(tmp_path):
    run(config(training__steps=2), tmp_path / "run")
    with pytest.raises(UserError, match="keeps no failed step"):
        replay.replay(tmp_path / "run")
