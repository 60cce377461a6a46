"""Weight files of big_vision and vision_transformer: every container and layout, with the reference's logits."""

import numpy as np
import pytest
from weights_helpers import build, canonical, images, same, values

from vit_tpu.errors import UserError
from vit_tpu.weights import load_weights, save_weights

CASES = {
    "vit_map": {"pool": "map"},
    "vit_gap": {"pool": "gap"},
    "vit_tok_rep": {"pool": "tok", "representation_size": 32},
    "vit_gap_sincos_rep": {"pool": "gap", "posemb": "sincos2d", "representation_size": 32},
    "vit_map_scan": {"pool": "map", "scan": True},
}
SIZE = {"image_size": 64, "num_classes": 10, "width": 32, "mlp_dim": 64, "patch_size": 16}


def load(model, path, **kwargs):
    return load_weights(model, str(path), verbose=False, **kwargs)


def reference_params(refs, name):
    file = refs(f"{name}.npz")
    return {key.removeprefix("params/"): file[key] for key in file.files if key.startswith("params/")}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("scan", [False, True])
def test_reference_files_load_and_give_the_reference_logits(refs, name, scan):
    file = refs(f"{name}.npz")
    model = build(**{**SIZE, **CASES[name], "scan": scan})
    report = load(model, file.fid.name)
    assert report.source.startswith("big_vision")
    assert not report.new and not report.unused and not report.resized
    assert report.loaded and not [n for n in report.ignored if n.startswith("params/")]
    np.testing.assert_allclose(model(file["in/image"]), file["out/logits"], atol=2e-5)


def test_bare_checkpoint_gives_the_same_logits(refs):
    model = build(**SIZE, pool="map")
    load(model, refs("ckpt_map_params_only.npz").fid.name)
    np.testing.assert_allclose(model(refs("vit_map.npz")["in/image"]), refs("vit_map.npz")["out/logits"], atol=2e-5)


def test_older_layout_gives_the_reference_logits(refs):
    model = build(**SIZE, pool="tok")
    report = load(model, refs("vit_jax_linen_layout.npz").fid.name)
    assert report.source.startswith("vision_transformer")
    np.testing.assert_allclose(
        model(refs("vit_jax_logits.npz")["image"]), refs("vit_jax_logits.npz")["logits"], atol=1e-5
    )


PRELINEN = (
    ("LayerNorm_1", "LayerNorm_2"),
    ("MlpBlock_0", "MlpBlock_3"),
    ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
)


def test_prelinen_names_give_the_reference_logits(refs, tmp_path):
    old = dict(refs("vit_jax_linen_layout.npz"))
    names = refs("vit_jax_layouts.json")["prelinen"]
    renamed = {}
    for key, array in old.items():
        for now, before in PRELINEN:
            key = key.replace(now, before)
        renamed[key] = array
    assert sorted(renamed) == names
    np.savez(
        tmp_path / "old.npz", **{f"opt/target/{k}": v for k, v in renamed.items()}, **{"opt/state/step": np.array(3)}
    )
    model = build(**SIZE, pool="tok")
    report = load(model, tmp_path / "old.npz")
    assert report.ignored == ("opt/state/step",)
    np.testing.assert_allclose(
        model(refs("vit_jax_logits.npz")["image"]), refs("vit_jax_logits.npz")["logits"], atol=1e-5
    )


def test_scenic_classifier_name(refs, tmp_path):
    arrays = {k.replace("head/", "output_projection/"): v for k, v in dict(refs("vit_jax_linen_layout.npz")).items()}
    np.savez(tmp_path / "scenic.npz", **arrays)
    model = build(**SIZE, pool="tok")
    load(model, tmp_path / "scenic.npz")
    assert np.array_equal(values(model)["head/kernel"], arrays["output_projection/kernel"])


CONTAINERS = {
    "bare": lambda p: p,
    "params": lambda p: {f"params/{k}": v for k, v in p.items()} | {"opt/0/mu/head/kernel": np.ones(3)},
    "opt_target": lambda p: {f"opt/target/{k}": v for k, v in p.items()} | {"opt/state/step": np.array(1)},
    "inlined_map": lambda p: {k.removeprefix("MAPHead_0/"): v for k, v in p.items()},
    "fortran": lambda p: {k: np.asfortranarray(v) for k, v in p.items()},
    "float64": lambda p: {k: v.astype(np.float64) for k, v in p.items()},
    "big_endian": lambda p: {k: v.astype(">f4") for k, v in p.items()},
}


@pytest.mark.parametrize("name, container", [("vit_map", c) for c in CONTAINERS] + [("vit_map_scan", "fortran")])
def test_every_container_gives_the_same_weights(refs, tmp_path, container, name):
    params = reference_params(refs, name)
    np.savez(tmp_path / "x.npz", **CONTAINERS[container](params))
    model, expected = build(**SIZE, pool="map"), build(**SIZE, pool="map")
    report = load(model, tmp_path / "x.npz")
    load(expected, refs(f"{name}.npz").fid.name)
    assert same(values(model), values(expected))
    assert len(report.loaded) == 54 and not report.unused


def test_compressed_scan_file_is_read_row_by_row(refs, tmp_path):
    np.savez_compressed(tmp_path / "x.npz", **reference_params(refs, "vit_map_scan"))
    model, expected = build(**SIZE, pool="map"), build(**SIZE, pool="map")
    load(model, tmp_path / "x.npz")
    load(expected, refs("vit_map_scan.npz").fid.name)
    assert same(values(model), values(expected))


