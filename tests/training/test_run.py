"""Runs end to end: the folder, the summary, continuation and errors."""

import json
import os
import signal

import numpy as np
import pytest
import tensorflow as tf
import yaml
from tiny_run import config

from vit_tpu import UserError, run
from vit_tpu import config as configs
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.training import build, checkpoints, logger, state, storage
from vit_tpu.training.workdir import Workdir


def arrays(workdir):
    found = state.newest(workdir / "checkpoints")
    assert found is not None
    return {name: array for name, array, _ in checkpoints.read(*found)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    return run(config(training__ema=0.9, loss_scale__mode="dynamic"), workdir), workdir


def test_folder_holds_what_the_design_promises(finished):
    _, workdir = finished
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "logs/train", "checkpoints/00000012",
                 "plots/learning_curves.png", "plots/validation_predictions.png"):  # fmt: skip
        assert (workdir / name).exists(), name


def test_summary_is_complete_and_true(finished):
    summary, workdir = finished
    written = json.loads((workdir / "summary.json").read_text())
    assert written["status"] == "done" and written["steps"] == 12 and written["examples_seen"] == 12 * 32
    assert written["applied_updates"] == 12 and written["skipped_updates"] == 0
    assert written["validation"]["count"] == 360
    assert written["compilations"] == 1
    assert written["precision"] == "float32" and written["versions"]["tensorflow"].startswith("2.20")
    assert written["peak_host_bytes"] > 1e8 and written["images_per_second"] > 0
    assert summary.validation == written["validation"]


def test_checkpoint_says_everything_that_training_continues_from(finished):
    _, workdir = finished
    manifest = state.newest(workdir / "checkpoints")[1]
    assert manifest["step"] == 12 and manifest["position"]["examples"] == 12 * 32
    assert manifest["position"]["epoch"] == pytest.approx(384 / 1437, abs=1e-5)
    assert manifest["position"]["micro_steps"] == 12 and manifest["rollbacks"] == 0
    assert manifest["counters"] == {"applied_updates": 12, "skipped": 0}
    assert manifest["metrics"]["validation"]["count"] == 360 and manifest["metrics"]["evaluated"] == 12
    assert manifest["metrics"]["best"]["accuracy"] >= manifest["metrics"]["validation"]["accuracy"]
    assert manifest["metrics"]["train"]["loss"] > 0 and manifest["seeds"] == {"training.seed": 0}
    assert manifest["config"]["training"]["steps"] == 12 and manifest["versions"]["tensorflow"].startswith("2.20")
    names = manifest["arrays"].keys()
    for name in ("parameters/head/kernel", "ema/head/kernel", "ema/updates", "optimizer/applied_updates",
                 "loss_scale/scale", "loss_scale/good_steps", "loss_scale/skipped", "counters/skipped"):  # fmt: skip
        assert name in names, name


def test_config_beside_the_run_reads_back_to_the_same_run(finished):
    _, workdir = finished
    assert configs.load_config(workdir / "config.yaml") == config(training__ema=0.9, loss_scale__mode="dynamic")
    assert yaml.safe_load((workdir / "config.yaml").read_text())["training"]["steps"] == 12


def test_metrics_lines_are_windows_that_average_to_the_epoch(finished):
    _, workdir = finished
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "validation" not in line]
    assert [line["step"] for line in train] == [4, 8, 12]
    assert all(0 < line["loss"] < 5 and "learning_rate" in line and "grad_norm" in line for line in train)
    assert [line["step"] for line in lines if "validation" in line] == [6, 12]


def test_another_configuration_does_not_continue_a_run(finished):
    _, workdir = finished
    with pytest.raises(UserError, match="another configuration.*optimizer.learning_rate: 0.001 -> 0.5"):
        run(config(training__ema=0.9, loss_scale__mode="dynamic", learning_rate=0.5, training__steps=24), workdir)


