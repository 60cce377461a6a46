"""What runs in which dtype under each policy, read from the traced model; and that a wrong island would be seen."""

import contextlib
import re

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu import losses, metrics, precision
from vit_tpu.layers import attention, base, mlp, norm, target, tpu_attention
from vit_tpu.models.vit import ViT

SETTINGS = {"width": 16, "depth": 2, "mlp_dim": 40, "num_heads": 2, "image_size": 12, "num_classes": 7}
HALF = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


def vit(policy, pool, **settings):
    with precision.scope(policy):
        return ViT("Ti/4", pool=pool, **{**SETTINGS, **settings})


def operations(model, training=False):
    """Yields (part, type, dtype of the result) of every floating operation of the traced model."""
    seed = tf.constant([1, 2]) if training else None

    def run(images):
        return model(images, training=training, seed=seed)

    graph = tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec([2, 12, 12, 3])).graph
    for op in graph.get_operations():
        if op.outputs and op.outputs[0].dtype.is_floating and op.type not in ("Placeholder", "Const"):
            yield op.name, op.type, op.outputs[0].dtype.name


def dtypes(found, pattern, types):
    chosen = [dtype for name, kind, dtype in found if re.search(pattern, name) and kind in types]
    assert chosen, f"nothing matches {pattern} {types}"
    return set(chosen)


WHERE = {"here": contextlib.nullcontext, "tpu": target.tpu}
PRODUCTS = ("MatMul", "BatchMatMulV2", "Einsum")
STATISTICS = ("Mean", "Sum", "Rsqrt", "Square", "SquaredDifference", "Sub", "Mul", "AddV2")


@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("policy", list(HALF))
@pytest.mark.parametrize("pool", ["map", "gap", "tok"])
def test_each_part_runs_in_its_dtype(policy, pool, where):
    half = {HALF[policy]}
    with WHERE[where]():
        found = list(operations(vit(policy, pool, dropout=0.1, drop_path=0.1, layer_scale=0.1), training=True))
    block = r"blocks/\d"
    # The policy's dtype: stem, projections, MLP, residual stream.
    assert dtypes(found, r"^vit/embedding|^embedding|/embedding/", PRODUCTS) == half
    assert dtypes(found, block + r"/mlp/", PRODUCTS) == half
    assert dtypes(found, block + r"/(AddV2|add)(_\d+)?$", ("AddV2",)) == half, "the residual stream"
    products = [
        dtype for name, kind, dtype in found if re.search(block + r"/attention/(?!softmax)", name) if kind in PRODUCTS
    ]
    if where == "here":
        assert set(products) == half
    else:  # qkv and out in the policy's dtype; the product of e and v is divided by the sum before it is rounded, and
        # that of the value's bias and the output kernel is a bias
        assert sorted(products) == sorted(2 * (2 * [HALF[policy]] + 2 * ["float32"]))
    # float32: softmax with its logits, LayerNorm, pooling, head.
    island = {"float32"}
    assert dtypes(found, block + r"/attention/softmax", (*PRODUCTS, "Softmax", "Exp", "Max", "Sub", "Sum")) == island
    assert dtypes(found, r"/norm/", STATISTICS) == island
    assert dtypes(found, r"head/", (*PRODUCTS, "AddV2")) == island
    if pool == "map":
        assert dtypes(found, r"map/", (*PRODUCTS, "Softmax", "AddV2", "Mul", "Tanh")) == island
    if pool == "gap":
        assert dtypes(found, r"Mean(_\d+)?$", ("Mean",)) == island
    assert {dtype for _, kind, dtype in found if kind in ("Softmax", "Exp")} == island
    assert {dtype for _, kind, dtype in found if kind in ("Rsqrt", "Mean", "Tanh")} == island
    assert HALF[policy] in {dtype for _, _, dtype in found}


