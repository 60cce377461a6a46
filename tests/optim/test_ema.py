"""Averages of weights: values, masks, swaps, replicas, checkpoints."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from optim_helpers import same_bits

from vit_tpu.errors import UserError
from vit_tpu.optim import SGD, Ema


def built(values, **options):
    variables = [tf.Variable(value) for value in values]
    ema = Ema(**options)
    ema.build(variables)
    return ema, variables


@pytest.mark.parametrize("options", [{}, {"warmup": False}, {"decay": None}, {"decay": 0.0}])
def test_a_constant_weight_is_its_own_average_at_every_step(options):
    ema, _ = built([[4.0, -0.1]], **options)
    for _ in range(20):
        ema.update()
        np.testing.assert_array_equal(ema.averages[0].numpy(), np.float32([4.0, -0.1]))


def test_high_decay_moves_in_float32():
    # 1 -> 2 for 2000 steps at 0.9999: 2 - 0.9999 ** 2000 = 1.1813; in bfloat16 it would stay 1.
    ema, (weight,) = built([1.0], decay=0.9999, warmup=False)
    weight.assign(2.0)
    update = tf.function(ema.update)
    for _ in range(2000):
        update()
    assert float(ema.averages[0]) == pytest.approx(1.1813, abs=1e-4)
    assert float(ema.averages[0]) == pytest.approx(2 - 0.9999**2000, abs=1e-5)
    assert ema.averages[0].dtype == tf.float32 and ema.updates.dtype == tf.int64


def test_warm_up_follows_one_plus_t_over_ten_plus_t():
    ema, (weight,) = built([0.0], decay=0.5)
    want = 0.0
    for t in range(15):
        weight.assign(float(t * t))
        ema.update()
        decay = min(0.5, (1 + t) / (10 + t))
        want = decay * want + (1 - decay) * t * t
        assert float(ema.averages[0]) == pytest.approx(want, rel=1e-6)


def test_polyak_is_the_mean_of_the_weights_from_its_start_on():
    ema, (weight,) = built([7.0], decay=None, start_step=2)
    seen = []
    for t in range(6):
        weight.assign(float(t * t))
        ema.update()
        seen.append(t * t)
        want = np.mean(seen[2:]) if t >= 2 else seen[-1]
        assert float(ema.averages[0]) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_skipped_updates_change_nothing_and_do_not_count(jit):
    ema, (weight,) = built([[1.0, 2.0]])
    update = tf.function(ema.update, jit_compile=jit)
    update(tf.constant(True))
    weight.assign([np.nan, 5.0])
    before = ema.averages[0].numpy()
    update(tf.constant(False))
    np.testing.assert_array_equal(ema.averages[0].numpy(), before)
    assert int(ema.updates) == 1


def test_swap_is_exact_and_undone_also_after_an_exception():
    rng = np.random.default_rng(0)
    ema, variables = built([rng.normal(size=9).astype("f") * 10.0**i for i in range(-20, 20, 4)])
    for variable in variables:
        variable.assign(variable * 3.3)
    ema.update()
    weights = [v.numpy() for v in variables]
    averages = [v.numpy() for v in ema.averages]
    with ema.averaged():
        assert same_bits([v.numpy() for v in variables], averages)
        with pytest.raises(UserError, match="in use already"), ema.averaged():
            pass
        assert same_bits([v.numpy() for v in variables], averages)
    assert same_bits([v.numpy() for v in variables], weights)
    with pytest.raises(KeyError), ema.averaged(variables):
        raise KeyError
    assert same_bits([v.numpy() for v in variables], weights)
    assert same_bits([v.numpy() for v in ema.averages], averages)


def test_in_replicas_after_an_update_of_the_weights(mirrored):
    with mirrored.scope():
        variable = tf.Variable([1.0])
        optimizer, ema = SGD(1.0), Ema(decay=0.5, warmup=False)
        optimizer.build([variable])
        ema.build([variable])

    @tf.function
    def step(ok):
        def replica(ok):
            optimizer.apply_gradients([(tf.constant([-0.5]), variable)], ok=ok)
            ema.update(ok)

        mirrored.run(replica, args=(ok,))

    for ok in (True, False, True):
        step(tf.constant(ok))
    # Weights 2 then 3; averages 1.5 then 2.25, on both replicas.
    for local in mirrored.experimental_local_results(ema.averages[0]):
        np.testing.assert_array_equal(local.numpy(), [2.25])
    assert int(ema.updates.numpy()) == 2
    with ema.averaged():
        for local in mirrored.experimental_local_results(variable):
            np.testing.assert_array_equal(local.numpy(), [2.25])
    np.testing.assert_array_equal(variable.numpy(), [3.0])


def test_averages_of_a_mixed_precision_layer_are_float32():
    layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
    layer.build((None, 3))
    layer.kernel.assign(layer.kernel * 0 + (1 + 2.0**-12))
    ema = Ema()
    ema.build(layer.trainable_variables)
    assert float(ema.averages[0][0, 0]) == 1 + 2.0**-12


def test_checkpoint_holds_the_averages_and_not_the_weights(tmp_path):
    ema, (weight,) = built([1.0])
    weight.assign(2.0)
    ema.update()
    path = tf.train.Checkpoint(ema=ema).save(str(tmp_path / "c"))
    names = [name for name, _ in tf.train.list_variables(path) if name.startswith("ema/")]
    assert len(names) == 2, names
    other, _ = built([5.0])
    tf.train.Checkpoint(ema=other).restore(path).assert_consumed()
    assert float(other.averages[0]) == float(ema.averages[0])
    assert int(other.updates) == 1


def test_wrong_use_is_named():
    with pytest.raises(UserError, match="decay"):
        Ema(decay=1.0)
    with pytest.raises(UserError, match="build"):
        Ema().update()
    ema, _ = built([1.0])
    with pytest.raises(UserError, match="pass those of build"), ema.averaged([]):
        pass
