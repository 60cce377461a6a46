"""The command line of vit_tpu.evaluate: what it prints and writes, wrong use, exit codes."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import trained_runs

from vit_tpu import evaluate, train

REFS = pathlib.Path(__file__).parent / "data" / "refs"


def test_help_teaches(capsys):
    assert evaluate.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "python -m vit_tpu.evaluate" in out and "Exit codes" in out
    for flag in ("--workdir", "--weights", "--fewshot", "--real", "--labels_map", "--[no]ema"):
        assert flag in out


def test_a_trained_run_is_given_the_figures_of_its_own_summary(tmp_path, capsys):
    run = tmp_path / "run"
    tiny = ["--set=width=16", "--set=depth=1", "--set=mlp_dim=32", "--set=num_heads=2", "--batch_size=32", "--steps=6",
            "--steps_per_execution=3", f"--workdir={run}"]  # fmt: skip
    assert train.main(tiny) == 0
    capsys.readouterr()
    assert evaluate.main([f"--workdir={run}", f"--json={tmp_path / 'result.json'}", "--batch_size=50"]) == 0
    out = capsys.readouterr().out
    assert "average (EMA)" in out and "expected error" in out
    found, wanted = json.loads((tmp_path / "result.json").read_text()), json.loads((run / "summary.json").read_text())
    assert found["count"] == wanted["validation"]["count"] == 360
    assert found["accuracy"] == pytest.approx(wanted["validation"]["accuracy"], abs=1e-6)
    assert found["loss"] == pytest.approx(wanted["validation"]["loss"], rel=1e-5)
    assert np.sum(found["confusion"]) == 360 and len(found["per_class"]) == 10 and len(found["reliability"]) == 15
    for name in ("confusion.png", "reliability.png"):
        assert (run / "plots" / name).stat().st_size > 5000


def test_features_in_one_table(tmp_path, capsys):
    arguments = [
        f"--workdir={trained_runs.digits()}",
        "--fewshot=1,5",
        "--knn=5",
        "--probe",
        f"--json={tmp_path / 'r.json'}",
    ]
    assert evaluate.main(arguments) == 0
    out = capsys.readouterr().out
    for text in ("5-NN", "probe", "few-shot", "seed 2", "shots"):
        assert text in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["fewshot"]["rows"]) == 6 and found["neighbours"][0]["k"] == 5
    # Random features of digits are above chance already, and more examples help.
    assert 0.1 < found["fewshot"]["mean"]["1"] < found["fewshot"]["mean"]["5"] < found["probe"]["accuracy"]


def test_weights_on_class_folders(tmp_path, capsys):
    for i in range(8):
        path = tmp_path / "data" / f"{i % 4}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.full((64, 64, 3), 30 * i, np.uint8)).numpy())
    arguments = [
        f"--weights={REFS / 'vit_map.npz'}",
        f"--data={tmp_path / 'data'}",
        "--split=all",
        f"--plots={tmp_path / 'p'}",
    ]
    assert evaluate.main([*arguments, "--model=Ti/16"]) == 2
    capsys.readouterr()
    assert evaluate.main(arguments) == 0
    out = capsys.readouterr().out
    assert "8 examples" in out and "the data have 4 classes, the head 10" in out
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["confusion.png", "reliability.png"]


@pytest.mark.parametrize("content", [b"model: [", b"", b"\xff\xfe", b"just words"])
def test_damaged_settings_of_a_run_are_named(content, tmp_path, capsys):
    run = shutil.copytree(trained_runs.digits(), tmp_path / "run")
    (run / "config.yaml").write_bytes(content)
    assert evaluate.main([f"--workdir={run}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{run}/config.yaml is damaged (" in error and "manifest.json" in error


def test_a_damaged_summary_is_named(tmp_path, capsys):
    run = shutil.copytree(trained_runs.digits(), tmp_path / "run")
    (run / "summary.json").write_text("{")
    assert evaluate.main([f"--workdir={run}", "--checkpoint=best"]) == 2
    assert f"{run}/summary.json is damaged (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --workdir=RUN or --weights=FILE"),
        (["--workdir=a", "--weights=b"], "give --workdir=RUN or --weights=FILE"),
        (["--workdir=nowhere"], "nowhere is not the folder of a run"),
        (["--weights=none.npz", "--data=digits"], "none.npz cannot be read"),
        (["--weights=none.npz"], "--weights needs --data"),
        (["--workdir=RUN", "--data=no/such"], "--data=no/such"),
        (["--workdir=RUN", "--model=B/16"], "--model goes with --weights"),
        (["--workdir=RUN", "--fewshot=1,x"], "--fewshot=1,x"),
        (["--workdir=RUN", "--fewshot=500"], "500 shots need 500"),
        (["--workdir=RUN", "--knn=0"], "--knn=0"),
        (["--workdir=RUN", "--knn=5000"], "5000 neighbours of 1437"),
        (["--workdir=RUN", "--knn=5", "--temperature=-1"], "--temperature=-1"),
        (["--workdir=RUN", "--knn=5", "--features=cls"], "no class token"),
        (["--workdir=RUN", "--knn=5", "--features=clss"], 'did you mean "cls"'),
        (["--workdir=RUN", "--knn=5", "--real=x.json"], "judge the head"),
        (["--workdir=RUN", "--real=x.json"], "x.json cannot be read"),
        (["--workdir=RUN", "--labels_map=x.json"], "x.json cannot be read"),
        (["--workdir=RUN", "--split=test"], "none of validation, train, all"),
        (["--workdir=RUN", "--json=no/such/x.json"], "there is no folder no/such"),
        (["--workdir=RUN", "--set=model.depht=2"], 'did you mean "depth"'),
        (["--workdir=RUN", "--batch_size=0"], "batch_size is 0"),
        (["--workdir=RUN", "--json=RUN"], "--json=RUN is a folder"),
        (["--workdir=RUN", "--plots=RUN/config.yaml"], "--plots=RUN/config.yaml is a file"),
        (["--workdir=RUN", "--normalize=imagenet"], "--normalize goes with --weights"),
        (["--workdir="], "give --workdir=RUN or --weights=FILE"),
        (["--workdir=RUN", "--data=synthetic", "--set=data.classes=12"], "has 12 classes, but the head has 10"),
        (["--workdir=RUN", "--strategy=gpu"], "no GPU"),
        (["--workdir=RUN", "stray"], '"stray" is not a flag'),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if any("RUN" in text for text in arguments):
        shutil.copytree(trained_runs.digits(), tmp_path / "RUN")
    assert evaluate.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
