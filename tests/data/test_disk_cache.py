"""Encoded files copied to a local disk: the same batches, found again, nothing half-written."""

import collections
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from vit_tpu.config import load_config
from vit_tpu.data import cache, disk_cache
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.folders import from_folders
from vit_tpu.data.pipeline import eval_pipeline
from vit_tpu.errors import UserError


@pytest.fixture
def tree(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(8):
        folder = tmp_path / "images" / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10 + i, 12, 3), np.uint8)).save(folder / str(i), "PNG")
    return tmp_path / "images"


def source_of(tree):
    return from_folders(tree, validation_share=1e-12)


def hold(tree, folder):
    return cache.hold(source_of(tree), "disk", 8, channels=3, crop="inception", folder=str(folder))


def pictures(source, budget=0):
    broken = BrokenRecords(budget)
    found = [batch for batch in eval_pipeline(source, batch_size=4, image_size=8, broken=broken)]
    return np.concatenate([b[0] for b in found]), np.concatenate([b[2] for b in found]), broken


def test_the_copy_gives_the_same_pictures_and_outlives_the_files(tree, tmp_path):
    wanted, _, _ = pictures(source_of(tree))
    held, sentence = hold(tree, tmp_path / "cache")
    assert "copied" in sentence and held.name_of(3) == source_of(tree).name_of(3)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # the records and their index, nothing else
    for file in tree.glob("train/*/*"):
        file.write_bytes(b"")
    found, weights, _ = pictures(held)
    np.testing.assert_array_equal(found, wanted)
    assert weights.sum() == 8
    assert held.get(tf.constant(2, tf.int64))["id"].numpy().decode() == held.name_of(2)


def test_a_later_run_uses_it_again_and_other_data_do_not(tree, tmp_path):
    hold(tree, tmp_path / "cache")
    stamp = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    _, sentence = hold(tree, tmp_path / "cache")
    assert "read from" in sentence
    assert stamp == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    Image.new("RGB", (8, 8)).save(tree / "train" / "a" / "more", "PNG")
    _, sentence = hold(tree, tmp_path / "cache")
    assert "copied" in sentence and len(list((tmp_path / "cache").iterdir())) == 4


def test_a_copy_cut_short_is_made_again(tree, tmp_path):
    wanted, _, _ = pictures(source_of(tree))
    hold(tree, tmp_path / "cache")
    records = next((tmp_path / "cache").glob("*.tfrecord"))
    records.write_bytes(records.read_bytes()[:-7])
    held, sentence = hold(tree, tmp_path / "cache")
    assert "copied" in sentence
    np.testing.assert_array_equal(pictures(held)[0], wanted)


def test_an_unreadable_file_is_reported_by_the_pipeline(tree, tmp_path):
    (tree / "train" / "a" / "4").unlink()
    (tree / "train" / "a" / "4").symlink_to(tmp_path / "gone")
    _, weights, broken = pictures(hold(tree, tmp_path / "cache")[0], budget=1)
    assert weights.sum() == 7 and list(broken.reasons) == ["a/4"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tree, tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 0, 1000))
    with pytest.raises(UserError, match="takes about .* MiB and .* has 0.0 MiB free"):
        hold(tree, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tree, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.np, "savez", full)
    with pytest.raises(UserError, match="cannot be written to .No space left on device."):
        hold(tree, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_wrong_places_are_named(tree, tmp_path):
    with pytest.raises(UserError, match="is not on a local disk"):
        hold(tree, "gs://bucket/cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        hold(tree, tmp_path / "file")
    for override in ("data.cache=disk", "data.cache_dir=/tmp/x"):
        with pytest.raises(UserError, match="belong together"):
            load_config(None, [override])
