import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from vit_tpu.data import cache
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.digits import digits
from vit_tpu.data.folders import from_folders
from vit_tpu.data.pipeline import eval_pipeline, train_pipeline
from vit_tpu.errors import UserError


@pytest.fixture
def tree(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(10):
        folder = tmp_path / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10 + i, 12, 3), np.uint8)).save(folder / str(i), "PNG")
    return tmp_path


def _hold(source, kind, crop="resize", size=8, **options):
    return cache.hold(source, kind, size, channels=3, crop=crop, **options)


def _batches(source, crop):
    dataset = train_pipeline(source, batch_size=4, image_size=8, crop=crop, flip=True, broken=BrokenRecords(1))
    return [tuple(part.numpy() for part in batch) for batch in dataset.take(3)]


def test_files_in_memory_give_the_batches_of_the_files_and_outlive_them(tree):
    source = from_folders(tree, validation_share=1e-12)
    expected = _batches(source, "inception")
    held, sentence = _hold(source, "files", "inception")
    assert "of files in memory" in sentence and held.encoded and held.name_of(3) == source.name_of(3)
    for file in tree.glob("train/*/*"):
        file.unlink()
    for one, other in zip(_batches(held, "inception"), expected):
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a, b)
    assert held.get(tf.constant(2, tf.int64))["id"].numpy().decode() == source.name_of(2)


def test_a_file_that_cannot_be_read_into_memory_is_reported_by_the_pipeline(tree):
    source = from_folders(tree, validation_share=1e-12)
    (tree / "train" / "a" / "4").unlink()
    held, _ = _hold(source, "files")
    broken = BrokenRecords(1)
    weights = [batch[2] for batch in eval_pipeline(held, batch_size=5, image_size=8, broken=broken)]
    assert np.concatenate(weights).sum() == 9
    assert list(broken.reasons) == ["a/4"] and "cannot be read" in broken.reasons["a/4"]


def test_the_estimate_of_files_is_their_size(tree):
    sizes = [file.stat().st_size for file in tree.glob("train/*/*")]
    assert abs(cache.files_bytes(from_folders(tree, validation_share=1e-12)) - sum(sizes)) <= 10


def test_auto_keeps_pixels_where_they_are_few_and_whole(tree, monkeypatch):
    source = from_folders(tree, validation_share=1e-12)
    held, sentence = _hold(source, "auto")
    assert held.image_shape == (8, 8, 3) and "of pixels in memory" in sentence
    assert _hold(source, "auto", "inception") == (source, "")
    assert _hold(source, "none") == (source, "")
    monkeypatch.setattr(cache, "PIXELS_LIMIT", 10 * 8 * 8 * 3 - 1)
    kept, sentence = _hold(source, "auto")
    assert kept is source and "decoded in every epoch" in sentence
    inside = digits()
    assert _hold(inside, "files") == (inside, "")


def test_what_does_not_fit_is_refused_before_it_is_read(tree, monkeypatch):
    source = from_folders(tree, validation_share=1e-12)
    monkeypatch.setattr(cache, "free_bytes", lambda: 2000)
    monkeypatch.setattr(cache, "files_in_memory", lambda source: pytest.fail("read"))
    with pytest.raises(UserError, match="data.cache=files: .* takes about .* use data.cache=none"):
        _hold(source, "files")
    with pytest.raises(UserError, match="data.cache=pixels: .* use data.cache=files or none"):
        _hold(source, "pixels")
    with pytest.raises(UserError, match="data.crop=inception cuts them from the files: use data.cache=files"):
        _hold(source, "pixels", "inception")


def test_free_memory_is_a_number_here():
    free = cache.free_bytes()
    assert free is None or 2**20 < free < 2**50
