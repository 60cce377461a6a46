"""Building, options, shapes and errors of the model."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from vit_tpu import precision
from vit_tpu.errors import UserError
from vit_tpu.models.vit import ViT

TINY = {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "image_size": 8, "num_classes": 5}


def vit(**settings):
    return ViT("Ti/4", **{**TINY, **settings})


def images(count=2, height=8, width=8, channels=3):
    return np.random.default_rng(0).uniform(-1, 1, (count, height, width, channels)).astype(np.float32)


def randomise(model):
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.variable.assign_add(rng.normal(0, 0.2, p.variable.shape))
    return model


# What comes out.


@pytest.mark.parametrize(
    "settings, tokens, shape",
    [
        ({"pool": "tok"}, 5, (2, 5)),
        ({"pool": "gap"}, 4, (2, 5)),
        ({"pool": "map"}, 4, (2, 5)),
        ({"pool": "none"}, 4, (2, 4, 5)),
        ({"pool": "tok", "registers": 3}, 8, (2, 5)),
        ({"pool": "gap", "registers": 3}, 7, (2, 5)),
        ({"pool": "none", "registers": 3}, 7, (2, 4, 5)),
        ({"pool": "gap", "num_classes": 0}, 4, (2, 16)),
        ({"pool": "gap", "num_classes": 0, "representation_size": 6}, 4, (2, 6)),
        ({"pool": "map", "scan": True, "registers": 1}, 5, (2, 5)),
    ],
)
def test_shapes_of_tokens_and_logits(settings, tokens, shape):
    model = vit(**settings)
    assert model.encode(images()).shape == (2, tokens, 16)
    logits = model(images())
    assert logits.shape == shape
    assert logits.dtype == tf.float32
    assert model.compute_output_shape((2, 8, 8, 3)).as_list() == list(shape)


@pytest.mark.parametrize("posemb", ["learn", "sincos2d"])
def test_images_need_not_be_square(posemb):
    model = vit(image_size=(8, 16), posemb=posemb, channels=1)
    assert model(images(2, 8, 16, 1)).shape == (2, 5)
    with pytest.raises(UserError, match=r"build the model with image_size=\(16, 8\)"):
        model(images(2, 16, 8, 1))


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_pooling_reads_no_register(pool):
    model = randomise(vit(pool=pool, registers=2))
    tokens = model.encode(images())
    changed = tf.concat([tokens[:, :2] + 5.0, tokens[:, 2:]], 1)
    np.testing.assert_array_equal(model.pooled(tokens), model.pooled(changed))
    # They do take part in the attention.
    before = model(images()).numpy()
    model.positions.params["registers"].assign_add(tf.random.normal([1, 2, 16]))
    assert np.abs(model(images()).numpy() - before).max() > 1e-3


def test_class_token_comes_first_and_is_what_tok_reads():
    model = randomise(vit(pool="tok", registers=2))
    tokens = model.encode(images())
    np.testing.assert_array_equal(model.pooled(tokens), tokens[:, 0])


def test_half_precision_images_are_read():
    model = randomise(vit(pool="gap"))
    for dtype, tolerance in ((tf.float64, 1e-6), (tf.bfloat16, 0.2), (tf.float16, 0.05)):
        logits = model(tf.cast(images(), dtype))
        assert logits.dtype == tf.float32
        np.testing.assert_allclose(logits, model(images()), atol=tolerance)


# How it starts.


def test_a_new_model_predicts_its_head_bias():
    model = vit(head_bias_init=-6.9, representation_size=8)
    np.testing.assert_array_equal(model(images()), np.full((2, 5), -6.9, np.float32))


def test_initial_weights_follow_the_reference():
    keras.utils.set_random_seed(5)
    model = ViT("Ti/16", width=96, depth=2, mlp_dim=384, num_heads=4, image_size=160, num_classes=20, pool="map")
    values = {p.path: p.variable.numpy() for p in model.parameters()}
    kinds = {p.path: p.kind for p in model.parameters()}
    xavier = (6 / (96 + 96)) ** 0.5
    wide = (6 / (96 + 384)) ** 0.5
    for path, value in values.items():
        end = path.split("/", 2)[-1] if path.startswith("blocks") else path
        if kinds[path] == "norm":
            assert (value == (1.0 if path.endswith("scale") else 0.0)).all(), path
        elif "attention" in path and path.endswith("kernel"):
            assert 0.97 * xavier < np.abs(value).max() <= xavier, path
            assert value.std() == pytest.approx(xavier / 3**0.5, rel=0.05), path
        elif "mlp" in path and path.endswith("kernel"):
            assert 0.97 * wide < np.abs(value).max() <= wide, path
        elif "mlp" in path and path.endswith("bias"):
            assert 0 < np.abs(value).max() < 6e-6, path
            assert value.std() == pytest.approx(1e-6, rel=0.3), path
        elif end in ("embedding/kernel",):
            assert value.std() == pytest.approx((16 * 16 * 3) ** -0.5, rel=0.05)
        elif end == "posemb":
            assert value.std() == pytest.approx(96**-0.5, rel=0.05)
        elif end == "map/probe":
            assert np.abs(value).max() <= (6 / 97) ** 0.5
            assert value.std() > 0.05
        else:
            assert (value == 0).all(), path


def test_no_two_weights_start_equal_also_when_stacked():
    for scan in (False, True):
        model = vit(scan=scan, depth=3)
        kernels = {p.path: p.variable.numpy() for p in model.parameters() if p.path.endswith("mlp/dense1/kernel")}
        values = [v for p, v in kernels.items() if p.startswith("blocks")]
        slices = list(values[0]) if scan else values
        assert len(slices) == 3
        for i in range(3):
            assert np.abs(slices[i] - slices[i - 1]).max() > 0.1
            # The limit of one layer, not of a stack of three.
            assert 0.8 * (6 / 48) ** 0.5 < np.abs(slices[i]).max() <= (6 / 48) ** 0.5


def test_the_same_seed_builds_the_same_model():
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        models.append(vit())
    for a, b in zip(*(m.parameters() for m in models)):
        np.testing.assert_array_equal(a.variable.numpy(), b.variable.numpy(), err_msg=a.path)


def test_layer_scale_scales_each_branch():
    model = vit(layer_scale=0.25, pool="gap")
    record = {}
    model.encode(images(), record=record)
    added = record["encoder/block00/+sa"] - model.positions(model.embedding(images()))
    np.testing.assert_allclose(added, 0.25 * record["encoder/block00/sa"], atol=1e-6)
    both = record["encoder/block00/+mlp"] - record["encoder/block00/+sa"]
    np.testing.assert_allclose(both, 0.25 * record["encoder/block00/mlp"], atol=1e-6)
    kinds = {p.path: p.kind for p in model.parameters()}
    assert kinds["blocks/1/scale1"] == kinds["blocks/0/scale2"] == "scale"


def test_every_norm_has_the_models_epsilon():
    for settings, wanted in (({}, 1e-6), ({"epsilon": 1e-5}, 1e-5)):
        model = vit(pool="map", **settings)
        norms = [model.norm, model.map.norm, *(n for b in model.blocks for n in (b.norm1, b.norm2))]
        assert [n.epsilon for n in norms] == [wanted] * 6


# Parameters as the optimizers see them.


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_parameters_say_kind_part_and_depth(scan):
    model = vit(pool="map", registers=1, scan=scan, representation_size=4)
    found = {p.path: (p.kind, p.part, p.depth, p.stacked) for p in model.parameters()}
    assert found["embedding/kernel"] == ("kernel", "body", 0, False)
    assert found["posemb"] == ("posemb", "body", 0, False)
    assert found["registers"] == ("token", "body", 0, False)
    assert found["map/probe"] == ("token", "body", 3, False)
    assert found["map/norm/scale"] == ("norm", "body", 3, False)
    assert found["norm/scale"] == ("norm", "body", 3, False)
    assert found["pre_logits/kernel"] == ("kernel", "body", 3, False)
    assert found["head/kernel"] == ("kernel", "head", 3, False)
    assert found["head/bias"] == ("bias", "head", 3, False)
    if scan:
        assert found["blocks/attention/query/kernel"] == ("kernel", "body", 1, True)
        assert not any(path.startswith("blocks/0") for path in found)
    else:
        assert found["blocks/0/attention/query/kernel"] == ("kernel", "body", 1, False)
        assert found["blocks/1/mlp/dense1/bias"] == ("bias", "body", 2, False)
    assert [p.variable is v for p, v in zip(model.parameters(), model.trainable_variables)].count(False) == 0


@pytest.mark.parametrize("policy", precision.POLICIES)
def test_weights_are_float32_under_every_policy(policy):
    with precision.scope(policy):
        model = vit(pool="map")
    assert {v.dtype for v in model.weights} == {tf.float32}
    assert {tf.convert_to_tensor(p.variable).dtype for p in model.parameters()} == {tf.float32}


# Randomness.


def test_dropout_and_stochastic_depth_act_in_training_only():
    for settings in ({"dropout": 0.5}, {"drop_path": 0.5}):
        model = randomise(vit(pool="gap", **settings))
        still = model(images()).numpy()
        np.testing.assert_array_equal(still, model(images()))
        runs = [model(images(), training=True, seed=tf.constant([1, 1])).numpy() for _ in range(2)]
        np.testing.assert_array_equal(*runs)
        assert np.abs(runs[0] - still).max() > 1e-3
        unseeded = [model(images(8), training=True).numpy() for _ in range(2)]
        assert np.abs(unseeded[0] - unseeded[1]).max() > 0


def test_stochastic_depth_rises_linearly_from_none():
    assert vit(depth=5, drop_path=0.4).rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert vit(depth=1, drop_path=0.4).rates == [0.0]


# Keras.


def test_config_builds_the_same_model():
    model = vit(
        pool="tok", registers=2, layer_scale=0.1, dropout=0.1, posemb="sincos2d", image_size=(8, 4), name="mine"
    )
    again = ViT.from_config(model.get_config())
    assert again.get_config() == model.get_config()
    assert [(p.path, p.variable.shape) for p in again.parameters()] == [
        (p.path, p.variable.shape) for p in model.parameters()
    ]
    assert again.name == "mine"


def test_config_holds_plain_values():
    import json

    assert ViT.from_config(json.loads(json.dumps(vit().get_config()))).count_params() == vit().count_params()


def test_summary_is_readable():
    lines = []
    model = vit(pool="map")
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    for part in ("embedding", "positions", "block_0", "block_1", "norm", "map", "head"):
        assert part in text
    assert f"{model.count_params():,}".replace(",", "") in text.replace(",", "")
    assert "unused" not in text and "?" not in text


# Wrong input.


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"pool": "mapp"}, 'pool="mapp" .did you mean "map".* is not one of tok, gap, map, none'),
        ({"posemb": "sincos"}, 'posemb="sincos"'),
        ({"remat": "blocks"}, 'remat="blocks" .did you mean "block"'),
        ({"gelu": "exact"}, 'gelu="exact" is not one of tanh, erf'),
        ({"image_size": 10}, "image size 10x10 does not divide by patch size 4: use 8 or 12"),
        ({"image_size": (8, 9)}, "image size 8x9 .*use 8 or 12 for 9"),
        ({"image_size": 0}, "use 4 for 0"),
        ({"num_heads": 3}, "width 16 does not divide by num_heads 3; heads that do: 2, 4"),
        ({"dropout": 1.0}, r"dropout=1.0 is not in \[0, 1\)"),
        ({"drop_path": -0.1}, r"drop_path=-0.1 is not in \[0, 1\)"),
        ({"num_classes": -1}, "num_classes=-1 is negative"),
        ({"depht": 3}, "no argument 'depht' .did you mean \"depth\""),
        ({"poool": "map"}, 'did you mean "pool"'),
        ({"depth": 0}, "depth=0 is not a positive whole number"),
        ({"width": 16.0}, "width=16.0 is not a positive whole number"),
        ({"posemb": "sincos2d", "width": 18}, "width that divides by 4, not 18"),
    ],
)
def test_wrong_arguments_are_one_sentence(settings, words):
    with pytest.raises(UserError, match=words) as caught:
        vit(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_wrong_images_are_one_sentence(traced):
    model = vit()
    call = tf.function(lambda x: model(x), autograph=False) if traced else model
    with pytest.raises(UserError, match="images are uint8; the model reads floats in .-1, 1.: image / 127.5 - 1"):
        call(np.zeros((2, 8, 8, 3), np.uint8))
    with pytest.raises(UserError, match=r"images of shape .* do not fit a model built for \[B, 8, 8, 3\]") as caught:
        call(images(2, 12, 12))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="channels=1"):
        call(images(2, 8, 8, 1))
    with pytest.raises(UserError, match="do not fit"):
        call(images()[0])
