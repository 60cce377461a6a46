"""`python -m vit_tpu.export`: from a run's folder or a weight file to an artefact."""

import json

import numpy as np
import pytest
import trained_runs

from vit_tpu import export


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "give the folder to write"),
        (["out"], "give --workdir=RUN or --weights=FILE: whose model it is"),
        (["out", "--workdir=a", "--weights=b"], "give --workdir=RUN or --weights=FILE: whose model it is"),
        (["out", "--workdir=a", "--model=S/16"], "--model goes with --weights; a run knows its own"),
        (["out", "--workdir=a", "--format=onix"], 'did you mean "onnx"'),
        (["out", "--workdir=nowhere"], "nowhere is not the folder of a run"),
        (["out", "--wordkir=a"], 'did you mean "workdir"'),
        ([""], "give the folder to write"),
        (["out", "--workdir=a", "--normalize=imagenet"], "--normalize goes with --weights"),
        (["out", "--workdir=a", "--class_names=x"], "--class_names goes with --weights"),
        (["out", "--weights=a", "--ema"], "--ema goes with --workdir"),
        (["out", "--weights=a", "--checkpoint=best"], "--checkpoint goes with --workdir"),
        (["out", "--workdir="], "give --workdir=RUN or --weights=FILE: whose model it is"),
        (["out", "--workdir=a", "--calibration=0"], "--calibration=0: ask for 1 image or more"),
        (["out", "--workdir=a", "--examples=-1"], "--examples=-1: ask for 0"),
        ([".", "--workdir=a"], ". exists: choose a new folder"),  # said before anything is loaded
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert export.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_int8_without_its_training_images_says_why_it_needs_them(tmp_path, capsys):
    gone = ["--set=data.source=folder", "--set=data.path=/gone/away"]
    arguments = [str(tmp_path / "out"), f"--workdir={trained_runs.digits()}", *gone, "--format=tflite_int8"]
    assert export.main(arguments) == 2
    error = capsys.readouterr().err
    assert "value ranges from training images" in error and "/gone/away" in error and not list(tmp_path.iterdir())


def test_the_checkpoint_that_was_asked_for_is_exported(tmp_path, capsys):
    run = str(trained_runs.digits())
    assert export.main([str(tmp_path / "out"), f"--workdir={run}", "--checkpoint=7", "--format=onnx"]) == 2
    assert 'keeps no checkpoint "7"' in capsys.readouterr().err


def test_imagenets_normalization_becomes_part_of_the_artefact(tmp_path, capsys):
    from vit_tpu import ViT, save_weights
    from vit_tpu.exporting import formats

    model = ViT("Ti/4", width=16, depth=1, mlp_dim=32, num_heads=2, image_size=8, num_classes=3, pool="gap")
    model.head.params["kernel"].assign(np.random.default_rng(0).normal(size=(16, 3)))
    save_weights(model, tmp_path / "w.npz", format="keras")
    arguments = [str(tmp_path / "out"), f"--weights={tmp_path / 'w.npz'}", "--normalize=imagenet", "--examples=0"]
    assert export.main([*arguments, "--format=onnx"]) == 0
    x = np.random.default_rng(1).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    normal = ((x + 1) / 2 - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    np.testing.assert_allclose(formats.read(tmp_path / "out")(x), model(normal), atol=1e-4)


def test_channels_of_a_weight_file_are_its_own(tmp_path, capsys):
    grey = trained_runs.digits() / "checkpoints" / "00000040" / "model.safetensors"
    assert export.main([str(tmp_path / "out"), f"--weights={grey}", "--format=onnx", "--examples=0"]) == 0
    assert json.loads((tmp_path / "out" / "preprocessing.json").read_text())["channels"] == 1


def test_a_weight_file_becomes_an_artefact_with_its_names(tmp_path, capsys):
    from vit_tpu import ViT, save_weights
    from vit_tpu.exporting import formats

    model = ViT("Ti/4", width=16, depth=1, mlp_dim=32, num_heads=2, image_size=8, num_classes=3, pool="gap")
    model.head.params["kernel"].assign(np.random.default_rng(0).normal(size=(16, 3)))
    save_weights(model, tmp_path / "w.npz", format="keras")
    (tmp_path / "names.txt").write_text("ant\nbee\ncat\n")
    out = tmp_path / "out"
    arguments = [str(out), f"--weights={tmp_path / 'w.npz'}", f"--class_names={tmp_path / 'names.txt'}"]
    assert export.main([*arguments, "--format=onnx", "--examples=0", "--set", "model.num_heads=2"]) == 0
    assert "onnx in" in capsys.readouterr().out
    assert (out / "labels.txt").read_text() == "ant\nbee\ncat\n"
    x = np.random.default_rng(1).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    np.testing.assert_allclose(formats.read(out)(x), model(x), atol=1e-5)
    assert json.loads((out / "export.json").read_text())["format"] == "onnx"
