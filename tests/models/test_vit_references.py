"""The model against big_vision's ViT: intermediates, logits, losses, gradients; then scan and remat against it."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from vit_tpu import losses

WITH_GRADIENTS = ("vit_map", "vit_gap")
UNROLLED = [case for case in reference.SETTINGS if case != "vit_map_scan"]


class Case:
    """A reference file, the model with its weights, and the compiled functions the tests share."""

    def __init__(self, name, file):
        self.file = {key: file[key] for key in file.files}
        self.weights = reference.tensors(file)
        self.model = reference.build(**reference.SETTINGS[name])
        reference.assign(self.model, self.weights)
        self.images, self.labels = self.file["in/image"], self.file["in/labels"]
        self.logits = {jit: logits_and_gradients(self.model, jit) for jit in (False, True)}


def logits_and_gradients(model, jit):
    """Returns a compiled function of (images, labels, seed): logits and path -> gradient of the sigmoid loss."""
    parameters = model.parameters()
    loss = losses.SigmoidCrossEntropy()

    @tf.function(jit_compile=jit)
    def run(images, labels, seed):
        with tf.GradientTape() as tape:
            logits = model(images, training=True, seed=seed)
            value = loss(labels, logits)
        gradients = tape.gradient(value, [p.variable for p in parameters])
        return logits, dict(zip([p.path for p in parameters], gradients))

    return lambda images, labels, seed=(1, 2): run(images, labels, tf.constant(seed))


@pytest.fixture(scope="module")
def cases(refs):
    found = {}

    def get(name):
        if name not in found:
            found[name] = Case(name, refs(f"{name}.npz"))
        return found[name]

    return get


def assert_gradients_close(got, expected, tolerance):
    """Compares by each tensor's greatest value; a key bias has gradient zero but for rounding."""
    assert got.keys() == expected.keys()
    largest = max(float(np.abs(value).max()) for value in expected.values())
    for path, value in expected.items():
        scale = largest if path.endswith("key/bias") else float(np.abs(value).max())
        assert scale > 0, path
        error = float(np.abs(np.asarray(got[path]) - value).max())
        assert error <= tolerance * scale, f"{path}: {error / scale:.2e} of its maximum"


@pytest.mark.parametrize("name", UNROLLED)
def test_every_intermediate_equals_the_reference(cases, name):
    case, record = cases(name), {}
    tokens = case.model.encode(case.images, record=record)
    record["head_input"] = case.model.pooled(tokens)
    if case.model.pre_logits is not None:
        pre_logits = case.model.pre_logits
        record["pre_logits"] = pre_logits.forward(pre_logits.params, record["head_input"])
    wanted = {key[4:] for key in case.file if key.startswith("out/")}
    unseen = {"logits", "pre_logits_2d", "logits_2d"} | (set() if case.model.pre_logits else {"pre_logits"})
    assert record.keys() == wanted - unseen
    for key, value in record.items():
        expected = case.file[f"out/{key}"]
        np.testing.assert_allclose(np.reshape(value, expected.shape), expected, rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "jit"])
@pytest.mark.parametrize("name", list(reference.SETTINGS))
def test_logits_equal_the_reference(cases, name, jit):
    case = cases(name)
    logits = case.logits[jit](case.images, case.labels)[0]
    np.testing.assert_allclose(logits, case.file["out/logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", list(reference.SETTINGS))
def test_eager_logits_equal_the_reference(cases, name):
    case = cases(name)
    np.testing.assert_allclose(case.model(case.images), case.file["out/logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", list(reference.SETTINGS))
def test_both_losses_equal_the_reference(cases, name):
    case = cases(name)
    logits = case.model(case.images)
    for key, loss in (
        ("sigmoid", losses.SigmoidCrossEntropy()),
        ("softmax", losses.SoftmaxCrossEntropy()),
    ):
        each = case.file[f"loss/{key}_xent_per_example"]
        np.testing.assert_allclose(loss.call(case.labels, logits), each, rtol=2e-6, atol=0)
        np.testing.assert_allclose(loss(case.labels, logits), case.file[f"loss/{key}_xent"], rtol=2e-6)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "jit"])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_equal_the_reference(cases, refs, name, jit):
    case = cases(name)
    expected = reference.tensors(refs(f"{name}.npz"), "grad/")
    got = case.logits[jit](case.images, case.labels)[1]
    assert_gradients_close(got, expected, 1e-4)


