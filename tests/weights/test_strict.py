"""What does not match is an error that says both sides; the report accounts for everything."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf
from weights_helpers import build, images, same, values

from vit_tpu.errors import UserError
from vit_tpu.weights import describe, load_weights, save_weights


def load(model, path, **kwargs):
    return load_weights(model, str(path), verbose=False, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns (model, file) of a random MAP model with 5 classes."""
    model = build(seed=0, pool="map")
    path = tmp_path_factory.mktemp("saved") / "map.npz"
    save_weights(model, str(path))
    return model, path


def test_report_accounts_for_file_and_model(saved, capsys):
    _, path = saved
    model = build(pool="map")
    report = load_weights(model, str(path))
    assert sorted(report.loaded) == sorted(values(model))
    assert (report.unused, report.new, report.resized) == ((), {}, {})
    assert report.bytes == path.stat().st_size
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    printed = capsys.readouterr().out
    assert "loaded   54 tensors" in printed and report.sha256 in printed and "big_vision (it holds" in printed
    assert report.to_dict()["loaded"] == list(report.loaded)


def test_other_classes_reinitialise_the_head_only(saved):
    source, path = saved
    model = build(seed=9, pool="map", num_classes=7, head_bias_init=-10.0)
    before = values(model)
    with pytest.raises(UserError, match=r"head/kernel \[16, 5\] for \[16, 7\].*allow=\['head/\*'\]"):
        load(model, path)
    assert same(values(model), before)
    report = load(model, path, allow=["head/*"])
    after, expected = values(model), values(source)
    assert set(report.new) == {"head/kernel", "head/bias"} and set(report.unused) == {"head/kernel", "head/bias"}
    assert report.new["head/bias"] == "-10: a fresh head"
    assert not after["head/kernel"].any() and (after["head/bias"] == -10).all()
    body = {k: v for k, v in after.items() if not k.startswith("head/")}
    assert same(body, {k: v for k, v in expected.items() if not k.startswith("head/")})


def test_dropping_the_head_keeps_map_and_gives_equal_features(saved):
    source, path = saved
    models = [build(seed=seed, pool="map", num_classes=0) for seed in (3, 4)]
    with pytest.raises(UserError, match="not in the model: head/kernel, head/bias"):
        load(models[0], path)
    features = []
    for model in models:
        load(model, path, allow=["head/*"])
        features.append(model(images()).numpy())
    assert np.array_equal(*features)
    assert np.array_equal(features[0], source.pooled(source.encode(images())).numpy())


def test_another_body_is_an_error_even_with_the_head_allowed(saved):
    _, path = saved
    model = build(pool="map", mlp_dim=48)
    with pytest.raises(UserError, match="mlp_dim 32, not 48.*other shapes: blocks/0/mlp/dense1/kernel"):
        load(model, path, allow=["head/*"])
    with pytest.raises(UserError, match="depth 2, not 3.*missing in the file: blocks/2/norm1/scale"):
        load(build(pool="map", depth=3), path)
    with pytest.raises(UserError, match="depth 2, not 1.*not in the model: Transformer/encoderblock_1"):
        load(build(pool="map", depth=1), path)


def test_both_sides_and_the_nearest_names_are_listed(saved, tmp_path):
    _, path = saved
    arrays = dict(np.load(path))
    arrays["Transformer/encoder_norm/scales"] = arrays.pop("Transformer/encoder_norm/scale")
    arrays["extra"] = np.ones(3, np.float32)
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError) as caught:
        load(build(pool="map"), tmp_path / "x.npz")
    message = str(caught.value)
    assert "missing in the file: norm/scale" in message and "not in the model:" in message
    assert "Transformer/encoder_norm/scales" in message and "extra" in message and "\n" not in message
    report = load(
        build(pool="map"), tmp_path / "x.npz", allow=["norm/scale", "Transformer/encoder_norm/scales", "extra"]
    )
    assert set(report.unused) == {"Transformer/encoder_norm/scales", "extra"} and set(report.new) == {"norm/scale"}


