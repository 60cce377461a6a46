"""Which checkpoint a run continues from, and what may have changed since."""

import hashlib
import json
import os

import numpy as np
import pytest
from state_model import model
from tiny_run import config

from vit_tpu import UserError, load_weights
from vit_tpu import config as configs
from vit_tpu.training import checkpoints, resume
from vit_tpu.training.resume import Start


def put(root, step, settings=None, **more):
    manifest = {
        "config": configs.to_dict(settings or config()),
        "position": {"examples": step * 32, "micro_steps": step},
    }
    return checkpoints.write(str(root), step, {}, {**manifest, **more})


def test_newest_checkpoint_of_the_folder_is_found(tmp_path):
    assert resume.find(config(), str(tmp_path)) == Start()
    put(tmp_path, 2)
    path = put(tmp_path, 4, rollbacks=1)
    start = resume.find(config(), str(tmp_path))
    assert (start.step, start.examples, start.micro_steps, start.rollbacks, start.path) == (4, 128, 4, 1, path)


def test_damaged_newest_is_said_at_the_start(tmp_path):
    put(tmp_path, 2)
    os.truncate(os.path.join(put(tmp_path, 4), "training.safetensors"), 3)
    start = resume.find(config(), str(tmp_path))
    assert start.step == 2 and start.notes == ("the checkpoint of step 4 is damaged: step 2 is used",)


def test_path_that_is_no_checkpoint_names_those_beside_it(tmp_path):
    path = put(tmp_path / "run/checkpoints", 4)
    with pytest.raises(UserError, match="neither a run.*beside it are 00000004"):
        resume.checkpoint_at(str(tmp_path / "run/checkpoints/77"))
    with pytest.raises(UserError) as refused:
        resume.checkpoint_at(f"{path}/model.safetensors")
    assert "did you mean" not in str(refused.value)  # itself


def test_only_damaged_checkpoints_are_an_error_not_a_silent_fresh_start(tmp_path):
    os.truncate(os.path.join(put(tmp_path, 4), "training.safetensors"), 3)
    with pytest.raises(UserError, match="none of the 1 checkpoints .* is whole: choose another workdir"):
        resume.find(config(), str(tmp_path))


def test_never_does_not_write_over_a_run(tmp_path):
    assert resume.find(config(resume="never"), str(tmp_path)) == Start()
    put(tmp_path, 4)
    with pytest.raises(UserError, match="holds a run of 4 steps, which resume=never would write over"):
        resume.find(config(resume="never"), str(tmp_path))


@pytest.mark.parametrize("what", ["run", "run/checkpoints", "run/checkpoints/00000004", "run/checkpoints/00000004/"])
def test_path_may_be_a_run_or_a_checkpoint(what, tmp_path):
    put(tmp_path / "run/checkpoints", 2)
    put(tmp_path / "run/checkpoints", 4)
    assert resume.find(config(resume=str(tmp_path / what)), str(tmp_path / "new/checkpoints")).step == 4


def test_older_checkpoint_of_another_run_is_taken_as_named_and_the_own_one_afterwards(tmp_path):
    older = put(tmp_path / "run/checkpoints", 2)
    put(tmp_path / "run/checkpoints", 4)
    settings, own = config(resume=older), tmp_path / "new/checkpoints"
    assert resume.find(settings, str(own)).step == 2
    put(own, 3, settings)
    start = resume.find(settings, str(own))
    assert start.step == 3 and "own checkpoint goes first" in " ".join(start.notes)


def test_path_without_a_checkpoint_is_an_error_with_the_nearest(tmp_path):
    put(tmp_path / "first/checkpoints", 2)
    with pytest.raises(UserError, match='frist is neither a run.*did you mean "first"'):
        resume.find(config(resume=str(tmp_path / "frist")), str(tmp_path / "new"))


def test_named_checkpoint_that_is_damaged_is_an_error(tmp_path):
    put(tmp_path, 2)
    path = put(tmp_path, 4)
    os.truncate(os.path.join(path, "manifest.json"), 30)
    with pytest.raises(UserError, match="00000004 is damaged .*beside it are 00000002"):
        resume.find(config(resume=path), str(tmp_path / "new"))


