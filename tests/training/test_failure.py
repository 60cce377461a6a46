"""A step that is not finite: named by layer, kept, and found again by the doctor's replay."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tensorflow as tf
from tiny_run import config

import vit_tpu
from vit_tpu import config as configs
from vit_tpu import doctor
from vit_tpu.diagnose import memory, replay
from vit_tpu.errors import UserError
from vit_tpu.evaluation import run_folder
from vit_tpu.layers.mlp import Mlp
from vit_tpu.models import numerics
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.training import build, checkpoints, failure
from vit_tpu.training.run import run

BLOCKS, BAD_STEP = 3, 5


@pytest.fixture
def planted(monkeypatch):
    """From step 5 on, the gradient through block 2's MLP is not finite (in half precision only, if asked)."""
    built, wanted = {}, {"half_only": False, "once": False, "block": 2}
    passes = tf.Variable(0, dtype=tf.int64, trainable=False)
    make, forward = build.build_model, Mlp.forward

    def build_model(*args, **kwargs):
        built["model"] = make(*args, **kwargs)
        return built["model"]

    def broken(self, params, x, **kwargs):
        y, model = forward(self, params, x, **kwargs), built.get("model")
        late = hasattr(model, "counters") and self is model.blocks[wanted["block"]].mlp
        if not late or (wanted["half_only"] and y.dtype == tf.float32):
            return y
        if wanted["once"]:
            bad = tf.equal(passes.assign_add(1), BAD_STEP)
        else:
            bad = model.counters.steps.read_value() >= BAD_STEP - 1
        wrong = tf.math.log(tf.where(bad, -1.0, np.e))  # NaN, or 1
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
    kept = failure.read(folder)
    assert kept.step == BAD_STEP and kept.images.shape == (32, 8, 8, 1) and kept.labels.shape == (32,)
    assert kept.weights == BAD_STEP - 1 and kept.classes == 10
    again = replay.replay(folder)
    assert again.step == BAD_STEP and again.float32 is None
    assert again.run.culprit.startswith("blocks/2/mlp, backward: ")
    out = tmp_path / "found.json"
    assert doctor.main([f"--replay={folder}", f"--json={out}"]) == 1
    said = capsys.readouterr().out
    assert "first not finite: blocks/2/mlp, backward" in said and "float32 does not help" in said
    assert json.loads(out.read_text())["step"] == BAD_STEP


def quick(**changes):
    """A single block, for TensorFlow's own check, which takes seconds to trace."""
    return settings(
        **{"training__jit": False, "model__depth": 1, "steps_per_execution": 8, "training__steps": 8, **changes}
    )


def test_without_xla_the_operation_is_named_and_the_step_is_kept_too(planted, tmp_path, capsys):
    planted["block"] = 0
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=f"step {BAD_STEP} is not finite; check_numerics: .*Detected"):
        run(quick(), folder)
    said = capsys.readouterr().out
    assert "every operation checked for NaN" in said
    assert f"step {BAD_STEP}: first not finite: blocks/0/mlp, backward: " in said
    kept = failure.read(folder)
    assert (kept.step, kept.weights, kept.images.shape) == (BAD_STEP, BAD_STEP - 1, (32, 8, 8, 1))
    # The same run without the check skips the bad steps: its last weights are those from before them.
    run(quick(training__check_numerics=False), tmp_path / "plain")
    found = run_folder.find(str(folder), BAD_STEP - 1), run_folder.find(str(tmp_path / "plain"))
    ours, theirs = ({name: array for name, array, _ in checkpoints.read(*place)} for place in found)
    weights = [name for name in ours if name.startswith("parameters/")]
    assert len(weights) > 10
    for name in weights:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6, err_msg=name)
    again = replay.replay(folder)
    assert again.step == BAD_STEP and again.run.culprit.startswith("blocks/0/mlp, backward: ")


def test_without_xla_a_rollback_passes_over_the_bad_step(planted, tmp_path, capsys):
    planted.update(once=True, block=0)
    result = run(quick(training__on_nonfinite="rollback", steps_per_execution=4, checkpoint_every=4), tmp_path / "run")
    assert result.status == "done" and result.steps == 8 and result.rollbacks == 1
    assert "back to the checkpoint of step 4" in capsys.readouterr().out