def test_bfloat16_stored_as_void2_is_exact(refs, tmp_path):
    params = reference_params(refs, "vit_map")
    bits = {k: (v.view(np.uint32) >> 16).astype(np.uint16) for k, v in params.items()}
    np.savez(tmp_path / "x.npz", **{k: v.view("V2") for k, v in bits.items()})
    model = build(**SIZE, pool="map")
    load(model, tmp_path / "x.npz")
    for ours, theirs in (("head/kernel", "head/kernel"), ("map/probe", "MAPHead_0/probe"), ("posemb", "pos_embedding")):
        expected = (bits[theirs].astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(values(model)[ours], expected)


@pytest.mark.parametrize("stored", ["img/", "params/img/"])
def test_sub_tree_after_a_colon(refs, tmp_path, stored):
    params = reference_params(refs, "vit_map")
    text = {stored.replace("img", "txt") + "head/bias": np.ones(3)}
    np.savez(tmp_path / "two.npz", **{f"{stored}{k}": v for k, v in params.items()}, **text)
    model = build(**SIZE, pool="map")
    load(model, f"{tmp_path}/two.npz:img")
    assert np.array_equal(values(model)["posemb"], params["pos_embedding"])
    with pytest.raises(UserError, match="two.npz:img"):  # without it, the message says what to write
        load(model, f"{tmp_path}/two.npz")
    with pytest.raises(UserError, match='nothing below "imgs".*did you mean "img"'):
        load(model, f"{tmp_path}/two.npz:imgs")


def test_class_token_rows_are_added_to_the_tokens(refs, tmp_path):
    old = dict(refs("vit_jax_linen_layout.npz"))
    model = build(**SIZE, pool="tok")
    load(model, refs("vit_jax_linen_layout.npz").fid.name)
    table = old["Transformer/posembed_input/pos_embedding"]
    assert np.array_equal(values(model)["cls"], old["cls"] + table[:, :1])
    assert np.array_equal(values(model)["posemb"], table[:, 1:])


def test_float16_file_of_the_older_layout_resized_bicubically(tmp_path):
    """The layout and dtype of a real DINOv2-derived file: class token row, LayerNorm_2, positions of another grid."""
    model = build(seed=0, pool="tok", num_classes=0, image_size=20, gelu="erf")
    save_weights(model, str(tmp_path / "new.npz"))
    arrays = {}
    for key, array in dict(np.load(tmp_path / "new.npz")).items():
        for now, before in PRELINEN:
            key = key.replace(now, before) if key.startswith("Transformer/encoderblock") else key
        arrays[key] = array.astype(np.float16)
    table = arrays.pop("pos_embedding")
    rng = np.random.default_rng(1)
    row = rng.normal(size=(1, 1, 16)).astype(np.float16)
    arrays["Transformer/posembed_input/pos_embedding"] = np.concatenate([row, table], 1)
    np.savez(tmp_path / "old.npz", **arrays)
    other = build(pool="tok", num_classes=0, image_size=16, gelu="erf")
    report = load(other, tmp_path / "old.npz", resize="bicubic")
    assert report.resized == {"posemb": "5x5 to 4x4, bicubic"}
    # PyTorch's weights of 5 -> 4 at a = -0.75, half-pixel centres: the first new centre lies at 0.125.
    t, a = np.array([1.125, 0.125, 0.875, 1.875]), -0.75
    w = np.where(t <= 1, ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a)
    first = np.array([w[0] + w[1], w[2], w[3]])  # the tap left of the edge repeats the edge
    corner = np.einsum("r,c,rcd->d", first, first, table.astype(np.float64).reshape(5, 5, 16)[:3, :3])
    np.testing.assert_allclose(values(other)["posemb"][0, 0], corner, atol=1e-5)
    expected = (arrays["cls"].astype(np.float32) + row).astype(np.float32)
    assert np.array_equal(values(other)["cls"], expected)


def test_missing_projection_biases_are_zero(refs, tmp_path):
    params = {k: v for k, v in reference_params(refs, "vit_map").items() if "/query/bias" not in k}
    np.savez(tmp_path / "x.npz", **params)
    model = build(seed=3, **SIZE, pool="map")
    report = load(model, tmp_path / "x.npz")
    assert report.new["blocks/0/attention/query/bias"] == "0: the file has no such bias"
    assert not values(model)["blocks/0/attention/query/bias"].any()
    del params["Transformer/encoderblock_0/MultiHeadDotProductAttention_0/key/bias"]  # one of two: not a choice, a hole
    np.savez(tmp_path / "x.npz", **params)
    with pytest.raises(UserError, match="missing in the file: blocks/0/attention/key/bias"):
        load(model, tmp_path / "x.npz")


@pytest.mark.parametrize("scan", [False, True])
def test_saved_stacked_or_not_and_loaded_into_either(tmp_path, scan):
    for stored in (False, True):
        model = build(seed=1, pool="map", scan=scan)
        save_weights(model, str(tmp_path / "x.npz"), scan=stored)
        assert ("Transformer/encoderblock/LayerNorm_0/scale" in np.load(tmp_path / "x.npz").files) == stored
        other = build(pool="map", scan=not scan)
        load(other, tmp_path / "x.npz")
        assert same(canonical(other), canonical(model))
        np.testing.assert_allclose(other(images()), model(images()), atol=1e-6)


def test_saved_file_has_the_published_names_and_shapes(refs, tmp_path):
    model = build(**SIZE, pool="map")
    load(model, refs("vit_map.npz").fid.name)
    save_weights(model, str(tmp_path / "x.npz"))
    assert same(dict(np.load(tmp_path / "x.npz")), dict(refs("ckpt_map_params_only.npz")))
