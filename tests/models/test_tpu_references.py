"""The model as it is traced for a TPU against the stored reference: logits, intermediates, gradients."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from vit_tpu import losses
from vit_tpu.layers import target


@pytest.fixture(autouse=True)
def _for_a_tpu():
    with target.tpu():
        yield


def logits_and_gradients(model, images, labels, jit):
    loss, variables = losses.SigmoidCrossEntropy(), [p.variable for p in model.parameters()]

    @tf.function(jit_compile=jit, autograph=False)
    def run():
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            value = loss(labels, logits)
        return logits, tape.gradient(value, variables)

    logits, gradients = run()
    return logits.numpy(), {p.path: g.numpy() for p, g in zip(model.parameters(), gradients)}


def assert_gradients_close(got, expected, tolerance):
    assert got.keys() == expected.keys()
    largest = max(float(np.abs(value).max()) for value in expected.values())
    for path, value in expected.items():
        scale = largest if "key/bias" in path else float(np.abs(value).max())  # zero but for rounding
        assert float(np.abs(got[path] - value).max()) <= tolerance * scale, path


@pytest.mark.parametrize("name, jit", [("vit_map", False), ("vit_gap", True)])
def test_logits_and_gradients_equal_the_reference(refs, name, jit):
    file = refs(f"{name}.npz")
    model = reference.build(**reference.SETTINGS[name])
    reference.assign(model, reference.tensors(file))
    logits, gradients = logits_and_gradients(model, file["in/image"], file["in/labels"], jit)
    np.testing.assert_allclose(logits, file["out/logits"], rtol=0, atol=2e-5)
    assert_gradients_close(gradients, reference.tensors(file, "grad/"), 1e-4)


@pytest.mark.parametrize("name", ["vit_tok_rep", "vit_gap_sincos_rep"])
def test_intermediates_equal_the_reference(refs, name):
    file, record = refs(f"{name}.npz"), {}
    model = reference.build(**reference.SETTINGS[name])
    reference.assign(model, reference.tensors(file))
    model.encode(file["in/image"], record=record)
    for key, value in record.items():
        expected = file[f"out/{key}"]
        np.testing.assert_allclose(np.reshape(value, expected.shape), expected, rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("settings, jit", [({"scan": True}, True), ({"remat": "block"}, False)])
def test_scan_and_remat_equal_the_reference(refs, settings, jit):
    file = refs("vit_gap.npz")
    values = reference.tensors(file)
    model = reference.build(pool="gap", **settings)
    reference.assign(model, reference.stack(values) if "scan" in settings else values)
    logits, gradients = logits_and_gradients(model, file["in/image"], file["in/labels"], jit)
    np.testing.assert_allclose(logits, file["out/logits"], rtol=0, atol=2e-5)
    assert_gradients_close(reference.unstack(gradients) if "scan" in settings else gradients,
                           reference.tensors(file, "grad/"), 1e-4)  # fmt: skip