# Scan and remat.


def test_scan_equals_unrolled_in_logits_and_gradients(cases):
    case = cases("vit_map")
    scanned = reference.build(pool="map", scan=True)
    reference.assign(scanned, reference.stack(case.weights))
    logits, gradients = case.logits[True](case.images, case.labels)
    for jit in (False, True):
        scan_logits, scan_gradients = logits_and_gradients(scanned, jit)(case.images, case.labels)
        np.testing.assert_allclose(scan_logits, logits, rtol=0, atol=2e-6)
        unstacked = reference.unstack({path: g.numpy() for path, g in scan_gradients.items()})
        expected = {path: g.numpy() for path, g in gradients.items()}
        assert_gradients_close(unstacked, expected, 5e-6)


def test_weights_of_scan_and_unrolled_models_convert_both_ways(cases):
    case, scan_case = cases("vit_map"), cases("vit_map_scan")
    unrolled = reference.build(pool="map")
    reference.assign(unrolled, reference.unstack(reference.weights(scan_case.model)))
    np.testing.assert_allclose(unrolled(case.images), scan_case.file["out/logits"], rtol=0, atol=2e-5)
    again = reference.stack(reference.weights(unrolled))
    for path, value in reference.weights(scan_case.model).items():
        np.testing.assert_array_equal(again[path], value)


@pytest.fixture(scope="module")
def random_runs():
    """Logits and gradients of the same weights with dropout and stochastic depth: plain, remat, scan."""
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (4, 32, 32, 3)).astype(np.float32)
    labels = rng.integers(0, 2, (4, 10)).astype(np.float32)
    size = {"image_size": 32, "depth": 2, "dropout": 0.1, "drop_path": 0.3, "pool": "gap"}
    plain = reference.build(**size)
    values = reference.weights(plain)
    # The head starts at zero, and with it every gradient below.
    values = {p: rng.normal(0, 0.1, v.shape).astype(np.float32) + v for p, v in values.items()}
    runs = {}
    for name, extra in (("plain", {}), ("remat", {"remat": "block"}), ("scan", {"scan": True})):
        model = reference.build(**size, **extra)
        reference.assign(model, reference.stack(values) if name == "scan" else values)
        for jit in (True,) if name == "scan" else (False, True):
            run = logits_and_gradients(model, jit)
            logits, gradients = run(images, labels)
            gradients = {path: g.numpy() for path, g in gradients.items()}
            gradients = reference.unstack(gradients) if name == "scan" else gradients
            other = run(images, labels, (1, 3))[0]
            runs[name, jit] = logits.numpy(), gradients, other.numpy()
    return runs


@pytest.mark.parametrize("name, jit", [("remat", False), ("remat", True), ("scan", True)])
def test_with_dropout_and_a_seed_remat_and_scan_repeat_the_plain_model(random_runs, name, jit):
    logits, gradients, _ = random_runs["plain", jit]
    other_logits, other_gradients, _ = random_runs[name, jit]
    np.testing.assert_allclose(other_logits, logits, rtol=0, atol=2e-6)
    assert_gradients_close(other_gradients, gradients, 3e-6)


def test_another_seed_drops_other_units(random_runs):
    logits, _, other = random_runs["plain", False]
    assert np.abs(logits - other).max() > 1e-2


def test_the_same_seed_drops_the_same_units_with_and_without_jit(random_runs):
    np.testing.assert_allclose(random_runs["plain", True][0], random_runs["plain", False][0], rtol=0, atol=2e-6)
