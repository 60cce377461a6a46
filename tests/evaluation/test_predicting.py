"""Predictions of files: equal to the model's own, one a file, with static shapes."""

import csv
import json

import numpy as np
import pytest
import tensorflow as tf
import trained_runs

import vit_tpu
from vit_tpu.errors import UserError
from vit_tpu.evaluation import files, loading, outputs, predicting


@pytest.fixture(scope="module")
def trained():
    return loading.from_run(trained_runs.digits())


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (11, 8, 8, 1)).astype(np.uint8)
    for i, image in enumerate(images):
        (folder / f"{i:02}.png").write_bytes(tf.io.encode_png(image).numpy())
    return folder, images


def _shares(trained, images):
    logits = trained.model(tf.constant(images.astype(np.float32) / 127.5 - 1)).numpy().astype(np.float64)
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


@pytest.mark.parametrize("batch", [4, 11, 64])
def test_every_file_gets_the_models_own_answer(trained, pictures, batch):
    folder, images = pictures
    found = predicting.predict(trained, str(folder), batch_size=batch, top=3)
    wanted = _shares(trained, images)
    assert [row.file for row in found.rows] == sorted(map(str, folder.iterdir())) and found.unreadable == {}
    for row, share in zip(found.rows, wanted):
        best = np.argsort(-share)[:3]
        assert [label for label, _ in row.top] == [str(i) for i in best] and row.label == str(best[0])
        np.testing.assert_allclose([value for _, value in row.top], share[best], rtol=1e-5)


def test_unreadable_files_leave_the_others_in_place(trained, pictures, tmp_path):
    folder, images = pictures
    for i, image in enumerate(images):
        (tmp_path / f"{i:02}.png").write_bytes(tf.io.encode_png(image).numpy())
    (tmp_path / "02.png").write_bytes(b"")
    (tmp_path / "07.png").write_bytes((tmp_path / "07.png").read_bytes()[:-30])
    names = [*sorted(map(str, tmp_path.iterdir())), str(tmp_path / "gone.png")]
    found = predicting.predict(trained, names, batch_size=4)
    assert set(found.unreadable) == {str(tmp_path / name) for name in ("02.png", "07.png", "gone.png")}
    kept = [i for i in range(11) if i not in (2, 7)]
    assert [row.file for row in found.rows] == [names[i] for i in kept]
    wanted = _shares(trained, images)[kept]
    np.testing.assert_allclose([row.probability for row in found.rows], wanted.max(1), rtol=1e-5)


def test_pictures_are_those_the_model_saw(trained, pictures):
    folder, images = pictures
    named = sorted(map(str, folder.iterdir()))
    seen = [picture() for _, picture in predicting.each(trained, named, files.Unreadable(), batch_size=4)]
    np.testing.assert_array_equal(np.stack(seen), images)


def test_one_shape_is_traced(trained, pictures):
    folder, _ = pictures
    source = files.source_of(sorted(map(str, folder.iterdir())))
    dataset = outputs.eval_dataset(trained, source, 4, files.Unreadable())
    assert all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec))
    run = outputs.compiled(trained, outputs.logits_of(trained.model))
    assert len(list(outputs.each_batch(run, dataset))) == 3
    assert run.experimental_get_tracing_count() == 1


def test_a_second_call_compiles_nothing(pictures):
    trained = loading.from_run(trained_runs.digits())
    for name in ("00.png", "01.png", "02.png"):
        predicting.predict(trained, pictures[0] / name)
    assert outputs.compiled_logits(trained).experimental_get_tracing_count() == 1


def test_rows_reach_csv_and_jsonl(trained, pictures, tmp_path):
    found = predicting.predict(trained, str(pictures[0]), top=2)
    found.save(tmp_path / "a.csv")
    found.save(tmp_path / "a.jsonl")
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "label", "probability", "label2", "probability2"]
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for row, line, wanted in zip(rows, lines, found.rows, strict=True):
        assert row["file"] == line["file"] == wanted.file and row["label"] == line["label"] == wanted.label
        assert float(row["probability2"]) == pytest.approx(line["top"][1]["probability"], rel=1e-5)
    assert found.records()[0]["label2"] == found.rows[0].top[1][0]


def test_names_with_commas_and_line_breaks_survive(tmp_path):
    row = predicting.Prediction('a,"b"\n.jpg', "cat, tabby", 0.5, (("cat, tabby", 0.5),))
    predicting.Predictions([row], {}, "", None).save(tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert found == [{"file": 'a,"b"\n.jpg', "label": "cat, tabby", "probability": "0.5"}]


def test_sigmoid_models_give_each_class_its_own_probability(trained, pictures):
    sigmoid = loading.Trained(
        trained.model, loading.with_overrides(trained.config, {"training.loss": "sigmoid"}), (), "", trained.here
    )
    folder, images = pictures
    found = predicting.predict(sigmoid, str(folder / "00.png"), top=10)
    logits = trained.model(tf.constant(images[:1].astype(np.float32) / 127.5 - 1)).numpy()[0]
    np.testing.assert_allclose(
        [value for _, value in found.rows[0].top], np.sort(1 / (1 + np.exp(-logits)))[::-1], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "message"), [("a.txt", "neither .csv nor .jsonl"), ("no/a.csv", "there is no folder")]
)
def test_places_that_cannot_be_written(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        predicting.check_out(tmp_path / name)


def test_the_module_predicts(trained, pictures):
    found = vit_tpu.predict(trained, str(pictures[0] / "03.png"))
    assert len(found.rows) == 1 and str(found).count("\n") == 0 and "03.png" in str(found)
