"""Which files names stand for, and what of them cannot be read."""

import io

import pytest
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.evaluation import files


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "in/b.jpg",
        "in/a.PNG",
        "in/deep/c.webp",
        "in/notes.txt",
        "in/.hidden.jpg",
        "one file.jpg",
        "x[1].png",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return tmp_path


def test_a_folder_gives_the_images_below_and_names_the_rest(tree):
    found, notes = files.collect(["in"])
    assert found == ["in/a.PNG", "in/b.jpg", "in/deep/c.webp"]
    assert notes == ["in: 1 file(s) without an image's ending left out (notes.txt)"]


def test_globs_and_plain_names_keep_their_order(tree):
    assert files.collect(["one file.jpg", "in/**/*.*g", "in/b.jpg"])[0] == ["one file.jpg", "in/b.jpg", "in/b.jpg"]
    assert files.collect(["in/**/*.webp"])[0] == ["in/deep/c.webp"]
    assert files.collect(["x[1].png"])[0] == ["x[1].png"]  # a name that exists is no pattern


def test_standard_input_gives_a_name_a_line(tree):
    lines = io.StringIO("one file.jpg\n\nmissing.jpg\nin/b.jpg")
    assert files.collect(["-"], lines)[0] == ["one file.jpg", "missing.jpg", "in/b.jpg"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "no images: name files"),
        (["*.gif"], 'no image matches "\\*.gif"'),
        (["i*"], "matches folders only"),
        (["one fil.jpg"], 'there is no file one fil.jpg \\(did you mean "one file.jpg"'),
        (["no.jpg", "nope.jpg"], "nor any of the other 1"),
        (["-"], "no images"),
    ],
)
def test_nothing_to_do_is_an_error(tree, named, message):
    with pytest.raises(UserError, match=message):
        files.collect(named, io.StringIO(""))


def test_a_folder_without_images_is_an_error(tree):
    (tree / "empty").mkdir()
    with pytest.raises(UserError, match="folder empty holds no images"):
        files.collect(["empty"])


def test_unreadable_files_have_reasons(tree):
    found = files.Unreadable()
    found.add("in", "x")
    found.add("gone.jpg", "x")
    found.add("in/b.jpg", "the file is empty")
    assert list(found.reasons.values()) == ["it is a folder", "there is no such file", "the file is empty"]


def test_a_source_of_files_reads_them(tree):
    (tree / "one file.jpg").write_bytes(b"abc")
    source = files.source_of(["in/b.jpg", "one file.jpg"])
    assert source.num_examples == 2 and source.encoded and source.name_of(1) == "one file.jpg"
    assert source.get(tf.constant(1, tf.int64))["image"].numpy() == b"abc"
