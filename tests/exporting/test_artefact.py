"""Artefacts compute what the model computes, or are not kept."""

import base64
import dataclasses
import io
import json
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
import trained_runs
from export_helpers import NAMES, floats, images, rest_server, tiny
from PIL import Image

from vit_tpu.errors import UserError
from vit_tpu.evaluation import loading
from vit_tpu.exporting import artefact, formats

TOLERANCE = {"saved_model": 1e-5, "onnx": 1e-4, "tflite": 1e-4, "tflite_int8": 0.3}


@pytest.fixture(scope="module", params=list(TOLERANCE))
def exported(request, tmp_path_factory):
    model, folder = tiny("mixed_float16"), tmp_path_factory.mktemp("export") / request.param
    report = artefact.export_model(
        model, folder, request.param, class_names=NAMES, calibration=[floats(images(20))], samples=floats(images())
    )
    return request.param, folder, report


def test_artefact_gives_the_float32_models_numbers_in_float32(exported):
    format_, folder, report = exported
    x = floats(images(3)[::-1])
    found, wanted = formats.read(folder)(x), tiny("float32")(x).numpy()
    assert found.dtype == np.float32 and found.shape == (3, 4)
    assert np.abs(found - wanted).max() < TOLERANCE[format_]
    assert report.difference < TOLERANCE[format_]
    assert report.training_difference > 1e-4  # half precision is another model, and the report says how far
    assert report.agreement == 1.0


def test_labels_preprocessing_and_card_come_with_it(exported):
    format_, folder, report = exported
    assert (folder / "labels.txt").read_text().split() == list(NAMES)
    preprocessing = json.loads((folder / "preprocessing.json").read_text())
    assert preprocessing["image_size"] == [12, 12] and preprocessing["crop"] == "resize"
    assert json.loads((folder / "export.json").read_text())["difference"] == report.difference
    card = (folder / "README.md").read_text()
    assert "4 classes" in card and f"Exported as {format_}" in card


def test_the_cards_own_code_runs(exported, monkeypatch):
    _, folder, _ = exported
    block = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (folder / "image.jpg").write_bytes(tf.io.encode_jpeg(images(1)[0]).numpy())
    monkeypatch.chdir(folder)
    inputs = {"floats": floats(images(1)), "pixels": images(1)}
    lines = [line.replace("pixels=images", "pixels=pixels") for line in block.splitlines()]
    exec("\n".join(lines), {"images": inputs["floats"], "pixels": tf.constant(inputs["pixels"])})


def test_onnx_carries_its_labels(tmp_path):
    import onnx

    artefact.export_model(tiny(), tmp_path / "out", "onnx", class_names=NAMES)
    model = onnx.load(str(tmp_path / "out" / "model.onnx"))
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(properties["class_names"]) == list(NAMES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving") / "vit"
    artefact.export_model(tiny(), folder, class_names=NAMES)
    return folder


def test_rest_requests_of_tensorflow_serving_are_answered(saved):
    pixels = images(2)
    files = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        files.append({"b64": base64.b64encode(buffer.getvalue()).decode()})
    wanted = tf.nn.softmax(tiny()(floats(pixels))).numpy()
    with rest_server(str(saved / "1")) as address:
        for body in (
            {"instances": floats(pixels).tolist()},
            {"signature_name": "pixels", "instances": pixels.tolist()},
            {"signature_name": "files", "instances": files},
        ):
            request = urllib.request.Request(address, json.dumps(body).encode())
            answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
            found = [row["probabilities"] for row in answer["predictions"]]
            np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["gif", "bmp", "webp"])
def test_saved_model_reads_other_kinds_of_files(saved, kind):
    grey = np.repeat(np.repeat(np.arange(0, 144, 12, np.uint8)[None, :, None], 12, 0), 3, 2)
    buffer = io.BytesIO()
    Image.fromarray(grey).save(buffer, kind, **({"quality": 100} if kind == "webp" else {}))
    loaded = tf.saved_model.load(str(saved / "1"))
    found = loaded.signatures["files"](files=tf.constant([buffer.getvalue()]))["logits"]
    np.testing.assert_allclose(found, tiny()(floats(grey[None])), atol=0.1 if kind == "webp" else 1e-5)


