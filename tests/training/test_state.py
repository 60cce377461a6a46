"""The state of a run: complete, strict, unharmed by what training does next."""

import numpy as np
import pytest
import tensorflow as tf
from state_model import images, model

from vit_tpu import UserError, load_weights
from vit_tpu.training import checkpoints, state


@pytest.fixture(scope="module")
def trained():
    made = model()
    made.fit(*images(), batch_size=6, epochs=2, verbose=0)
    return made


def values(made):
    return {name: tf.convert_to_tensor(v).numpy() for name, v in state.variables_of(made).items()}


def differing(one, other):
    return [name for name in one if not np.array_equal(one[name], other[name])]


def test_everything_comes_back_bit_for_bit(trained, tmp_path):
    path = state.save(trained, tmp_path, 2, {"note": "x"})
    other = model()
    assert state.restore(other, path) == []
    before, after = values(trained), values(other)
    assert differing(before, after) == []
    assert int(after["optimizer/applied_updates"]) == 2 and float(after["loss_scale/scale"]) == 4096
    assert int(after["loss_scale/good_steps"]) == 2 and int(after["counters/steps"]) == 2
    momenta = [name for name in before if name.startswith("optimizer/momentum/")]
    assert momenta and any(np.any(before[name].astype(np.float32) != 0) for name in momenta)


def test_loss_scale_and_its_good_steps_come_back(tmp_path):
    made, other = model(), model()
    made.optimizer.state_variables()["scale"].assign(2048.0)
    made.optimizer.state_variables()["good_steps"].assign(7)
    state.restore(other, state.save(made, tmp_path, 1, {}))
    assert float(other.optimizer.loss_scale) == 2048 and int(other.optimizer.dynamic_counter) == 7


def test_only_the_newest_are_kept(trained, tmp_path):
    for step in (1, 2, 3):
        state.save(trained, tmp_path, step, {}, keep=2)
    assert checkpoints.steps(str(tmp_path)) == [3, 2]


@pytest.mark.parametrize("jit", [False, True])
def test_snapshot_stays_as_it_was_while_training_goes_on(jit):
    made = model(momentum_dtype="float32", run_eagerly=False, jit_compile=jit)
    x, y = images()
    made.fit(x, y, batch_size=6, epochs=1, verbose=0)
    taken, before = state.snapshot(made), values(made)
    made.fit(x, y, batch_size=6, epochs=3, verbose=0)
    assert differing({n: v for n, v in before.items() if v.dtype != tf.bfloat16.as_numpy_dtype},
                     {n: a for n, (a, _) in taken.items()}) == []  # fmt: skip
    assert len(differing(before, values(made))) > 20  # it has moved meanwhile


def test_other_names_are_an_error_that_shows_both_sides_and_changes_nothing(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    manifest = checkpoints.read_manifest(path)
    manifest["arrays"]["parameters/head/kernal"] = manifest["arrays"].pop("parameters/head/kernel")
    other = model()
    before = values(other)
    with pytest.raises(UserError, match="head/kernel.*did you mean.*head/kernal.*--init_from"):
        state.restore(other, path, manifest)
    assert differing(before, values(other)) == []


def test_checkpoint_that_matches_nothing_is_an_error(tmp_path):
    path = checkpoints.write(str(tmp_path), 1, {"x": (np.zeros(2, np.float32), "float32")}, {})
    with pytest.raises(UserError, match=r"0 of its|1 of its 1 arrays are not in the model \(x\)"):
        state.restore(model(), path)


def test_other_shapes_and_dtypes_are_an_error(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    with pytest.raises(UserError, match=r"does not fit: .* \[.*8.*\] there and .*16"):
        state.restore(model(width=16), path)
    with pytest.raises(UserError, match="does not fit: optimizer/momentum/.* is bfloat16 .* there and float32"):
        state.restore(model(momentum_dtype="float32"), path)


def test_other_format_points_to_its_weights(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    with pytest.raises(UserError, match="has format 0, this version reads 2: --init_from="):
        state.restore(model(), path, {**checkpoints.read_manifest(path), "format": 0})


def test_loss_scale_may_go_and_come_with_one_line_each(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    plain = model(scaled=False)
    assert state.restore(plain, path) == ["the loss scale is dropped: this run has none"]
    without = state.save(plain, tmp_path / "b", 1, {})
    again = model()
    notes = state.restore(again, without)
    assert notes == ["the checkpoint has no loss scale: it starts at its initial value"]
    before, after = values(trained), values(again)
    assert all(name.startswith("loss_scale/") for name in differing(before, after))
    assert float(again.optimizer.loss_scale) == 4096


def test_average_may_come_and_go_only_when_changes_are_allowed(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    without = model(ema=None)
    with pytest.raises(UserError, match="ema/"):
        state.restore(without, path)
    assert state.restore(without, path, change=True) == ["the moving average is dropped: this run has none"]
    bare = state.save(without, tmp_path / "b", 1, {})
    other = model()
    assert state.restore(other, bare, change=True) == ["the checkpoint has no moving average: it starts as the weights"]
    for parameter, average in zip(other.trained, other.averages.averages):
        np.testing.assert_array_equal(average.numpy(), parameter.variable.numpy())


def test_state_that_is_not_finite_is_not_written(tmp_path):
    made = model()
    made.parameters()[0].variable.assign(made.parameters()[0].variable * np.nan)
    with pytest.raises(FloatingPointError, match="embedding/kernel"):
        state.save(made, tmp_path, 1, {})
    assert not any(tmp_path.iterdir())


def test_checkpoint_is_a_weight_file_for_load_weights(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    fresh = model()
    report = load_weights(fresh, path, verbose=False)
    assert len(report.loaded) == len(trained.parameters()) and not report.notes
    for one, other in zip(trained.parameters(), fresh.parameters()):
        np.testing.assert_array_equal(one.variable.numpy(), other.variable.numpy())


def test_two_replicas_and_one_share_checkpoints(mirrored, tmp_path):
    with mirrored.scope():
        both = model(run_eagerly=False)
    x, y = images()
    both.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(6, drop_remainder=True), verbose=0)
    path = state.save(both, tmp_path, 1, {})
    alone = model()
    state.restore(alone, path)
    assert differing(values(both), values(alone)) == []
    alone.fit(x, y, batch_size=6, verbose=0)
    back = state.save(alone, tmp_path, 2, {})
    state.restore(both, back)
    assert differing(values(both), values(alone)) == []
    for replica in both.trained[0].variable.values:  # every replica, not only the first
        np.testing.assert_array_equal(replica.numpy(), alone.trained[0].variable.numpy())
