"""timm and transformers files: random models run by PyTorch, stored with their outputs (make_references.py)."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from weights_helpers import build, canonical, images, same, values

from vit_tpu.errors import UserError
from vit_tpu.weights import describe, load_weights, save_weights

DATA = pathlib.Path(__file__).parents[1] / "data" / "weights"
CONFIGS = json.loads((DATA / "torch_cases.json").read_text())
OUTPUTS = np.load(DATA / "torch_outputs.npz")
EXPECTED = {
    "timm_tok": {"pool": "tok"},
    "timm_avg_fc_norm": {"pool": "gap", "registers": 1, "norm_position": "after"},
    "timm_avg": {"pool": "gap", "norm_position": "before"},
    "timm_map": {"pool": "map", "gelu": "tanh"},
    "timm_registers": {"pool": "tok", "registers": 3, "layer_scale": 1.0},
    "timm_registers_embedded": {"pool": "tok", "registers": 3, "layer_scale": 1.0},
    "timm_no_qkv_bias": {"pool": "tok"},
    "timm_map_registers_fc_norm": {"pool": "map", "registers": 2, "norm_position": "after", "gelu": "erf"},
    "hf_vit_classifier": {"pool": "tok", "epsilon": 1e-12, "gelu": "erf", "num_classes": 5},
    "hf_vit_pooler": {"pool": "tok", "representation_size": 16, "num_classes": 0},
    "hf_vit_no_qkv_bias": {"pool": "tok"},
    "hf_dinov2": {"pool": "tok", "layer_scale": 1.0, "epsilon": 1e-6},
    "hf_dinov2_registers": {"pool": "tok", "registers": 3, "layer_scale": 1.0},
    "hf_siglip": {"pool": "map", "gelu": "tanh", "num_heads": 2},
}


def folder(name, tmp_path):
    """Returns a folder as the hub has it: model.safetensors and config.json."""
    where = tmp_path / name
    where.mkdir()
    shutil.copy(DATA / f"{name}.safetensors", where / "model.safetensors")
    (where / "config.json").write_text(json.dumps(CONFIGS[name]))
    return where


def load(model, path, **kwargs):
    return load_weights(model, str(path), verbose=False, **kwargs)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_file_says_how_to_build_the_model_and_gives_pytorchs_output(name, tmp_path):
    where = folder(name, tmp_path)
    facts = describe(str(where))
    assert {key: facts.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    model = build(**facts)
    report = load(model, where)
    assert not report.unused and report.ignored in ((), ("embeddings.mask_token",))
    np.testing.assert_allclose(model(OUTPUTS["images"]), OUTPUTS[name], atol=2e-5)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_saved_again_it_has_the_names_shapes_and_values_pytorch_wrote(name, tmp_path):
    where = folder(name, tmp_path)
    model = build(**describe(str(where)))
    load(model, where)
    save_weights(model, str(tmp_path / "out"), format="timm" if name.startswith("timm") else "huggingface")
    theirs, ours = load_file(where / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    ours = {key.removeprefix("vision_model."): array for key, array in ours.items()}
    if name == "timm_avg_fc_norm":  # its class token, which no pooling reads, is a register here
        theirs["reg_token"] = theirs.pop("cls_token")
    new = {key for key in ours if key not in theirs}
    assert all(
        key.endswith(("qkv.bias", "query.bias", "key.bias", "value.bias")) and not ours[key].any() for key in new
    )
    assert theirs.keys() <= ours.keys()
    tokens = (
        "cls_token",
        "pos_embed",
        "reg_token",
        "position_embeddings",
        "mask_token",
    )
    for key, array in theirs.items():
        if not key.endswith(tokens):
            assert np.array_equal(array, ours[key]), key
    again = build(**describe(str(tmp_path / "out")))
    load(again, tmp_path / "out")
    assert same(values(again), values(model))


MODELS = {
    "tok": {"pool": "tok"},
    "avg": {"pool": "gap"},
    "map": {"pool": "map", "num_classes": 0},
    "registers": {"pool": "tok", "registers": 2, "layer_scale": 0.1},
    "scan": {"pool": "tok", "scan": True},
    "sincos": {"pool": "gap", "posemb": "sincos2d"},
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("format_", ["timm", "huggingface", "keras", "big_vision"])
def test_round_trips_are_bit_equal(name, format_, tmp_path):
    model = build(seed=1, **MODELS[name])
    if (format_, name) == ("big_vision", "registers"):
        with pytest.raises(UserError, match="no place for registers.*allow="):
            save_weights(model, str(tmp_path / "out"), format=format_)
        return
    report = save_weights(model, str(tmp_path / "out"), format=format_)
    again = build(seed=2, **MODELS[name])
    load(again, report.path)
    assert same(canonical(again), canonical(model))
    np.testing.assert_array_equal(again(images()), model(images()))
    assert report.parameters >= sum(array.size for array in values(model).values())


@pytest.mark.parametrize("format_", ["keras"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_our_own_names_stacked_or_not(format_, suffix, tmp_path):
    model = build(seed=1, pool="map", scan=True, norm_position="after")
    for scan in (False, True):
        save_weights(model, str(tmp_path / f"x{suffix}"), format=format_, scan=scan)
        again = build(seed=2, pool="map", norm_position="after")
        load(again, tmp_path / f"x{suffix}")
        assert same(canonical(again), canonical(model))


def test_class_token_pooling_norm_before_and_norm_after_are_three_functions():
    """timm: token -> norm(x)[0]; avg without fc_norm -> mean(norm(x)); avg with fc_norm -> norm(mean(x))."""
    outputs = []
    for settings in (
        {"pool": "tok"},
        {"pool": "gap", "registers": 1},
        {"pool": "gap", "registers": 1, "norm_position": "after"},
    ):
        model = build(num_classes=0, **settings)
        tokens = np.arange(17 * 16, dtype=np.float32).reshape(1, 17, 16) ** 1.5
        plain = (tokens - tokens.mean(-1, keepdims=True)) / np.sqrt(tokens.var(-1, keepdims=True) + 1e-6)
        if settings["pool"] == "tok":
            expected = plain[:, 0]
        elif "norm_position" in settings:
            mean = tokens[:, 1:].mean(1)
            expected = (mean - mean.mean(-1, keepdims=True)) / np.sqrt(mean.var(-1, keepdims=True) + 1e-6)
        else:
            expected = plain[:, 1:].mean(1)
        encoded = tokens if "norm_position" in settings else model.norm(tokens)
        got = model.pooled(encoded).numpy()
        np.testing.assert_allclose(got, expected, atol=1e-4)
        outputs.append(got)
    assert min(np.abs(outputs[i] - outputs[j]).max() for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3


def test_norm_position_and_gelu_of_the_file_are_compared(tmp_path):
    where = folder("timm_avg_fc_norm", tmp_path)
    facts = describe(str(where))
    with pytest.raises(UserError, match="norm_position='after', the model 'before'"):
        load(build(**{**facts, "norm_position": "before"}), where)
    with pytest.raises(UserError, match="gelu='erf', the model 'tanh'"):
        load(build(**{**facts, "gelu": "tanh"}), where)
    with pytest.raises(UserError, match='pool="gap", registers=1'):
        load(build(**{**facts, "pool": "tok", "registers": 0}), where)


def test_what_has_no_counterpart_here_is_an_error(tmp_path):
    arrays = load_file(DATA / "timm_tok.safetensors")
    save_file(arrays | {"norm_pre.weight": np.ones(16, np.float32)}, tmp_path / "clip.safetensors")
    model = build(pool="tok", gelu="erf")
    with pytest.raises(UserError, match="not in the model: norm_pre.weight"):
        load(model, tmp_path / "clip.safetensors")
    save_file(arrays | {"fc_norm.weight": np.ones(16, np.float32)}, tmp_path / "both.safetensors")
    with pytest.raises(UserError, match="holds both"):
        load(model, tmp_path / "both.safetensors")
    save_file({f"visual.trunk.{k}": v for k, v in arrays.items()}, tmp_path / "open_clip.safetensors")
    with pytest.raises(UserError, match="open_clip.safetensors:visual.trunk"):
        load(model, tmp_path / "open_clip.safetensors")
    load(model, f"{tmp_path}/open_clip.safetensors:visual.trunk")


def test_half_precision_files(tmp_path):
    import tensorflow as tf

    arrays = load_file(DATA / "timm_tok.safetensors")
    save_file({k: v.astype(np.float16) for k, v in arrays.items()}, tmp_path / "half.safetensors")
    model = build(pool="tok", gelu="erf")
    load(model, tmp_path / "half.safetensors")
    expected = arrays["head.weight"].astype(np.float16).astype(np.float32).T
    assert np.array_equal(values(model)["head/kernel"], expected)
    bfloat16 = tf.bfloat16.as_numpy_dtype
    save_file({k: v.astype(bfloat16) for k, v in arrays.items()}, tmp_path / "bf16.safetensors")
    load(model, tmp_path / "bf16.safetensors")
    assert np.array_equal(values(model)["head/kernel"], arrays["head.weight"].astype(bfloat16).astype(np.float32).T)


def test_dinov2_classifier_reads_the_class_token_only_if_the_other_half_is_zero(tmp_path):
    model = build(seed=0, pool="tok", registers=1, layer_scale=1.0, gelu="erf")
    save_weights(model, str(tmp_path / "out"), format="huggingface")
    path = tmp_path / "out" / "model.safetensors"
    arrays = load_file(path)
    assert arrays["classifier.weight"].shape == (5, 32) and not arrays["classifier.weight"][:, 16:].any()
    arrays["classifier.weight"][0, 20] = 1.0
    save_file(arrays, path)
    with pytest.raises(UserError, match=r"head/kernel \[32, 5\] for \[16, 5\]"):
        load(model, path)


@pytest.mark.parametrize(
    "settings, format_, match",
    [
        ({"pool": "map"}, "huggingface", "no classifier on its MAP head"),
        ({"pool": "gap", "registers": 1}, "huggingface", "save as timm or keras"),
        ({"pool": "tok", "norm_position": "after"}, "big_vision", "norm after the pooling"),
        ({"pool": "tok", "norm_position": "after"}, "huggingface", "normalises after the pooling"),
        ({"pool": "tok", "representation_size": 8}, "timm", "no layer before the classifier"),
        ({"pool": "tok", "representation_size": 8}, "huggingface", "not both"),
        ({"pool": "tok", "image_size": (8, 16)}, "huggingface", "square images"),
    ],
)
def test_what_a_format_cannot_hold_is_an_error_before_anything_is_written(settings, format_, match, tmp_path):
    with pytest.raises(UserError, match=match):
        save_weights(build(**settings), str(tmp_path / "out"), format=format_)
    assert not (tmp_path / "out").exists()


def test_saving_without_a_head_that_the_format_has_no_place_for(tmp_path):
    model = build(seed=0, pool="map")
    save_weights(model, str(tmp_path / "out"), format="huggingface", allow=["head/*"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["SiglipVisionModel"] and config["hidden_act"] == "gelu_pytorch_tanh"
    again = build(seed=1, pool="map")
    report = load(again, tmp_path / "out", allow=["head/*"])
    assert set(report.new) == {"head/kernel", "head/bias"}