def test_nothing_matched_is_an_error_whatever_is_allowed(tmp_path):
    save_weights(build(pool="gap"), str(tmp_path / "x.npz"))
    with pytest.raises(UserError, match="nothing in common"):
        load(
            build(pool="gap", width=32, mlp_dim=64, depth=1, patch_size=8, num_classes=3),
            tmp_path / "x.npz",
            allow=["*"],
        )


@pytest.mark.parametrize("pool, allow", [("gap", ["cls"]), ("map", ["cls", "map/*"])])
def test_dropping_the_class_token_loads_all_but_what_is_named(tmp_path, pool, allow):
    source = build(seed=0, pool="tok")
    save_weights(source, str(tmp_path / "tok.npz"))
    model = build(pool=pool)
    with pytest.raises(UserError, match="not in the model: cls"):
        load(model, tmp_path / "tok.npz")
    report = load(model, tmp_path / "tok.npz", allow=allow)
    assert report.unused == ("cls",)
    assert all(path.startswith("map/") for path in report.new)
    expected = {k: v for k, v in values(source).items() if k != "cls"}
    assert same({k: v for k, v in values(model).items() if not k.startswith("map/")}, expected)


def test_class_token_becomes_a_register_where_no_pooling_reads_it(tmp_path):
    source = build(seed=0, pool="tok")
    save_weights(source, str(tmp_path / "tok.npz"))
    model = build(pool="gap", registers=1)
    report = load(model, tmp_path / "tok.npz")
    assert "became the first register" in report.notes[0]
    tokens = source.encode(images())
    np.testing.assert_allclose(model.pooled(model.encode(images())), tf.reduce_mean(tokens[:, 1:], 1), atol=1e-6)


def test_prefix_rows_are_untouched_by_a_resize(tmp_path):
    source = build(seed=0, pool="tok", registers=3, image_size=56)
    save_weights(source, str(tmp_path / "x.safetensors"), format="timm")
    model = build(pool="tok", registers=3, image_size=96)
    report = load(model, tmp_path / "x.safetensors")
    assert report.resized == {"posemb": "14x14 to 24x24, bicubic_antialias"}
    for path in ("cls", "registers"):
        assert np.array_equal(values(model)[path], values(source)[path])


def test_resize_to_a_grid_that_is_not_square_and_back_needs_the_grid(tmp_path, saved):
    _, path = saved
    wide = build(pool="map", image_size=(8, 24))
    assert load(wide, path).resized == {"posemb": "4x4 to 2x6, bilinear"}
    save_weights(wide, str(tmp_path / "wide.npz"))  # our own files say the grid
    assert load(build(pool="map"), tmp_path / "wide.npz").resized == {"posemb": "2x6 to 4x4, bilinear"}
    np.savez(tmp_path / "plain.npz", **dict(np.load(tmp_path / "wide.npz")))
    with pytest.raises(UserError, match="source_grid"):
        load(build(pool="map"), tmp_path / "plain.npz")
    with pytest.raises(UserError, match="source_grid"):
        load(build(pool="map"), tmp_path / "plain.npz", source_grid=(3, 5))
    report = load(build(pool="map"), tmp_path / "plain.npz", source_grid=(2, 6))
    assert report.resized == {"posemb": "2x6 to 4x4, bilinear"}


def test_patch_embedding_is_resized_and_reported(saved):
    source, path = saved
    model = build(pool="map", patch_size=8, image_size=32)
    assert load(model, path).resized == {"embedding/kernel": "patch 4 to 8, pseudo-inverse"}
    enlarged = tf.image.resize(images(), (32, 32), "bilinear")  # tokens barely change: only patch borders differ
    flat = tf.image.resize(tf.ones([1, 4, 4, 3]) * tf.constant([0.1, -0.4, 0.8]), (32, 32))
    stem = model.embedding(flat).numpy()
    expected = source.embedding(tf.ones([1, 16, 16, 3]) * tf.constant([0.1, -0.4, 0.8])).numpy()
    np.testing.assert_allclose(stem, expected, atol=1e-5)
    assert model(enlarged).shape == (2, 5)


