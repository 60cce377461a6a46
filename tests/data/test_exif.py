import io
import logging

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from vit_tpu import config as configs
from vit_tpu.data import exif
from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.folders import from_folders
from vit_tpu.training import inputs


def _save(path, orientation, kind="JPEG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.zeros((4, 8, 3), np.uint8)
    values[:2] = 255  # stored: the upper half is white
    info = Image.Exif()
    if orientation:
        info[0x0112] = orientation
    out = io.BytesIO()
    Image.fromarray(values).save(out, kind, exif=info, **({"lossless": True} if kind == "WEBP" else {}))
    path.write_bytes(out.getvalue())


@pytest.fixture
def tree(tmp_path):
    for split in ("train", "test"):
        for i, (orientation, kind) in enumerate([(0, "JPEG"), (1, "JPEG"), (3, "JPEG"), (6, "PNG"), (8, "WEBP")]):
            _save(tmp_path / split / "ab"[i % 2] / f"{i}.img", orientation, kind)
    (tmp_path / "train/a/broken.img").write_bytes(b"\xff\xd8\xffExif")
    return tmp_path


def test_turned_files_of_every_kind_are_counted(tree):
    source = from_folders(tree)
    assert exif.count_turned(source) == (3, 6)
    assert exif.count_turned(source, limit=2)[1] == 2
    assert exif.count_turned(from_arrays(np.zeros((2, 4, 4, 1), np.uint8), np.arange(2))) == (0, 0)


def test_the_sentence_says_how_they_are_read(tree):
    source = from_folders(tree)
    assert "3 of 6 files carry an EXIF orientation and are read as stored" in exif.sentence(source, "ignore")
    assert "data.exif=apply turns them upright" in exif.sentence(source, "ignore")
    assert "are turned upright (data.exif=apply)" in exif.sentence(source, "apply")
    assert "files looked at (evenly spread)" in exif.sentence(source, "ignore", limit=5)
    for path in tree.glob("train/*/[234].img"):
        path.unlink()
    assert exif.sentence(from_folders(tree), "ignore") == ""


@pytest.mark.parametrize("option, upper", [("ignore", 1.0), ("apply", -1.0)])
def test_the_config_key_reaches_the_pixels_and_is_said_once(tree, capsys, option, upper):
    plain = {"data.source": "folder", "data.path": str(tree), "data.mixup": 0.0, "data.exif": option,
             "model.image_size": 8, "data.max_broken": 1}  # fmt: skip
    config = configs.load_config(None, plain)
    source = inputs.open_source(config, "train")
    with_pixels = inputs.ready(config, source, inputs.budget(config, source))
    assert capsys.readouterr().out.count("carry an EXIF orientation") == 1
    turned = next(i for i in range(with_pixels.num_examples) if with_pixels.name_of(i) == "a/2.img")
    image = with_pixels.get(tf.constant(turned, tf.int64))["image"].numpy() / 127.5 - 1
    assert image[1, 4].mean() == pytest.approx(upper, abs=0.05)


def test_the_report_of_broken_records_names_each_with_its_reason(caplog):
    broken = BrokenRecords(30)
    assert broken.report() == ""
    with caplog.at_level(logging.WARNING, logger="absl"):
        for i in range(22):
            broken.add(f"{i}.jpg", "the file is empty")
            broken.add(f"{i}.jpg", "the file is empty")
    text = broken.report()
    assert text.startswith("22 unreadable records were skipped: 0.jpg (the file is empty); 1.jpg")
    assert text.endswith("19.jpg (the file is empty); and 2 more") and "\n" not in text