def test_a_loss_scale_that_tries_out_its_height_is_not_stopped_without_xla(tmp_path, capsys):
    changes = {"precision": "mixed_float16", "loss_scale.initial": 2.0**40, "training.jit": False}
    result = run(quick(**changes), tmp_path / "run")
    assert result.status == "done" and result.skipped_updates > 0
    assert "gradients may overflow: the loss scale is dynamic" in capsys.readouterr().out


def test_a_fault_of_the_precision_is_told_from_one_of_the_model(planted, tmp_path):
    planted["half_only"] = True
    with pytest.raises(NonFiniteError):
        run(settings(precision="mixed_bfloat16"), tmp_path / "run")
    again = replay.replay(tmp_path / "run")
    assert again.run.culprit.startswith("blocks/2/mlp, backward: ") and again.float32.culprit is None
    assert "mixed_bfloat16 is the cause" in again.verdict()


def test_a_run_without_a_failed_step_has_nothing_to_replay(tmp_path):
    kept_by_hand(tmp_path / "run", 0, config(), 1)
    (tmp_path / "run" / failure.NAME).unlink()
    with pytest.raises(UserError, match="keeps no failed step"):
        replay.replay(tmp_path / "run")


def kept_by_hand(folder, weights, settings, step):
    folder.mkdir()
    (folder / "config.yaml").write_text(configs.to_yaml(settings))
    images = np.ones((4, 8, 8, 1), np.float32)
    np.savez(folder / failure.NAME, images=images, labels=np.zeros(4, int), step=step, weights=weights, classes=10)


def test_step_whose_weights_are_gone_and_a_damaged_one_are_told(tmp_path):
    kept_by_hand(tmp_path / "run", 4, config(), 7)
    with pytest.raises(UserError, match="step 7 .* checkpoint of step 4, with the weights it had, is not kept"):
        replay.replay(tmp_path / "run")
    (tmp_path / "run" / failure.NAME).write_bytes(b"PK")
    with pytest.raises(UserError, match="failed_step.npz is damaged"):
        replay.replay(tmp_path / "run")


def test_first_step_is_taken_again_from_the_weights_that_the_run_began_with(tmp_path):
    shape = {"width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2}
    source = vit_tpu.ViT("Ti/2", image_size=8, channels=1, num_classes=10, pool="gap", **shape)
    source.embedding.params["bias"].assign(source.embedding.params["bias"] + 100)
    vit_tpu.save_weights(source, str(tmp_path / "w.npz"))
    kept_by_hand(tmp_path / "run", 0, config(init_from=str(tmp_path / "w.npz")), 1)
    assert replay.replay(tmp_path / "run").run.stages[0].forward.low > 50


def test_gradient_too_large_to_square_is_named():
    fine, huge = numerics.Range.of(tf.constant([1.0])), numerics.Range.of(tf.constant([1e30]))
    step = numerics.Step((numerics.Stage("head", "loss", fine, fine),), 1.0, {"head/bias": huge}, "float32", 0)
    assert "head/bias, backward: gradient 1e+30" in step.culprit and "square is beyond float32" in step.culprit


def test_a_step_that_the_host_cannot_hold_layer_by_layer_is_not_taken_again(monkeypatch):
    """Rematerialisation makes the step fit, and layer by layer there is none; Linux kills without a word."""
    large, model = config(remat="block", model__depth=12, batch_size=1024), types.SimpleNamespace(num_classes=10)
    fits = memory.breakdown(large, 10, 1, hardware="CPU").total
    monkeypatch.setattr(failure.shortage, "of_host", lambda: 2 * fits)
    assert "and this process may have" in failure._too_large(large, model, 1)
    assert failure._too_large(dataclasses.replace(large, training=config().training), model, 1) == ""
    monkeypatch.setattr(failure.shortage, "of_host", lambda: None)
    assert failure._too_large(large, model, 1) == ""