@pytest.mark.parametrize("policy", list(HALF))
def test_products_outside_the_islands_are_most_of_the_work(policy):
    found = [f for f in operations(vit(policy, "map")) if f[1] == "MatMul"]
    low = [f for f in found if f[2] == HALF[policy]]
    # Stem, and per block: q k v, out, and two of the MLP.
    assert len(low) == (1 + 2 * 4 if policy != "float32" else len(found))


def test_loss_and_metrics_are_float32_for_any_logits():
    for dtype in (tf.float32, tf.bfloat16, tf.float16):
        logits = tf.cast([[10.0, 10.02]], dtype)
        for loss in (losses.SoftmaxCrossEntropy(), losses.SigmoidCrossEntropy()):
            assert loss.call(tf.constant([1]), logits).dtype == tf.float32
            assert loss(tf.constant([1]), logits).dtype == tf.float32
        for metric in (metrics.Accuracy(), metrics.TopK(1)):
            metric.update_state([1], logits)
            assert metric.result().dtype == tf.float32


@pytest.mark.parametrize("policy", list(HALF))
def test_a_float32_head_tells_10_from_10_02(policy):
    with precision.scope(policy):
        model = ViT("Ti/4", **{**SETTINGS, "num_classes": 2, "pool": "gap"})
    model.head.params["bias"].assign([10.0, 10.02])
    logits = model(np.zeros((1, 12, 12, 3), np.float32)).numpy()
    assert logits.argmax() == 1
    assert logits[0, 1] == np.float32(10.02)


# Wrong islands. Each is put in by hand, and the check that guards it must then fail.


def randomised(policy, **settings):
    model = vit(policy, "map", **settings)
    rng = np.random.default_rng(2)
    for p in model.parameters():
        p.variable.assign_add(rng.normal(0, 0.3, p.variable.shape))
    return model


