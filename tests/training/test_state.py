"""Checkpoints: strict, verified, never half written."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu import UserError, ViT, optim
from vit_tpu.training import state


def model(width=8, momentum_dtype="bfloat16"):
    made = ViT("Ti/4", image_size=8, num_classes=3, width=width, depth=1, mlp_dim=16, num_heads=2)
    optimizer = optim.LossScale(optim.AdamW(1e-2, momentum_dtype=momentum_dtype))
    made.compile(optimizer, ema=0.9, run_eagerly=True)
    return made


@pytest.fixture(scope="module")
def trained():
    made = model()
    images = np.random.default_rng(0).uniform(-1, 1, (6, 8, 8, 3)).astype(np.float32)
    made.fit(images, np.arange(6) % 3, batch_size=6, epochs=2, verbose=0)
    return made


def values(made):
    return {name: tf.convert_to_tensor(v).numpy() for name, v in state.variables_of(made).items()}


def test_everything_comes_back_bit_for_bit(trained, tmp_path):
    path = state.save(trained, tmp_path, 2, {"note": "x"})
    other = model()
    state.restore(other, path)
    before, after = values(trained), values(other)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert int(after["optimizer/applied_updates"]) == 2 and float(after["loss_scale/scale"]) == 4096
    momenta = [name for name in before if name.startswith("optimizer/momentum/")]
    assert momenta and any(np.any(before[name].astype(np.float32) != 0) for name in momenta)


def test_damaged_newest_is_passed_over(trained, tmp_path):
    state.save(trained, tmp_path, 1, {})
    newest = state.save(trained, tmp_path, 2, {})
    with open(newest / "state.npz", "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    assert state.newest(tmp_path)[1]["step"] == 1
    os.truncate(newest / "state.npz", 100)
    assert state.newest(tmp_path)[1]["step"] == 1


def test_half_written_folder_does_not_count(trained, tmp_path):
    state.save(trained, tmp_path, 1, {})
    (tmp_path / ".00000009.1.tmp").mkdir()
    (tmp_path / "00000008").mkdir()
    assert state.newest(tmp_path)[1]["step"] == 1


def test_only_the_newest_are_kept(trained, tmp_path):
    for step in (1, 2, 3):
        state.save(trained, tmp_path, step, {}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["00000002", "00000003"]


def test_other_names_are_an_error_that_shows_both_sides_and_changes_nothing(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["arrays"]["parameters/head/kernal"] = manifest["arrays"].pop("parameters/head/kernel")
    (path / "manifest.json").write_text(json.dumps(manifest))
    other = model()
    before = values(other)
    with pytest.raises(UserError, match="head/kernel.*did you mean.*head/kernal"):
        state.restore(other, path)
    assert all(np.array_equal(before[name], value) for name, value in values(other).items())


def test_other_shapes_are_an_error(trained, tmp_path):
    path = state.save(trained, tmp_path, 1, {})
    with pytest.raises(UserError, match="does not fit"):
        state.restore(model(width=16), path)


def test_full_disk_is_one_clear_error_and_leaves_nothing(trained, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="No space left"):
        state.save(trained, tmp_path, 1, {})
    assert os.listdir(tmp_path) == []


def test_state_that_is_not_finite_is_not_written(tmp_path):
    made = model()
    made.parameters()[0].variable.assign(made.parameters()[0].variable * np.nan)
    with pytest.raises(FloatingPointError, match="embedding/kernel"):
        state.save(made, tmp_path, 1, {})
    assert not any(tmp_path.iterdir())
