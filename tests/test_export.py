"""`python -m vit_tpu.export`: from a run's folder or a weight file to an artefact."""

import json

import numpy as np
import pytest

from vit_tpu import export


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "give the folder to write"),
        (["out"], "give --workdir of a run or --weights of a file"),
        (["out", "--workdir=a", "--weights=b"], "one of them"),
        (["out", "--workdir=a", "--model=S/16"], "--model belongs to --weights"),
        (["out", "--workdir=a", "--format=onix"], 'did you mean "onnx"'),
        (["out", "--workdir=nowhere"], "nowhere is not the folder of a run"),
        (["out", "--wordkir=a"], 'did you mean "workdir"'),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert export.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


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