def test_path_inside_the_workdir_is_refused(tmp_path):
    path = put(tmp_path / "checkpoints", 2)
    with pytest.raises(UserError, match="lies in the workdir itself"):
        resume.find(config(resume=path), str(tmp_path / "checkpoints"))


def test_every_key_of_the_config_has_its_category():
    by = {
        kind: {key for key in configs.all_keys() if resume.category(key) == kind}
        for kind in ("free", "change", "shape")
    }
    assert {
        "training.steps",
        "training.log_every",
        "precision",
        "loss_scale.mode",
        "training.accumulation_steps",
    } <= by["free"]
    assert {"optimizer.learning_rate", "training.batch_size", "data.source", "data.mixup", "training.seed"} <= by[
        "change"
    ]
    assert {"model.width", "model.depth", "model.pool", "optimizer.name"} <= by["shape"]
    known = set(configs.all_keys())
    assert all(key in known or key.endswith(".") for key in (*resume.FREE, *resume.SHAPE))


def compare(changes, **more):
    return resume.compare(configs.to_dict(config()), config(**changes, **more), "runs/x")


def test_free_changes_are_shown_and_need_no_leave():
    assert compare({"training__steps": 24, "precision": "mixed_bfloat16"}) == [
        "precision: float32 -> mixed_bfloat16", "training.steps: 12 -> 24"
    ]  # fmt: skip
    assert compare({}) == []


def test_changes_of_the_mathematics_need_leave_and_are_shown():
    with pytest.raises(UserError, match=r"learning_rate: 0.001 -> 0.5.*--allow_config_change") as error:
        compare({"learning_rate": 0.5, "training__steps": 24})
    assert "training.steps" not in str(error.value)
    assert compare({"learning_rate": 0.5}, allow_config_change=True) == [
        "optimizer.learning_rate: 0.001 -> 0.5 (allowed)"
    ]


def test_another_shape_is_refused_even_with_leave():
    with pytest.raises(UserError, match=r"model.width: 16 -> 32.*--init_from=runs/x"):
        compare({"width": 32}, allow_config_change=True)


def test_config_of_another_version_is_compared_by_the_keys_both_know():
    before = configs.to_dict(config())
    before["training"] = {k: v for k, v in before["training"].items() if k != "max_rollbacks"} | {"gone": 1}
    assert resume.compare({**before, "older": 2}, config(), "runs/x") == []


def test_position_is_counted_in_examples_so_that_another_batch_size_goes_on_there():
    at = Start(step=10, examples=320)
    assert resume.first_batch(at, 32) == (10, []) and resume.first_batch(at, 64) == (5, [])
    batch, notes = resume.first_batch(at, 48)
    assert batch == 7 and "16 are passed over" in notes[0]  # 7 x 48 = 336


def test_init_from_takes_runs_checkpoints_and_files(tmp_path):
    path = put(tmp_path / "run/checkpoints", 4)
    assert resume.weights_at(str(tmp_path / "run")) == path == resume.weights_at(path)
    assert resume.weights_at(str(tmp_path / "run/checkpoints")) == path
    assert (
        resume.weights_at("gs://bucket/w.npz") == "gs://bucket/w.npz" and resume.weights_at("w.npz:img") == "w.npz:img"
    )
    (tmp_path / "timm").mkdir()
    assert resume.weights_at(str(tmp_path / "timm")) == str(tmp_path / "timm")


def test_weights_of_a_checkpoint_of_the_first_format_can_be_taken(tmp_path):
    made, other = model(), model()
    path = tmp_path / "run/checkpoints/00000003"
    path.mkdir(parents=True)
    arrays = {f"parameters/{p.path}": p.variable.numpy() + 1 for p in made.parameters()}
    np.savez(path / "state.npz", **arrays, **{"counters/steps": np.int64(3)})
    digest = hashlib.sha256((path / "state.npz").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 3, "sha256": digest, "arrays": {}}))
    load_weights(other, resume.weights_at(str(tmp_path / "run")), verbose=False)
    for parameter in other.parameters():
        np.testing.assert_array_equal(parameter.variable.numpy(), arrays[f"parameters/{parameter.path}"])
    start = resume.find(config(), str(path.parent))
    with pytest.raises(UserError, match="has format 1, this version reads 2: --init_from="):
        resume.load(start, made, config())
