"""The command: exit codes, one-line errors, and the same file as a model would have saved."""

import json

import numpy as np
import pytest
from weights_helpers import build, canonical, images, same, values

from vit_tpu import convert
from vit_tpu.errors import UserError
from vit_tpu.weights import convert as convert_file
from vit_tpu.weights import describe, load_weights, save_weights


@pytest.mark.parametrize("to", ["timm", "huggingface", "keras"])
def test_converting_writes_the_file_that_a_model_saves(tmp_path, to):
    model = build(seed=0, pool="tok")
    save_weights(model, str(tmp_path / "x.npz"))
    save_weights(model, str(tmp_path / "saved"), format=to)
    assert convert.main([str(tmp_path / "x.npz"), str(tmp_path / "converted"), f"--format={to}"]) == 0
    for file in (tmp_path / "saved").iterdir():
        assert file.read_bytes() == (tmp_path / "converted" / file.name).read_bytes()
    back = [str(tmp_path / "converted"), str(tmp_path / "back.npz"), "--format", "big_vision"]
    assert convert.main(back) == 0
    assert (tmp_path / "back.npz").read_bytes() == (tmp_path / "x.npz").read_bytes()


def test_resizing_on_the_way_is_what_loading_does(tmp_path):
    save_weights(build(seed=0, pool="gap"), str(tmp_path / "x.npz"))
    arguments = [
        str(tmp_path / "x.npz"),
        str(tmp_path / "y.npz"),
        "--format=big_vision",
        "--scan",
        "--set=image_size=48,16",
    ]
    assert convert.main([*arguments, "--set", "patch_size=8", "--json", str(tmp_path / "report.json")]) == 0
    direct, converted = (
        build(pool="gap", image_size=(48, 16), patch_size=8),
        build(pool="gap", image_size=(48, 16), patch_size=8),
    )
    load_weights(direct, str(tmp_path / "x.npz"), verbose=False)
    report = load_weights(converted, str(tmp_path / "y.npz"), verbose=False)
    assert not report.resized and same(canonical(converted), canonical(direct))
    assert json.loads((tmp_path / "report.json").read_text())["sha256"] == report.sha256


def test_without_a_destination_it_says_what_the_file_is(tmp_path, capsys):
    save_weights(build(pool="map", gelu="erf"), str(tmp_path / "x.npz"))
    assert convert.main([str(tmp_path / "x.npz"), f"--json={tmp_path}/facts.json"]) == 0
    assert "pool                 map" in capsys.readouterr().out
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["gelu"] == "erf" and facts["image_size"] == [16, 16]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give SRC and DST"),
        (["a", "b", "c"], "give SRC and DST"),
        (["x.npz", "y.npz"], "give the --format"),
        (["x.npz", "y.npz", "--format=bigvision"], 'did you mean "big_vision"'),
        (["x.npz", "y.npz", "--format=timm"], "is written as .safetensors"),
        (["none.npz", "y.npz", "--format=big_vision"], "cannot be read"),
        (["x.npz", "y.npz", "--format=big_vision", "--set=heads=2"], 'did you mean "num_heads"'),
        (["x.npz", "y.npz", "--format=big_vision", "--set=num_heads=4"], "num_heads=4 would be another function"),
        (["x.npz", "y.npz", "--format=big_vision", "--set=patch_size=x"], "is not a number"),
        (["x.npz", "y.npz", "--format=big_vision", "--set=image_size=18"], "does not divide by patch_size 4"),
        (["x.npz", "y.npz", "--format=big_vision", "--source_grid=3"], "write ROWS,COLUMNS"),
        (["x.npz", "y.npz", "--formt=timm"], 'did you mean "format"'),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    save_weights(build(pool="gap"), str(tmp_path / "x.npz"))
    monkeypatch.chdir(tmp_path)
    assert convert.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "y.npz").exists()


def test_what_the_file_does_not_say_has_to_be_given(tmp_path):
    from safetensors.numpy import load_file, save_file

    model = build(seed=0, pool="tok", gelu="erf")
    save_weights(model, str(tmp_path / "x"), format="timm")
    save_file(load_file(tmp_path / "x" / "model.safetensors"), tmp_path / "bare.safetensors")
    with pytest.raises(UserError, match="num_heads"):
        convert_file(str(tmp_path / "bare.safetensors"), str(tmp_path / "y.npz"), "big_vision")
    convert_file(str(tmp_path / "bare.safetensors"), str(tmp_path / "y.npz"), "big_vision", settings={"num_heads": 2})
    again = build(pool="tok", gelu="erf")
    load_weights(again, str(tmp_path / "y.npz"), verbose=False)
    assert same(values(again), values(model))


def test_a_file_with_holes_is_not_converted(tmp_path):
    save_weights(build(pool="gap"), str(tmp_path / "x.npz"))
    arrays = dict(np.load(tmp_path / "x.npz"))
    del arrays["Transformer/encoderblock_1/MlpBlock_0/Dense_0/bias"]
    np.savez(tmp_path / "holes.npz", **arrays)
    with pytest.raises(UserError, match="holes.npz: the file lacks blocks/1/mlp/dense1/bias"):
        convert_file(str(tmp_path / "holes.npz"), str(tmp_path / "y"), "timm")


def test_what_is_assumed_is_noted(tmp_path):
    save_weights(build(pool="gap"), str(tmp_path / "x.npz"))
    np.savez(tmp_path / "plain.npz", **dict(np.load(tmp_path / "x.npz")))
    report = convert_file(str(tmp_path / "plain.npz"), str(tmp_path / "y"), "timm")
    assert "does not say gelu=tanh, epsilon=1e-06: assumed" in str(report.notes)
    report = convert_file(
        str(tmp_path / "plain.npz"), str(tmp_path / "y"), "timm", settings={"gelu": "erf", "epsilon": 1e-6}
    )
    assert "assumed" not in str(report.notes) and describe(str(tmp_path / "y"))["gelu"] == "erf"


def test_class_token_is_dropped_or_becomes_a_register(tmp_path):
    model = build(seed=0, pool="tok")
    save_weights(model, str(tmp_path / "x.npz"))
    convert_file(str(tmp_path / "x.npz"), str(tmp_path / "gap.npz"), "big_vision", allow=["cls"])
    assert "cls" not in np.load(tmp_path / "gap.npz").files
    convert_file(str(tmp_path / "x.npz"), str(tmp_path / "y"), "timm", settings={"pool": "gap"})
    facts = describe(str(tmp_path / "y"))
    assert (facts["pool"], facts["registers"]) == ("gap", 1)
    again = build(**facts)
    load_weights(again, str(tmp_path / "y"), verbose=False)
    np.testing.assert_allclose(again.encode(images()), model.encode(images()), atol=1e-6)
