"""The command line of vit_tpu.train: help, wrong use, exit codes."""

import importlib
import os

import numpy as np
import pytest

from vit_tpu import command, train

TINY = ["--set=width=16", "--set=depth=1", "--set=mlp_dim=32", "--set=num_heads=2", "--pool=gap", "--batch_size=32",
        "--steps=4", "--steps_per_execution=2"]  # fmt: skip


def test_help_teaches(capsys):
    assert train.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "python -m vit_tpu.train" in out and "Exit codes" in out
    for flag in ("--config", "--set", "--optimizer", "--precision", "--gradient_clipping", "--head_weight_decay",
                 "--resume", "--allow_config_change", "--on_nonfinite"):  # fmt: skip
        assert flag in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimiser=lamb"], "unknown flag --optimiser (did you mean \"optimizer\"?)"),
        (["--set", "optimizer.nam=lamb"], "unknown key \"optimizer.nam\" (did you mean \"name\"?)"),
        (["--set", "learning_rte=1"], "optimizer.learning_rate"),
        (["--model=Q/16"], "unknown model \"Q/16\""),
        (["--image_size=9"], "does not divide by patch size 2: use 8 or 10"),
        (["--precision=bfloat16"], "use \"mixed_bfloat16\""),
        (["--accumulation_steps=7"], "does not divide into accumulation_steps 7"),
        (["--config=no/such.yaml"], "cannot be read"),
        (["--set=data.source=folder"], "needs data.path"),
        (["--set=data.source=folder", "--set=data.path=no/such/folder"], "no/such/folder"),
        (["--batch_size=abc"], "must be a whole number"),
        (["--set=model.num_classes=5"], "label"),
        (["--epochs=2", "--steps=5"], "both given"),
        (["stray"], "\"stray\" is not a flag"),
        (["--strategy=gpu"], "no GPU"),
        (["--set=num_heads=3"], "does not divide by num_heads 3"),
        (["--profile=10"], "2 numbers"),
        (["--epochs=nan"], "finite"),
        (["--seed=-1"], "training.seed"),
        (["--loss_scale=abc"], "--loss_scale=abc"),
        (["--json=no/such/x.json"], "no folder no/such"),
        (["--batch_size=100000"], "larger than the 1,437"),
        (["--set=data.channels=2"], "1 (grey) or 3"),
        (["--resume=no/such"], "no/such is neither a run's folder nor a checkpoint"),
        (["--on_nonfinite=rolback"], "did you mean \"rollback\""),
        (["--set=training.keep=0"], "training.keep is 0"),
        (["--set=training.max_rollbacks=-1"], "training.max_rollbacks"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert message in lines[0]
    assert os.listdir(tmp_path) == []  # nothing half-made stays


def test_empty_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    assert train.main(["--set=data.source=folder", f"--set=data.path={tmp_path / 'data'}"]) == 2
    assert str(tmp_path / "data") in capsys.readouterr().err


def test_label_outside_the_head_names_the_record(tmp_path, capsys):
    labels = np.zeros(20, np.int64)
    labels[13] = 7
    images = np.zeros((20, 8, 8, 1), np.uint8)
    np.savez(
        tmp_path / "d.npz", train_images=images, train_labels=labels, validation_images=images, validation_labels=labels
    )
    code = train.main(
        [
            "--set=data.source=npz",
            f"--set=data.path={tmp_path / 'd.npz'}",
            "--set=num_classes=3",
            f"--workdir={tmp_path / 'r'}",
        ]
    )
    assert code == 2
    error = capsys.readouterr().err
    assert "label 7" in error and "13" in error


def test_dry_run_says_what_would_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([*TINY, "--dry_run"]) == 0
    out = capsys.readouterr().out
    for word in ("devices", "precision", "parameters", "GFLOPs", "body kernels", "total"):
        assert word in out
    assert os.listdir(tmp_path) == []


def test_short_run_writes_under_runs_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([*TINY, "--json=out.json"]) == 0
    out = capsys.readouterr().out
    assert "tensorboard --logdir runs/digits/logs" in out
    assert (tmp_path / "runs/digits/summary.json").exists() and (tmp_path / "out.json").exists()


def test_reloading_the_module_redefines_no_flags():
    assert importlib.reload(train).main(["--help"]) == 0


def test_flags_win_over_set_and_file(tmp_path):
    from absl import flags

    from vit_tpu.config import load_config

    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {name: sgd, learning_rate: 0.5}\ntraining: {epochs: 1}\n")
    values = flags.FlagValues()
    train._define(flags, values)
    values(["x", "--optimizer=lamb", "--set=optimizer.name=adafactor", "--steps=7", "--nojit"])
    config = load_config(path, train.overrides(values))
    assert config.optimizer.name == "lamb" and config.optimizer.learning_rate == 0.5
    assert config.training.steps == 7 and config.training.epochs is None and config.training.jit is False


def test_model_flag_brings_its_own_shape(tmp_path):
    from absl import flags

    from vit_tpu.config import load_config

    path = tmp_path / "c.yaml"
    path.write_text("model: {variant: Ti/4, width: 96, depth: 5}\ntraining: {epochs: 1}\n")
    values = flags.FlagValues()
    train._define(flags, values)
    values(["x", "--model=S/16", "--set=model.depth=3"])
    config = load_config(path, train.overrides(values))
    assert config.model.variant == "S/16" and config.model.width is None and config.model.depth == 3


@pytest.mark.parametrize(("code", "at_once"), [(command.INTERRUPTED, True), (command.OUT_OF_MEMORY, True), (2, False)])
def test_process_that_was_stopped_does_not_stay_to_free_its_graphs(code, at_once, monkeypatch):
    ended = []
    monkeypatch.setattr(command.os, "_exit", ended.append)
    with pytest.raises(SystemExit) as caught:  # the patched _exit returns
        command.leave(code)
    assert caught.value.code == code and ended == ([int(code)] if at_once else [])