def test_stated_settings_are_compared_with_the_model(tmp_path):
    save_weights(build(pool="gap", gelu="erf", epsilon=1e-5), str(tmp_path / "x.safetensors"), format="keras")
    with pytest.raises(UserError, match="gelu='erf', the model 'tanh'.*epsilon=1e-05, the model 1e-06"):
        load(build(pool="gap"), tmp_path / "x.safetensors")
    load(build(pool="gap"), tmp_path / "x.safetensors", allow=["gelu", "epsilon"])
    load(build(pool="gap", gelu="erf", epsilon=1e-5), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="num_heads=2, the model 4"):
        load(build(pool="gap", num_heads=4, gelu="erf", epsilon=1e-5), tmp_path / "x.safetensors")


def test_head_dims_of_an_npz_are_compared(saved, tmp_path):
    _, path = saved
    np.savez(tmp_path / "plain.npz", **dict(np.load(path)))
    with pytest.raises(UserError, match=r"num_heads=2, the model 4|num_heads 2, not 4"):
        load(build(pool="map", num_heads=4), tmp_path / "plain.npz")


def test_layer_scale_of_ones_is_the_same_function(tmp_path):
    plain = build(seed=0, pool="gap")
    save_weights(plain, str(tmp_path / "plain.safetensors"), format="keras")
    scaled = build(pool="gap", layer_scale=1e-5)
    with pytest.raises(UserError, match="missing in the file: blocks/0/scale1"):
        load(scaled, tmp_path / "plain.safetensors")
    report = load(scaled, tmp_path / "plain.safetensors", allow=["blocks/*/scale?"])
    assert set(report.new.values()) == {"1: the file has no layer scale"}
    np.testing.assert_allclose(scaled(images()), plain(images()), atol=1e-6)
    save_weights(scaled, str(tmp_path / "scaled.safetensors"), format="keras")
    report = load(build(pool="gap"), tmp_path / "scaled.safetensors")
    assert "4 layer scales of 1" in report.notes[0]


def test_layer_scale_that_matters_is_not_dropped(tmp_path):
    save_weights(build(seed=0, pool="gap", layer_scale=0.1), str(tmp_path / "x.safetensors"), format="keras")
    with pytest.raises(UserError, match="not in the model: blocks/0/scale1"):
        load(build(pool="gap"), tmp_path / "x.safetensors")


def test_source_is_recognised_or_named(saved, tmp_path):
    _, path = saved
    with pytest.raises(UserError, match="is of timm.*its names start with"):
        load(build(pool="map"), path, source="timm")
    with pytest.raises(UserError, match='did you mean "big_vision"'):
        load(build(pool="map"), path, source="bigvision")
    np.savez(tmp_path / "foreign.npz", conv1=np.ones(3), fc=np.ones(3))
    with pytest.raises(UserError, match="no known family.*conv1, fc"):
        load(build(pool="map"), tmp_path / "foreign.npz")
    with pytest.raises(UserError, match="list of globs"):
        load(build(pool="map"), path, allow="head/*")


def test_describe_builds_the_model_of_a_file(saved):
    source, path = saved
    model = build(**describe(str(path)))
    load(model, path)
    assert np.array_equal(model(images()).numpy(), source(images()).numpy())


@pytest.mark.parametrize("scan", [False, True])
def test_weights_reach_every_replica(saved, scan, mirrored):
    source, path = saved
    with mirrored.scope():
        model = build(pool="map", scan=scan)
    load(model, path)
    variable = next(p.variable for p in model.parameters() if p.path.endswith("mlp/dense1/kernel"))
    expected = values(source)["blocks/0/mlp/dense1/kernel"]
    for copy in variable.values:
        assert np.array_equal(copy.numpy()[0] if scan else copy.numpy(), expected)
    assert len(variable.values) == 2


def test_loading_does_not_depend_on_the_policy(saved):
    import vit_tpu

    source, path = saved
    with vit_tpu.precision("mixed_bfloat16"):
        model = build(pool="map")
    load(model, path)
    assert same(values(model), values(source))