def test_gradients_of_the_saved_model_are_the_models(saved):
    x = tf.constant(floats(images(2)))
    model, loaded = tiny(), tf.saved_model.load(str(saved / "1"))
    run = loaded.signatures["serving_default"]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        ours, theirs = model(x)[:, 1], run(images=x)["logits"][:, 1]
    np.testing.assert_allclose(tape.gradient(theirs, x), tape.gradient(ours, x), atol=1e-5)


def test_a_model_without_classes_gives_features(tmp_path):
    model = tiny(num_classes=0)
    artefact.export_model(model, tmp_path / "out")
    x = floats(images())
    np.testing.assert_allclose(formats.read(tmp_path / "out")(x), model(x), atol=1e-5)


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
def test_an_artefact_that_computes_something_else_is_not_kept(tmp_path, monkeypatch, wrong):
    def off(servable, folder, *_):
        (folder / "model").write_bytes(b"half an artefact")
        return lambda x: servable.forward(x).numpy() + np.float32(wrong)

    monkeypatch.setattr(formats, "write", off)
    with pytest.raises(FloatingPointError, match="differs from the model.*nothing was kept"):
        artefact.export_model(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_artefact_that_names_other_classes_says_so():
    report = artefact.ExportReport("out", "tflite_int8", 1, 64, 2.9, 2.9, 0.6)
    assert "warning: it often names another class" in str(report)
    assert "warning" not in str(dataclasses.replace(report, agreement=0.97))
    features = dataclasses.replace(report, agreement=None)
    assert "warning: its outputs are 80% off" in str(dataclasses.replace(features, relative=0.8))
    assert "warning" not in str(dataclasses.replace(features, relative=0.03))


def test_features_of_a_model_without_classes_are_compared_as_a_whole(tmp_path, monkeypatch):
    def off(servable, *_):
        return lambda x: servable.forward(x).numpy() * np.float32(0.5)

    monkeypatch.setattr(formats, "write", off)
    report = artefact.export_model(tiny(num_classes=0), tmp_path / "out", "tflite_int8")
    assert report.agreement is None and report.relative == pytest.approx(0.5, rel=1e-5)
    assert "warning: its outputs are 50% off" in str(report)


def test_a_runs_folder_and_a_loaded_model_are_exported_with_their_names(tmp_path):
    run = trained_runs.digits(class_names=tuple("abcdefghij"))
    trained = loading.from_run(run)
    sigmoid = dataclasses.replace(trained, config=loading.with_overrides(trained.config, {"training.loss": "sigmoid"}))
    for what, name, loss in ((run, "a", "softmax"), (sigmoid, "b", "sigmoid")):
        artefact.export_model(what, tmp_path / name, "tflite")
        assert (tmp_path / name / "labels.txt").read_text().split() == list("abcdefghij")
        assert json.loads((tmp_path / name / "preprocessing.json").read_text())["probabilities"] == loss


def test_a_link_to_nowhere_is_no_place_for_it(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="exists"):
        artefact.export_model(tiny(), tmp_path / "out")
    assert (tmp_path / "out").is_symlink()


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        artefact.export_model(tiny(), tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "format_, words", [("onx", 'did you mean "onnx"'), ("tflite_int8", "int8 takes its value ranges from images")]
)
def test_wrong_requests_are_named_and_leave_nothing(tmp_path, format_, words):
    with pytest.raises(UserError, match=words):
        artefact.export_model(tiny(), tmp_path / "out", format_)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tf2onnx", None)
    with pytest.raises(UserError, match=r"pip install 'vit_tpu\[export\]'"):
        artefact.export_model(tiny(), tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_reading_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no exported model"):
        formats.read(tmp_path)
