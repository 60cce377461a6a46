"""Every optimizer under every policy, on one and two replicas, with micro-batches, with and without XLA.

Each (optimizer, policy) has a base run: one replica, one micro-batch, no XLA. Every other run of it must give the same
weights, optimizer state, averages, loss and gradient norm. Nothing is clipped, so a gradient that is n times too large
shows in the norm and in the state also where the optimizer's update would hide it.

The quick part gives every pair of settings at least once (a test below counts them): each base run is compared with one
that changes everything but XLA, and one that changes micro-batches and XLA. The slow part runs the rest of the product,
and the same on a whole ViT.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tiny

from vit_tpu import optim, precision
from vit_tpu.layers import base
from vit_tpu.layers.mlp import Mlp
from vit_tpu.layers.norm import LayerNorm
from vit_tpu.models.step import StepModel
from vit_tpu.models.vit import ViT
from vit_tpu.optim.decay import Parameter
from vit_tpu.optim.loss_scale import LossScale

OPTIMIZERS = {
    "LAMB": lambda: optim.LAMB(0.01, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(0.01, weight_decay=0.1, min_dim_size_to_factor=5),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1, head_weight_decay=0.5, epsilon=1e-4),
    "SGD": lambda: optim.SGD(0.05, weight_decay=0.1, momentum=0.9),
}
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
BASE = (1, 1, False)  # replicas, micro-batches, XLA
FIGURES = ("loss", "step_loss", "grad_norm")
OTHERS = [s for s in itertools.product((1, 2), (1, 4), (False, True)) if s != BASE]
QUICK = [(2, 4, False), (1, 4, True)]
EXTRA = {("SGD", "mixed_bfloat16"): [(2, 1, True)]}  # the only pair the two above leave out: 2 replicas with XLA

# Largest difference to the base run: of an update, a slot or an average as a share of its length, of the norm and the
# loss as a share. Measured over the whole product: float32 2.6e-6 (the order of sums), mixed_bfloat16 1.2e-2 (XLA keeps
# intermediates that the base run rounds; the batch's sum is rounded once, not once a micro-batch), mixed_float16 3.9e-3
# (single bits of Adafactor's bfloat16 momentum; 1e-3 without). A gradient twice too large differs by 1 (see its test).
TOLERANCE = {"float32": 1e-5, "mixed_bfloat16": 3e-2, "mixed_float16": 1e-2}
# On the ViT: float32 7.6e-6, mixed_float16 3.1e-3, mixed_bfloat16 4.7e-2, and 1.6e-1 with Adafactor, whose first update
# is g / |g|: query gradients that are rounding move their weights as far as any. The norm keeps the limits above.
VIT_TOLERANCE = {"float32": 2e-5, "mixed_bfloat16": 3e-1, "mixed_float16": 1e-2}


class Small(StepModel):
    """x + MLP(LN(x)) between a stem and a head, from the layers of the ViT, with their islands."""

    def __init__(self, classes=5, width=8):
        super().__init__(name="small")
        self.classes, self.width = classes, width
        self.norm, self.mlp = LayerNorm(width, name="norm"), Mlp(width, 16, name="mlp")
        for prefix, layer in (("norm", self.norm), ("mlp", self.mlp)):
            layer.create_weights(prefix)
        self.stem = self.add_weight(name="stem", shape=(6, width), dtype="float32")
        self.head = self.add_weight(name="head", shape=(width, classes), dtype="float32")
        self.built = True
        rng = np.random.default_rng(3)
        for parameter in self.parameters():
            parameter.variable.assign(rng.normal(0, 0.5, parameter.variable.shape))

    def parameters(self):
        found = [Parameter("stem/kernel", self.stem, depth=0)]
        for prefix, layer in (("norm", self.norm), ("mlp", self.mlp)):
            kinds = {path: spec.kind for path, spec in layer.specs().items()}
            found += [Parameter(f"{prefix}/{path}", v, kinds[path]) for path, v in layer.params.items()]
        return [*found, Parameter("head/kernel", self.head, part="head", depth=2)]

    def call(self, images, training=False, seed=None):
        x = base.dense(images, self.stem, tf.zeros([self.width]), tf.as_dtype(self.compute_dtype))
        x = x + self.mlp.forward(self.mlp.params, self.norm.forward(self.norm.params, x))
        return base.dense(x, self.head, tf.zeros([self.classes]), tf.float32)

    def compute_output_shape(self, input_shape):
        return tf.TensorShape([input_shape[0], self.classes])


def small_vit():
    model = ViT(
        "Ti/4", width=8, depth=1, mlp_dim=16, num_heads=2, image_size=8, num_classes=5, channels=1, pool="gap"
    )  # fmt: skip
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        parameter.variable.assign(rng.normal(0, 0.5, parameter.variable.shape))
    return model


@pytest.fixture(scope="module")
def strategy(mirrored):
    return mirrored


@pytest.fixture(scope="module")
def base_run():
    return functools.cache(lambda build, name, policy: run(build, name, policy, BASE, None))


def run(build, name, policy, settings, strategy, steps=3):
    """Returns what some steps leave: path -> value of updates, slots and averages, and the logged figures."""
    replicas, micro, jit = settings
    images, labels = tiny.examples(16 * steps)
    if build is small_vit:
        images = np.random.default_rng(1).uniform(-1, 1, (16 * steps, 8, 8, 1)).astype(np.float32)
    place = strategy if replicas == 2 else tf.distribute.get_strategy()
    with place.scope(), precision.scope(policy):
        model = build()
        model.compile(OPTIMIZERS[name](), accumulation_steps=micro, jit_compile=jit, ema=0.9)
    start = tiny.values(model)
    history = model.fit(tiny.batches(images, labels, batch=16), verbose=0).history
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    found = {f"update/{path}": value - start[path] for path, value in tiny.values(model).items()}
    for parameter, average in zip(model.trained, model.averages.averages):
        found[f"average/{parameter.path}"] = average.numpy() - start[parameter.path]
    for slot in inner.variables:
        if slot.dtype.is_floating and "learning_rate" not in slot.name:
            found[f"slot/{slot.name}"] = tf.cast(slot, tf.float32).numpy()
    assert int(model.optimizer.iterations.numpy()) == model.counters.values()["steps"] == steps
    assert model.counters.values()["skipped"] == 0
    assert isinstance(model.optimizer, LossScale) == (policy == "mixed_float16")
    assert {v.dtype for v in model.weights} <= {tf.float32, tf.int64}
    # The softmax does not depend on the keys' bias: its gradient is rounding alone.
    found = {path: value for path, value in found.items() if "key/bias" not in path}
    figures = {key: np.float64(history[key]) for key in FIGURES}
    return {**found, **figures}


def differences(one, two):
    """Returns path -> length of the difference over the length of the second."""
    assert one.keys() == two.keys()
    return {path: float(np.linalg.norm(one[path] - two[path]) / max(np.linalg.norm(two[path]), 1e-12)) for path in one}


def check(base_run, build, name, policy, settings, strategy):
    expected, got = base_run(build, name, policy), run(build, name, policy, settings, strategy)
    for path, value in got.items():
        assert np.isfinite(value).all(), path
        if path.startswith("update/"):
            assert np.abs(value).max() > 0, path
            if policy == "float32":
                np.testing.assert_allclose(value, expected[path], rtol=0, atol=1e-6, err_msg=path)
    found = differences(got, expected)
    worst = max(found, key=found.get)
    print(f"{build.__name__} {name} {policy} {settings}: {found[worst]:.2e} in {worst}")
    limit = (VIT_TOLERANCE if build is small_vit else TOLERANCE)[policy]
    assert found[worst] < limit, (worst, found[worst])
    assert max(found[key] for key in FIGURES) < TOLERANCE[policy], found


def cells(settings_of):
    for name, policy in itertools.product(OPTIMIZERS, POLICIES):
        for settings in settings_of(name, policy):
            yield pytest.param(name, policy, settings, id=f"{name}-{policy}-{'-'.join(map(str, settings))}")


def quick(name, policy):
    return QUICK + EXTRA.get((name, policy), [])


def test_the_quick_part_holds_every_pair_of_settings():
    found = [(n, p, *s) for n, p in itertools.product(OPTIMIZERS, POLICIES) for s in [BASE, *quick(n, p)]]
    axes = [tuple(OPTIMIZERS), POLICIES, (1, 2), (1, 4), (False, True)]
    for one, two in itertools.combinations(range(5), 2):
        pairs = {(row[one], row[two]) for row in found}
        assert pairs == set(itertools.product(axes[one], axes[two])), (one, two)


@pytest.mark.parametrize("name, policy, settings", cells(quick))
def test_runs_agree(base_run, strategy, name, policy, settings):
    check(base_run, Small, name, policy, settings, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("name, policy, settings", cells(lambda n, p: [s for s in OTHERS if s not in quick(n, p)]))
def test_the_rest_of_the_product_agrees(base_run, strategy, name, policy, settings):
    check(base_run, Small, name, policy, settings, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("name, policy, settings", cells(quick))
def test_a_whole_vit_agrees(base_run, strategy, name, policy, settings):
    check(base_run, small_vit, name, policy, settings, strategy)


class Doubled(Small):
    """The mistake of a sum where a mean belongs: the gradient, but not the loss, is twice too large."""

    def _gradients(self, images, labels, weights, scale, seed):
        gradients, *others = super()._gradients(images, labels, weights, scale, seed)
        return [2.0 * gradient for gradient in gradients], *others


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_gradient_twice_too_large_would_be_seen_with_every_optimizer(base_run, name):
    expected, wrong = base_run(Small, name, "mixed_bfloat16"), run(Doubled, name, "mixed_bfloat16", BASE, None)
    found = differences(wrong, expected)
    assert found["grad_norm"] > 10 * TOLERANCE["mixed_bfloat16"]
    # The optimizer's own state, or with SGD the update, so that the norm being wrong as well is not needed.
    state = max(error for path, error in found.items() if path.startswith(("slot/", "update/")))
    assert state > 10 * TOLERANCE["mixed_bfloat16"]


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_half_precision_stays_near_float32(base_run, policy):
    for name in OPTIMIZERS:
        found = differences(base_run(Small, name, policy), base_run(Small, name, "float32"))
        assert 0 < found["grad_norm"] < 2e-2 and found["loss"] < 1e-2, (name, found)
