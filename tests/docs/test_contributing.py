"""What CONTRIBUTING.md shows works: its source trains, its optimizer steps and is saved, its format is read."""

import pathlib
import zipfile

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from doc_pages import ROOT, blocks
from PIL import Image

import vit_tpu
from vit_tpu.data import pipeline
from vit_tpu.weights import source as sources

SHAPE = {"image_size": 8, "num_classes": 2, "pool": "gap", "width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2}


@pytest.fixture(scope="module")
def shown():
    """The names that the page's Python blocks define; the package is put back afterwards."""
    before, space = (sources.FORMATS, sources.SOURCES), {}
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        if block.language == "python":
            assert sum(bool(line.strip()) for line in block.text.splitlines()) <= 15, "ten lines, beside imports"
            exec(block.text, space)
    yield space
    sources.FORMATS, sources.SOURCES = before


def test_the_source_gives_each_image_with_its_label(shown, tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for number in range(6):
            file = tmp_path / "image.jpg"
            Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(file)
            archive.write(file, f"{'cat' if number % 2 else 'dog'}/{number}.jpg")
    source = shown["from_zip"](str(tmp_path / "images.zip"))
    assert source.class_names == ("cat", "dog") and source.labels.tolist() == [0, 0, 0, 1, 1, 1]
    data = pipeline.eval_pipeline(source, batch_size=6, image_size=8, channels=3)
    images, labels, weights = next(iter(data))
    grey = np.round((images.numpy().mean((1, 2, 3)) + 1) * 127.5)
    np.testing.assert_allclose(grey, [40, 120, 200, 0, 80, 160], atol=2)
    assert labels.numpy().tolist() == [0, 0, 0, 1, 1, 1] and weights.numpy().sum() == 6


def test_the_optimizer_moves_by_the_sign_and_comes_back_from_its_config(shown):
    variable, optimizer = tf.Variable([1.0, -2.0]), shown["Lion"](0.1, weight_decay=0.5)
    optimizer.apply_gradients([(tf.constant([3.0, -0.2]), variable)])
    np.testing.assert_allclose(variable, [1 - 0.1 * (1 + 0.5), -2 - 0.1 * (-1 - 1)], rtol=1e-6)  # w - lr (sign + d w)
    optimizer.apply_gradients([(tf.constant([-1.0, 0.0]), variable)])  # 0.9 * 0.03 - 0.1 < 0 and -0.9 * 0.002 < 0
    np.testing.assert_allclose(variable, [0.85 - 0.1 * (-1 + 0.425), -1.8 - 0.1 * (-1 - 0.9)], rtol=1e-6)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is shown["Lion"] and again.get_config() == optimizer.get_config()
    model = vit_tpu.ViT("Ti/4", **SHAPE)
    model.compile(shown["Lion"](1e-3), grad_clip_norm=1.0)
    model.fit(tf.zeros([4, 8, 8, 3]), tf.constant([0, 1, 0, 1]), batch_size=4, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_the_format_is_recognised_and_read_to_the_last_tensor(shown, tmp_path):
    model, other = vit_tpu.ViT("Ti/4", **SHAPE), vit_tpu.ViT("Ti/4", **SHAPE)
    for parameter in model.parameters():
        parameter.variable.assign_add(tf.ones_like(parameter.variable) * 0.1)
    vit_tpu.save_weights(model, str(tmp_path / "a.npz"), format="big_vision")
    with np.load(tmp_path / "a.npz") as arrays:
        np.savez(
            tmp_path / "b.npz",
            **{"dotted." + k.replace("/", "."): arrays[k] for k in arrays if "/" in k or k in ("cls", "pos_embedding")},
        )
    report = vit_tpu.load_weights(other, str(tmp_path / "b.npz"), verbose=False)
    assert report.source.startswith("dotted") and not report.unused
    for mine, theirs in zip(model.parameters(), other.parameters()):
        np.testing.assert_array_equal(mine.variable, theirs.variable)


def test_the_places_that_the_page_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in ("vit_tpu/settings.py", "vit_tpu/training/inputs.py", "tests/data/test_every_source.py"):
        assert name in text and pathlib.Path(ROOT / name).is_file()
    assert "OPTIMIZERS" in (ROOT / "vit_tpu/optim/build.py").read_text()
    assert "def _open(" in (ROOT / "vit_tpu/training/inputs.py").read_text()
    assert "def save_canonical(" in (ROOT / "vit_tpu/weights/io.py").read_text()
    assert "KINDS" in (ROOT / "vit_tpu/weights/layout.py").read_text()
