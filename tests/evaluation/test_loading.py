"""Trained models from runs and weight files: which weights, which names, and what is wrong with the rest."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import trained_runs

import vit_tpu
from vit_tpu.errors import UserError
from vit_tpu.evaluation import loading

REFS = pathlib.Path(__file__).parents[1] / "data" / "refs"


def _values(model):
    return {parameter.path: parameter.variable.numpy() for parameter in model.parameters()}


@pytest.mark.parametrize(("ema", "prefix", "words"), [(None, "ema/", "average (EMA)"), (True, "ema/", "average"),
                                                     (False, "parameters/", "trained weights, not their")])  # fmt: skip
def test_a_run_gives_the_average_unless_asked_for_the_weights(ema, prefix, words):
    run = trained_runs.digits()
    trained = loading.from_run(run, ema=ema)
    arrays = trained_runs.arrays_of(run)
    for path, value in _values(trained.model).items():
        np.testing.assert_array_equal(value, arrays[prefix + path])
    assert words in trained.weights and "step 40" in trained.weights
    assert trained.names == tuple("0123456789") and trained.config.model.num_classes == 10


def test_class_names_come_from_the_checkpoint_first():
    names = tuple(f"digit {i}" for i in range(10))
    assert loading.from_run(trained_runs.digits(class_names=names)).names == names


def test_data_that_are_gone_leave_numbers_for_names(tmp_path):
    overrides = {"data.source": "folder", "data.path": str(tmp_path / "gone")}
    trained = loading.from_run(trained_runs.digits(), overrides=overrides)
    assert trained.class_names == () and trained.names == tuple("0123456789")


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_best(tmp_path):
    run = shutil.copytree(trained_runs.digits(), tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "00000040", run / "checkpoints" / "00000050")  # says 40 inside
    assert "step 40" in loading.from_run(run, checkpoint=40).weights
    (run / "summary.json").write_text(json.dumps({"best": {"step": 40, "accuracy": 0.5}}))
    assert "step 40" in loading.from_run(run, checkpoint="best").weights
    with pytest.raises(UserError, match='no checkpoint "30"; it has newest, 50, 40'):
        loading.from_run(run, checkpoint="30")


def test_a_damaged_checkpoint_is_not_used(tmp_path):
    run = shutil.copytree(trained_runs.digits(), tmp_path / "run")
    file = run / "checkpoints" / "00000040" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="all 1 of its checkpoints are damaged"):
        loading.from_run(run)
    with pytest.raises(UserError, match="is damaged .model.safetensors"):
        loading.from_run(run, checkpoint=40)


def test_another_shape_than_the_checkpoints_is_an_error():
    with pytest.raises(
        UserError, match=r"does not fit its config: .* is \[2, 2, 1, 16\] there and \[2, 2, 1, 32\] here"
    ):
        loading.from_run(trained_runs.digits(), overrides={"model.width": 32})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: shutil.rmtree(run), "there is no such folder"),
        (lambda run: (run / "config.yaml").unlink(), "has no config.yaml"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, spoil, message):
    run = shutil.copytree(trained_runs.digits(), tmp_path / "run")
    spoil(run)
    with pytest.raises(UserError, match=message):
        loading.from_run(run)


def test_a_mistyped_run_gets_its_neighbour_suggested(tmp_path):
    shutil.copytree(trained_runs.digits(), tmp_path / "digits")
    with pytest.raises(UserError, match='did you mean ".*digits"'):
        loading.from_run(tmp_path / "digit")


def test_an_average_that_was_not_kept_is_an_error():
    run = trained_runs.digits(ema=None)
    assert loading.from_run(run).weights.endswith("step 40, trained weights")
    with pytest.raises(UserError, match="kept no average"):
        loading.from_run(run, ema=True)


def test_a_weight_file_says_its_own_shape(refs, tmp_path):
    trained = loading.from_weights(str(REFS / "vit_map.npz"), {"data.source": "synthetic"})
    stored = refs("vit_map.npz")
    np.testing.assert_allclose(trained.model(stored["in/image"]).numpy(), stored["out/logits"], atol=2e-5)
    assert trained.model.pool == "map" and trained.model.num_classes == 10 and trained.names[3] == "3"


def test_a_named_variant_has_to_match_the_file():
    with pytest.raises(UserError, match="other shapes: embedding/kernel"):
        loading.from_weights(str(REFS / "vit_map.npz"), {"model.variant": "Ti/16"})
    with pytest.raises(UserError, match="9 class names for a head of 10"):
        loading.from_weights(str(REFS / "vit_map.npz"), class_names=list("abcdefghi"))


def test_normalisation_folded_into_the_embedding_is_the_same_function(refs):
    plain = loading.from_weights(str(REFS / "vit_map.npz"))
    folded = loading.from_weights(str(REFS / "vit_map.npz"), normalize="imagenet")
    shares = np.random.default_rng(0).random((2, 64, 64, 3)).astype(np.float32)  # 0..1
    normalised = (shares - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    wanted = plain.model(tf.constant(normalised, tf.float32)).numpy()
    found = folded.model(tf.constant(2 * shares - 1)).numpy()
    np.testing.assert_allclose(found, wanted, atol=3e-5)
    assert np.abs(plain.model(tf.constant(2 * shares - 1)).numpy() - wanted).max() > 1e-2
    with pytest.raises(UserError, match='did you mean "imagenet"'):
        loading.fold_normalization(plain.model, "imgenet")


def test_data_says_a_source_in_one_word(tmp_path):
    assert loading.data_overrides(str(tmp_path))["data.path"] == str(tmp_path)
    assert loading.data_overrides("a/b.npz")["data.source"] == "npz"
    assert loading.data_overrides("digits")["data.source"] == "digits"
    with pytest.raises(UserError, match='did you mean "digits"'):
        loading.data_overrides("digit")


def test_load_trained_takes_one_of_the_two():
    with pytest.raises(UserError, match="give the folder of a run, or weights"):
        vit_tpu.load_trained()
