"""The command line over a folder that holds every file that breaks decoders."""

import io
import json
import pathlib
import re

import pytest
from PIL import Image

from vit_tpu import train

HARD = pathlib.Path(__file__).parent / "hard_images"
# Refused by decoding, and why; the other files have their pixels (test_decode.py).
REFUSED = {
    "avif.avif": "AVIF is not supported",
    "empty.jpg": "the file is empty",
    "gif_bomb.gif": "decompression bomb",
    "half.jpg": "the JPEG is truncated or damaged",
    "page.jpg": "it is a text page",
    "png_broken.png": "the PNG header is damaged",
    "png_truncated_end_chunk.png": "the PNG is truncated or damaged",
    "progressive_truncated.jpg": "the JPEG is truncated or damaged",
    "tiff.jpg": "TIFF is not supported",
}


@pytest.fixture
def tree(tmp_path):
    files = [path for path in HARD.iterdir() if path.suffix not in (".md", ".Pillow", ".IJG")]
    tiff = io.BytesIO()
    Image.new("RGB", (4, 4)).save(tiff, "TIFF")
    made = {
        "empty.jpg": b"", "page.jpg": b"<html>404</html>", "tiff.jpg": tiff.getvalue(),
        "half.jpg": (HARD / "baseline.jpg").read_bytes()[:3000], "png.jpg": (HARD / "png_rgba.png").read_bytes(),
    }  # fmt: skip
    contents = {path.name: path.read_bytes() for path in files} | made
    for i, name in enumerate(sorted(contents)):
        path = tmp_path / "tree/train" / "ab"[i % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name])
    for label in "ab":
        path = tmp_path / "tree/val" / label / "gray.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(contents["gray.jpg"])
    return tmp_path / "tree"


def _arguments(tree, *more):
    return ["--set=data.source=folder", f"--set=data.path={tree}", "--set=data.crop=inception", "--set=data.mixup=0",
            "--set=width=16", "--set=depth=1", "--set=mlp_dim=32", "--set=num_heads=2", "--batch_size=11", "--steps=3",
            "--steps_per_execution=1", "--nojit", *more]  # fmt: skip


def test_a_run_over_all_hard_images_finishes_and_names_the_broken_ones(tree, tmp_path, capfd, caplog):
    with caplog.at_level("WARNING", logger="absl"):
        arguments = _arguments(tree, f"--set=data.max_broken={len(REFUSED)}", f"--workdir={tmp_path / 'run'}")
        assert train.main(arguments) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "done" and summary["validation"]["count"] == 2
    said = dict(re.findall(r"Skipped [ab]/(\S+): ([^\n]*)\.", caplog.text))
    assert set(said) == set(REFUSED)
    for name, reason in REFUSED.items():
        assert reason in said[name]
    assert "3 of 33 files carry an EXIF orientation and are read as stored" in capfd.readouterr().out


def test_one_more_broken_file_than_allowed_stops_the_run_with_the_list(tree, tmp_path, capfd):
    arguments = _arguments(tree, f"--set=data.max_broken={len(REFUSED) - 1}", f"--workdir={tmp_path / 'run'}")
    assert train.main(arguments) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"{len(REFUSED)} unreadable records, {len(REFUSED) - 1} allowed" in error
    assert all(name in error for name in REFUSED)