def softmax_error(dtype=tf.bfloat16, where="here"):
    """Returns (|row sum - 1|, output error in ulps of `dtype`) for 197 tokens and logits of deviation 6."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 197, 16)) for _ in range(3))
    q *= 6
    q, k, v = (tf.cast(x, dtype) for x in (q, k, v))
    rows = attention.probabilities(q, k)
    wide = [x.numpy().astype(np.float64) for x in (q, k, v)]
    logits = wide[0] @ wide[1].transpose(0, 1, 3, 2) / 4
    assert 5 < logits.std() < 7
    exact = np.exp(logits - logits.max(-1, keepdims=True))
    exact = exact / exact.sum(-1, keepdims=True) @ wide[2]
    if where == "here":
        out = attention.attend(q, k, v).numpy().astype(np.float64)
    else:
        swapped = [tf.transpose(t, [0, 2, 1, 3]) for t in (q / 4, k, v)]
        out = tpu_attention.attend(tf.stack(swapped, 1))[0].numpy().astype(np.float64).transpose(0, 2, 1, 3)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact).max())) - 7)
    total = tf.reduce_sum(tf.cast(rows, tf.float64), -1)
    return float(np.abs(total - 1).max()), float((np.abs(out - exact) / ulp).max())


@pytest.mark.parametrize("where", list(WHERE))
def test_softmax_of_197_tokens_sums_to_one_and_its_output_is_within_one_ulp(where):
    sums, ulps = softmax_error(where=where)
    assert sums < 1e-6
    assert ulps < 1.0


def test_a_bfloat16_softmax_would_be_seen(monkeypatch):
    def wrong(q, k):
        logits = tf.matmul(q, k, transpose_b=True) * tf.cast(q.shape[-1] ** -0.5, q.dtype)
        return tf.nn.softmax(logits)

    monkeypatch.setattr(attention, "probabilities", wrong)
    sums, ulps = softmax_error()
    assert sums > 1e-3
    assert ulps > 1.0
    found = list(operations(vit("mixed_bfloat16", "gap")))
    assert {dtype for _, kind, dtype in found if kind == "Softmax"} == {"bfloat16"}, "the table sees it too"


def test_bfloat16_logits_on_a_tpu_would_be_seen(monkeypatch):
    monkeypatch.setattr(tpu_attention, "_wide", lambda equation, a, b: tf.einsum(equation, a, b))
    monkeypatch.setattr(tpu_attention, "_rows", lambda inverse: tf.transpose(inverse, [0, 2, 1])[..., None])
    assert softmax_error(where="tpu")[1] > 1.0
    with target.tpu():
        found = list(operations(vit("mixed_bfloat16", "gap")))
    assert {dtype for _, kind, dtype in found if kind == "Exp"} == {"bfloat16"}, "the table sees it too"


def norm_error(policy):
    with precision.scope(policy):
        layer = norm.LayerNorm(64)
    x = np.random.default_rng(1).normal(50, 1, (8, 64)).astype(np.float32)
    got = layer(x).numpy()
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    return float(np.abs(got - exact).max())


@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("policy", list(HALF))
def test_layer_norm_reads_a_float32_producer_unrounded(policy, where):
    with WHERE[where]():
        assert norm_error(policy) < 1e-5


@pytest.mark.parametrize("policy, error", [("mixed_bfloat16", 1e-2), ("mixed_float16", 1e-3)])
def test_a_layer_norm_that_autocasts_would_be_seen(monkeypatch, policy, error):
    def wrong(self, x):
        x = tf.cast(x, HALF[policy])
        return norm.layer_norm(x, self.params["scale"], self.params["bias"], self.epsilon)

    monkeypatch.setattr(norm.LayerNorm, "call", wrong)
    assert norm_error(policy) > error


def head_error(model, images):
    tokens = model.encode(images)
    features = model.pooled(tokens).numpy().astype(np.float64)
    exact = features @ model.head.params["kernel"].numpy() + model.head.params["bias"].numpy()
    return float(np.abs(model._head(tokens).numpy() - exact).max() / np.abs(exact).max())


def test_the_head_is_exact_and_a_bfloat16_head_would_be_seen(monkeypatch):
    model = randomised("mixed_bfloat16")
    images = np.random.default_rng(0).uniform(-1, 1, (4, 12, 12, 3)).astype(np.float32)
    for where in WHERE.values():
        with where():
            assert head_error(model, images) < 1e-6

    def wrong(self, params, x):
        return tf.cast(base.dense(x, params["kernel"], params["bias"], tf.bfloat16), tf.float32)

    monkeypatch.setattr(type(model.head), "forward", wrong)
    assert head_error(model, images) > 1e-3


def test_gelu_in_bfloat16_arithmetic_would_be_seen():
    x = tf.cast(np.linspace(-4, 4, 2001), tf.bfloat16)
    wide = x.numpy().astype(np.float64)
    exact = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    rounded = np.abs(mlp.gelu(x).numpy().astype(np.float64) - exact) / np.maximum(np.abs(exact), 1e-2)
    inner = 0.5 * x * (1 + tf.tanh(tf.cast(np.sqrt(2 / np.pi), x.dtype) * x * (1 + 0.044715 * x * x)))
    wrong = np.abs(inner.numpy().astype(np.float64) - exact) / np.maximum(np.abs(exact), 1e-2)
    assert rounded.max() < 2.0**-8
    assert wrong.max() > 2.0**-7


@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_logits_under_a_policy_stay_near_float32(policy, where):
    images = np.random.default_rng(0).uniform(-1, 1, (4, 12, 12, 3)).astype(np.float32)
    exact, model = randomised("float32"), randomised(policy)
    for p, q in zip(exact.parameters(), model.parameters()):
        q.variable.assign(p.variable)
    scale = float(np.abs(exact(images)).max())
    with WHERE[where]():
        error = float(np.abs(model(images) - exact(images)).max()) / scale
    assert 0 < error < (3e-2 if policy == "mixed_bfloat16" else 5e-3)