@pytest.mark.slow
def test_cooldown_from_another_runs_checkpoint_in_another_precision(finished, tmp_path, capsys):
    _, workdir = finished
    older = str(workdir / "checkpoints" / "00000012")
    changes = {"resume": older, "training__ema": 0.9, "training__steps": 16, "schedule__cooldown": 4,
               "schedule__name": "constant", "accumulation_steps": 2, "precision": "mixed_bfloat16"}  # fmt: skip
    with pytest.raises(UserError, match="schedule.name: cosine -> constant.*--allow_config_change"):
        run(config(**changes), tmp_path / "cool")
    assert not (tmp_path / "cool").exists()
    summary = run(config(**changes, allow_config_change=True, save_weights=True), tmp_path / "cool")
    out = capsys.readouterr().out
    assert summary.steps == 16 and summary.applied_updates == 16 and summary.micro_steps == 12 + 2 * 4
    assert "schedule.cooldown: 0 -> 4 (allowed)" in out and "precision: float32 -> mixed_bfloat16\n" in out
    assert out.count("loss scale is dropped") == 1
    lines = [json.loads(line) for line in (tmp_path / "cool" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation" not in line] == [16]
    assert (tmp_path / "cool/weights/00000016/model.safetensors").exists()
    # And its weights alone start a new run.
    fresh = config(init_from=str(tmp_path / "cool"), learning_rate=0.0, training__steps=2, weight_decay=0.0)
    run(fresh, tmp_path / "fresh")
    for name, array in arrays(tmp_path / "cool").items():
        if name.startswith("parameters/"):
            np.testing.assert_array_equal(array, arrays(tmp_path / "fresh")[name])


def test_signal_before_training_begins_leaves_with_75_and_loses_nothing(tmp_path, monkeypatch, capsys):
    original = build.build_model

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(build, "build_model", interrupted)
    summary = run(config(), tmp_path / "run")
    assert summary.status == "interrupted" and summary.steps == 0 and not (tmp_path / "run/checkpoints").exists()
    out = capsys.readouterr().out
    assert "before training begins" in out and f"--workdir={tmp_path / 'run'}" in out


def test_interrupted_run_continues_to_the_same_bits(finished, tmp_path, monkeypatch):
    _, whole = finished
    original = logger.Logger.on_steps

    def interrupt_at_four(self, step, logs):
        original(self, step, logs)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(logger.Logger, "on_steps", interrupt_at_four)
    settings = config(training__ema=0.9, loss_scale__mode="dynamic")
    first = run(settings, tmp_path / "cut")
    assert first.status == "interrupted" and 4 <= first.steps <= 6
    monkeypatch.setattr(logger.Logger, "on_steps", original)
    second = run(settings, tmp_path / "cut")
    assert second.status == "done" and second.steps == 12
    expected, got = arrays(whole), arrays(tmp_path / "cut")
    assert expected.keys() == got.keys()
    different = [name for name in expected if not np.array_equal(expected[name], got[name])]
    assert not different


def test_finished_run_is_not_trained_again(finished, capsys):
    summary, workdir = finished
    before = (workdir / "metrics.jsonl").read_text()
    assert run(config(training__ema=0.9, loss_scale__mode="dynamic"), workdir) == summary
    assert "finished already" in capsys.readouterr().out
    assert (workdir / "metrics.jsonl").read_text() == before


def test_workdir_in_use_is_refused_and_names_the_owner(finished):
    _, workdir = finished
    first, second = Workdir(workdir), Workdir(workdir)
    settings = config(training__ema=0.9, loss_scale__mode="dynamic")
    first.make(settings)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        second.make(settings)
    first.release()
    second.make(settings)
    second.release()


def test_default_workdir_continues_an_interrupted_run_of_the_same_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = config()
    folder = Workdir.open(None, settings)
    assert folder.path == "runs/digits"
    folder.make(settings)
    folder.write_json("summary.json", {"status": "interrupted"})
    folder.release()
    assert str(Workdir.open(None, settings).path) == "runs/digits"
    assert str(Workdir.open(None, config(learning_rate=0.5)).path) == "runs/digits-2"
    (tmp_path / "runs/digits/summary.json").unlink()  # killed before it could write one
    again = Workdir.open(None, settings)
    assert again.path == "runs/digits"
    assert Workdir.open(None, settings).path == "runs/digits-2"  # somebody is at work in the first
    again.release()
    folder.write_json("summary.json", {"status": "done"})
    assert Workdir.open(None, settings).path == "runs/digits-2"


def test_read_only_folder_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "makedirs", refuse)  # root may write everywhere: say no for it
    with pytest.raises(UserError, match="cannot be written to \\(Permission denied\\): choose another with --workdir"):
        Workdir(tmp_path / "run").make(config())


def test_leftovers_of_a_killed_run_are_cleared_and_said(tmp_path, capsys):
    for name in (".config.yaml.7.tmp", "checkpoints/.00000004.7.tmp"):
        (tmp_path / name).mkdir(parents=True)
    folder = Workdir(tmp_path)
    folder.make(config())
    folder.release()
    assert "removed 1 unfinished checkpoint" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints", "config.yaml"]


def test_folder_in_a_store_belongs_to_the_last_who_came(tmp_path):
    root = f"ram://{tmp_path.name}-{os.getpid()}/run"
    first, second = Workdir(root), Workdir(root)
    first.make(config())
    first.still_ours()
    second.make(config())
    with pytest.raises(UserError, match=f"taken over by process {os.getpid()}"):
        first.still_ours()
    second.still_ours()


def test_run_in_a_store_without_rename_and_its_continuation(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("rename in a store")

    monkeypatch.setattr(tf.io.gfile, "rename", refuse)
    root = f"ram://{tmp_path.name}-{os.getpid()}/run"
    run(config(training__steps=4), root)
    summary = run(config(training__steps=6), root)
    assert summary.status == "done" and summary.steps == 6
    names = storage.names(root)
    assert {"config.yaml", "summary.json", "metrics.jsonl", "logs", "checkpoints", "plots"} <= set(names)
    assert checkpoints.steps(f"{root}/checkpoints") == [6, 4]
    assert "learning_curves.png" in storage.names(f"{root}/plots")


def test_numerics_check_is_silent_in_a_healthy_run(tmp_path):
    assert run(config(training__check_numerics=True, training__steps=2), tmp_path / "run").status == "done"


def test_model_without_pooling_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="model.pool=none gives one output for each patch"):
        run(config(pool="none"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="not a run's"):
        run(config(), tmp_path)
    assert os.listdir(tmp_path) == ["precious.txt"]


def test_non_finite_loss_stops_the_run_and_writes_no_checkpoint(tmp_path, monkeypatch):
    from vit_tpu.training import inputs

    original = inputs.train_data

    def poison(index, batch):
        factor = tf.where(tf.equal(index, 6), float("nan"), 1.0)
        return batch[0] * factor, batch[1]

    def data(*args):
        return original(*args).enumerate().map(poison)

    monkeypatch.setattr(inputs, "train_data", data)
    with pytest.raises(NonFiniteError, match="step 7"):
        run(config(training__checkpoint_every=2), tmp_path / "nan")
    found = state.newest(tmp_path / "nan" / "checkpoints")
    assert found is not None and found[1]["step"] == 6


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_runs(precision, tmp_path):
    summary = run(
        config(precision=precision, training__steps=4, training__log_every=2, training__jit=True), tmp_path / "run"
    )
    assert summary.applied_updates == 4 and summary.precision == precision
    assert np.isfinite(summary.validation["loss"])


def test_profile_window_in_steps_is_widened_to_executions_and_recorded(tmp_path, capsys):
    run(
        config(training__steps=24, training__log_every=8, steps_per_execution=8, training__profile=(10, 14)),
        tmp_path / "run",
    )
    assert "steps 10 to 14 are recorded as 9 to 16" in capsys.readouterr().out
    assert list((tmp_path / "run" / "logs").glob("plugins/profile/*/*.xplane.pb"))


def test_profile_window_outside_the_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="outside this run's steps 1 to 12"):
        run(config(training__profile=(10, 20)), tmp_path / "run")


def test_check_numerics_names_the_operation(tmp_path, monkeypatch):
    from vit_tpu.layers import norm

    original = norm.layer_norm
    monkeypatch.setattr(norm, "layer_norm", lambda x, *args: original(tf.math.log(x - 1e9), *args))
    with pytest.raises(FloatingPointError, match="Log"):
        run(config(training__check_numerics=True), tmp_path / "run")


def test_run_starts_from_a_weight_file_with_a_fresh_head(tmp_path):
    import vit_tpu

    settings = {"variant": "Ti/2", "image_size": 8, "channels": 1, "num_classes": 4, "pool": "gap"}
    source = vit_tpu.ViT(**settings, width=16, depth=1, mlp_dim=32, num_heads=2)
    vit_tpu.save_weights(source, str(tmp_path / "w.npz"))
    with pytest.raises(UserError, match="head"):
        run(config(init_from=str(tmp_path / "w.npz")), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    fresh = {
        "init_from": str(tmp_path / "w.npz"),
        "init_allow": ("head/*",),
        "learning_rate": 0.0,
        "training__ema": None,
    }
    run(config(**fresh, training__steps=2), tmp_path / "run")
    trained = arrays(tmp_path / "run")
    for parameter in source.parameters():
        if not parameter.path.startswith("head/"):
            np.testing.assert_array_equal(parameter.variable.numpy(), trained[f"parameters/{parameter.path}"])
    report = json.loads((tmp_path / "run" / "init_report.json").read_text())
    assert "head/kernel" in report["new"] and report["sha256"]
