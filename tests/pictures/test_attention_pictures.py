"""Attention maps against a model whose attention is known, and against products written out by hand."""

import numpy as np
import pytest
import tensorflow as tf

import vit_tpu
from vit_tpu.errors import UserError
from vit_tpu.pictures import attention as explain

SETTINGS = {"width": 8, "depth": 2, "mlp_dim": 16, "num_heads": 2, "image_size": (8, 12), "num_classes": 3}


def model_of(pool, policy="float32", **settings):
    with vit_tpu.precision(policy):
        model = vit_tpu.ViT("Ti/4", pool=pool, **{**SETTINGS, **settings})
    random = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.variable.assign(random.normal(size=parameter.variable.shape).astype(np.float32))
    return model


def images(count=3):
    return np.random.default_rng(1).uniform(-1, 1, (count, 8, 12, 3)).astype(np.float32)


def attention_by_hand(block, x):
    """[B, N, N], averaged over the heads, from the kernels themselves."""
    p = {name: variable.numpy().astype(np.float64) for name, variable in block.params.items()}
    x = np.asarray(x, np.float64)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    normal = normal * p["norm1/scale"] + p["norm1/bias"]
    q, k = (
        np.einsum("bnd,dhk->bhnk", normal, p[f"attention/{n}/kernel"]) + p[f"attention/{n}/bias"][None, :, None]
        for n in ("query", "key")
    )
    logits = np.einsum("bhnk,bhmk->bhnm", q, k) / np.sqrt(q.shape[-1])
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).mean(1)


def rollout_by_hand(model, x):
    record = {}
    model.encode(x, record=record)
    first = attention_by_hand(model.blocks[0], model.positions(record["stem"]))
    second = attention_by_hand(model.blocks[1], record["encoder/block00/+mlp"])
    identity = np.eye(first.shape[-1])
    return (second / 2 + identity / 2) @ (first / 2 + identity / 2)


@pytest.mark.parametrize("pool, registers", [("tok", 0), ("tok", 2), ("gap", 0), ("gap", 1)])
def test_rollout_is_the_product_of_the_blocks_followed_by_the_pooling(pool, registers):
    model = model_of(pool, registers=registers)
    prefix = model.positions.num_prefix
    product = rollout_by_hand(model, images())
    wanted = product[:, 0, prefix:] if pool == "tok" else product[:, prefix:, prefix:].mean(1)
    wanted = wanted / wanted.sum(-1, keepdims=True)
    found = explain.attention_maps(model, images())
    assert found.shape == (3, 2, 3)
    np.testing.assert_allclose(found.reshape(3, 6), wanted, atol=1e-5)


def test_map_head_looks_through_the_rollout():
    model = model_of("map")
    looks = model.map.probabilities(model.map.params, model.encode(images())).numpy().mean(1)
    alone = explain.attention_maps(model, images(), "map")
    np.testing.assert_allclose(alone.reshape(3, 6), looks, atol=1e-5)
    wanted = np.einsum("bn,bnm->bm", looks, rollout_by_hand(model, images()))
    np.testing.assert_allclose(explain.attention_maps(model, images()).reshape(3, 6), wanted, atol=1e-5)


@pytest.mark.parametrize("policy, scan", [("mixed_float16", False), ("float32", True)])
def test_policy_and_stacking_change_nothing(policy, scan):
    model = model_of("map", policy, scan=scan)
    maps = explain.attention_maps(model, images())
    plain = model_of("map")
    if scan:
        for parameter in plain.parameters():
            _, _, rest = parameter.path.partition("blocks/")
            if rest:
                number, _, name = rest.partition("/")
                source = next(p for p in model.parameters() if p.path == f"blocks/{name}")
                parameter.variable.assign(source.variable[int(number)])
            else:
                parameter.variable.assign(next(p.variable for p in model.parameters() if p.path == parameter.path))
    np.testing.assert_allclose(maps, explain.attention_maps(plain, images()), atol=1e-5)


def test_attention_lands_on_the_patch_that_is_looked_at():
    # One head, keys that see only the brightness of a patch: the query of every token wants the bright one.
    model = vit_tpu.ViT("Ti/4", width=4, depth=1, mlp_dim=4, num_heads=1, image_size=8, num_classes=2, pool="gap")
    for parameter in model.parameters():
        parameter.variable.assign(tf.zeros_like(parameter.variable))
    model.embedding.params["kernel"].assign(tf.ones([4, 4, 3, 4]) * tf.constant([1.0, -1, 1, -1]) / 48)
    block = model.blocks[0]
    block.params["norm1/scale"].assign(tf.ones(4))
    block.params["attention/query/bias"].assign([[30.0, 0, 0, 0]])
    block.params["attention/key/kernel"].assign(tf.one_hot([0, 1, 2, 3], 4)[:, None])
    picture = -np.ones((1, 8, 8, 3), np.float32)
    picture[:, :4, 4:] = 1  # the upper right patch
    found = explain.attention_maps(model, picture)[0]
    assert found.argmax() == 1 and found[0, 1] > 0.6


def test_overlay_is_bright_where_the_attention_is():
    image = np.full((20, 30, 3), 128, np.uint8)
    attention = np.zeros((2, 3))
    attention[1, 2] = 1.0
    drawn = explain.overlay(image, attention).astype(int).sum(-1)
    assert drawn[15:, 25:].mean() > 1.5 * drawn[:10, :10].mean()


def test_captions_are_drawn_as_they_are(tmp_path):
    pixels = [np.zeros((8, 12, 3), np.uint8)] * 5
    captions = ["a", "b", "c", "d", "from $_ to $^ 9%"]  # between dollar signs matplotlib would read a formula
    figure = explain.attention_figure(pixels, np.ones((5, 2, 3)) / 6, captions, "$_$")
    figure.savefig(tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "pool, kind, words",
    [("gap", "map", "has no MAP attention"), ("gap", "grad", 'kind is "grad"'), ("none", "rollout", "each token")],
)
def test_what_cannot_be_explained_is_refused(pool, kind, words):
    with pytest.raises(UserError, match=words):
        explain.attention_maps(model_of(pool), images(), kind)
