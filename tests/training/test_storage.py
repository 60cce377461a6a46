"""Files on disk and in a store without rename: whole or not at all."""

import os

import pytest
import tensorflow as tf

from vit_tpu.training import storage


@pytest.fixture(params=["disk", "store"])
def root(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path / "root")
    return f"ram://{tmp_path.name}-{os.getpid()}/root"


def test_files_and_folders_behave_alike_on_disk_and_in_a_store(root):
    assert storage.names(root) == [] and not storage.exists(root)
    storage.make_folder(storage.join(root, "a"))
    storage.write_text(storage.join(root, "a", "x"), "one")
    storage.write_text(storage.join(root, "a", "x"), "two")
    storage.append_text(storage.join(root, "a", "x"), "+")
    storage.append_text(storage.join(root, "a", "new"), "line")
    assert storage.names(storage.join(root, "a")) == ["new", "x"]
    assert storage.read_text(storage.join(root, "a", "x")) == "two+"
    assert storage.size(storage.join(root, "a", "x")) == 4
    with storage.writing(storage.join(root, "b")) as file:
        file.write(memoryview(b"abc"))
    with storage.reading(storage.join(root, "b")) as file:
        assert file.read(2) == b"ab" and file.read(9) == b"c" and file.read(9) == b""
    storage.remove(storage.join(root, "a"))
    storage.remove(storage.join(root, "not there"))
    assert storage.names(root) == ["b"] and storage.is_folder(root)


def test_local_folder_appears_whole_and_replaces_the_old_one(tmp_path):
    target = str(tmp_path / "00000001")
    for content in ("old", "new"):
        place = storage.begin(target)
        assert place != target
        storage.write_text(storage.join(place, "f"), content)
        before = storage.names(target)
        storage.commit(place, target)
        assert before == ([] if content == "old" else ["f"])
        assert storage.read_text(storage.join(target, "f")) == content
    assert os.listdir(tmp_path) == ["00000001"]


def test_what_is_written_reaches_the_disk_before_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    storage.write_text(str(tmp_path / "f"), "x")
    assert calls == ["fsync", "rename"]


def test_store_is_never_asked_to_rename(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("rename in a store")

    monkeypatch.setattr(tf.io.gfile, "rename", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    target = f"ram://{tmp_path.name}-{os.getpid()}/norename/00000003"
    place = storage.begin(target)
    storage.write_text(storage.join(place, "f"), "x")
    storage.commit(place, target)
    assert storage.read_text(storage.join(target, "f")) == "x"


def test_leftovers_are_found(tmp_path):
    for name in (".00000009.17.tmp", ".00000009.17.tmp.old", "00000001", ".lock"):
        (tmp_path / name).mkdir()
    assert storage.leftovers(str(tmp_path)) == [".00000009.17.tmp", ".00000009.17.tmp.old"]
