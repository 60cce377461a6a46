"""Checkpoint folders: verified, sharded, kept by a rule, on disk and in a store without rename."""

import errno
import json
import logging
import os
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from vit_tpu import UserError
from vit_tpu.training import arrays_file, checkpoints, storage
from vit_tpu.training.checkpoints import Keep

RNG = np.random.default_rng(0)
ARRAYS = {
    "parameters/head/kernel": (RNG.normal(size=(40, 3)).astype(np.float32), "float32"),
    "parameters/head/bias": (RNG.normal(size=3).astype(np.float32), "float32"),
    "optimizer/momentum/head/kernel": (np.arange(120, dtype=np.uint16).reshape(40, 3), "bfloat16"),
    "counters/steps": (np.array(7, np.int64), "int64"),
}


@pytest.fixture(params=["disk", "store"])
def root(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else f"ram://{tmp_path.name}-{os.getpid()}/checkpoints"


def flip(path, at=-1):
    data = bytearray(pathlib.Path(path).read_bytes())
    data[at] ^= 1
    pathlib.Path(path).write_bytes(data)


def same(found):
    got = {name: (array, dtype) for name, array, dtype in checkpoints.read(*found)}
    assert got.keys() == ARRAYS.keys()
    return all(
        np.array_equal(got[n][0], a) and got[n][0].shape == a.shape and got[n][1] == d for n, (a, d) in ARRAYS.items()
    )


def test_arrays_come_back_bit_for_bit(root):
    path = checkpoints.write(root, 7, ARRAYS, {"note": "x"})
    found = checkpoints.newest(root)
    assert found[0] == path and found[1]["step"] == 7 and found[1]["note"] == "x"
    assert same(found)


def test_weights_can_be_read_by_others(tmp_path):
    path = checkpoints.write(str(tmp_path), 7, ARRAYS, {})
    loaded = load_file(f"{path}/model.safetensors")
    assert sorted(loaded) == ["head/bias", "head/kernel"]
    np.testing.assert_array_equal(loaded["head/kernel"], ARRAYS["parameters/head/kernel"][0])


def test_large_states_go_into_several_files_of_bounded_size(root):
    path = checkpoints.write(root, 7, ARRAYS, {}, shard_bytes=480)
    names = storage.names(path)
    assert "model-00001-of-00002.safetensors" in names and "model.safetensors.index.json" in names
    assert same(checkpoints.newest(root))
    index = json.loads(storage.read_text(storage.join(path, "model.safetensors.index.json")))
    assert index["weight_map"] == {
        "head/kernel": "model-00001-of-00002.safetensors", "head/bias": "model-00002-of-00002.safetensors"
    }  # fmt: skip


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damaged_newest_is_passed_over_and_said_so(file, harm, tmp_path, caplog):
    for step in (1, 2):
        checkpoints.write(str(tmp_path), step, ARRAYS, {})
    victim = tmp_path / "00000002" / file
    if harm == "flip":
        flip(victim, victim.stat().st_size // 2)
    elif harm == "truncate":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        victim.unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest(str(tmp_path))[1]["step"] == 1
    assert "00000002 is damaged" in caplog.text and file in caplog.text


def test_every_byte_of_the_manifest_counts(tmp_path):
    path = checkpoints.write(str(tmp_path), 12, ARRAYS, {"rollbacks": 2})
    text = pathlib.Path(path, "manifest.json").read_text()
    for old, new in (('"step": 12', '"step": 13'), ('"rollbacks": 2', '"rollbacks": 3')):
        assert old in text
        pathlib.Path(path, "manifest.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match="checksum"):
            checkpoints.verified(path)


def test_store_without_rename_counts_a_checkpoint_only_once_its_manifest_is_there(tmp_path, monkeypatch):
    root = f"ram://{tmp_path.name}-{os.getpid()}/marker"
    checkpoints.write(root, 1, ARRAYS, {})
    seen = []
    original = storage.writing

    def spy(path):
        seen.append((os.path.basename(path), checkpoints.steps(root)))
        return original(path)

    monkeypatch.setattr(storage, "writing", spy)
    checkpoints.write(root, 2, ARRAYS, {})
    assert [name for name, _ in seen] == ["model.safetensors", "training.safetensors", "manifest.json"]
    assert all(steps == [1] for _, steps in seen) and checkpoints.steps(root) == [2, 1]
    seen.clear()
    checkpoints.write(root, 2, ARRAYS, {})  # again: the old one must not vouch for the new files
    assert all(steps == [1] for _, steps in seen)


def test_marker_of_an_old_checkpoint_in_a_store_goes_before_anything_else_of_it(tmp_path, monkeypatch):
    root = f"ram://{tmp_path.name}-{os.getpid()}/marker"
    checkpoints.write(root, 2, ARRAYS, {})

    def killed(target):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "begin", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(root, 2, ARRAYS, {})
    assert checkpoints.steps(root) == []


def test_half_written_folder_in_a_store_does_not_count_and_is_swept(tmp_path):
    root = f"ram://{tmp_path.name}-{os.getpid()}/half"
    checkpoints.write(root, 1, ARRAYS, {})
    storage.make_folder(storage.join(root, "00000002"))
    storage.write_text(storage.join(root, "00000002", "model.safetensors"), "x")
    assert checkpoints.newest(root)[1]["step"] == 1
    assert checkpoints.sweep(root) == 1 and storage.names(root) == ["00000001"]


def test_killed_writers_leftovers_are_swept(tmp_path):
    checkpoints.write(str(tmp_path), 1, ARRAYS, {})
    (tmp_path / ".00000002.99.tmp").mkdir()
    (tmp_path / ".00000002.99.tmp" / "model.safetensors").write_text("half")
    assert checkpoints.steps(str(tmp_path)) == [1]
    assert checkpoints.sweep(str(tmp_path)) == 1 and os.listdir(tmp_path) == ["00000001"]


def test_checkpoint_set_aside_by_a_writer_that_was_killed_comes_back(tmp_path):
    path = checkpoints.write(str(tmp_path), 1, ARRAYS, {})
    os.rename(path, tmp_path / ".00000001.99.tmp.old")
    (tmp_path / ".00000001.99.tmp").mkdir()
    checkpoints.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == ["00000001"] and same(checkpoints.newest(str(tmp_path)))


class FullDisk:
    """Takes so many bytes, then has no more room, as a file on a full disk."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, part):
        self.room -= len(part)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(part)


@pytest.mark.parametrize("room", [0, 700, 1000])
def test_full_disk_is_one_clear_error_and_the_former_checkpoint_stays(room, tmp_path, monkeypatch):
    checkpoints.write(str(tmp_path), 1, ARRAYS, {})
    original = storage.writing
    left = [room]

    class Writing:
        def __init__(self, path):
            self.inner = original(path)

        def __enter__(self):
            self.file = FullDisk(self.inner.__enter__(), left[0])
            return self.file

        def __exit__(self, *error):
            left[0] = self.file.room
            return self.inner.__exit__(*error)

    monkeypatch.setattr(storage, "writing", Writing)
    with pytest.raises(UserError, match=r"step 2 cannot be written to .*No space left on device.*free space"):
        checkpoints.write(str(tmp_path), 2, ARRAYS, {})
    assert os.listdir(tmp_path) == ["00000001"] and same(checkpoints.newest(str(tmp_path)))


def test_folder_that_cannot_be_written_to_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "makedirs", refuse)  # root may write everywhere: say no for it
    with pytest.raises(UserError, match="Permission denied.*another workdir"):
        checkpoints.write(str(tmp_path), 2, ARRAYS, {})


def test_error_of_a_store_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written to nosuch://"):
        checkpoints.write("nosuch://bucket/run", 2, ARRAYS, {})


@pytest.mark.parametrize("name", ["parameters/head/bias", "optimizer/momentum/head/kernel"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_state_that_is_not_finite_is_not_written(name, bad, tmp_path):
    array, dtype = ARRAYS[name]
    array = array.copy()
    array.flat[1] = 0x7F80 if dtype == "bfloat16" else bad
    with pytest.raises(FloatingPointError, match=name):
        checkpoints.write(str(tmp_path), 2, {**ARRAYS, name: (array, dtype)}, {})
    assert os.listdir(tmp_path) == []


def test_finite_values_whose_sum_overflows_are_written(tmp_path):
    huge = np.full(4, 3e38, np.float32)
    checkpoints.write(str(tmp_path), 2, {"ema/x": (huge, "float32")}, {})
    assert checkpoints.newest(str(tmp_path)) is not None


def test_abandoned_writer_leaves_nothing(root):
    checkpoints.write(root, 1, ARRAYS, {})
    asked = []

    def abandoned():
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(arrays_file.AbandonedError):
        checkpoints.write(root, 2, ARRAYS, {}, abandoned)
    assert storage.names(root) == ["00000001"]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (Keep(2, 0, False), 3, [9, 8]),
        (Keep(2, 0, True), 3, [9, 8, 3]),
        (Keep(1, 4, False), 3, [9, 8, 4]),
        (Keep(1, 4, True), 3, [9, 8, 4, 3]),
        (Keep(1, 0, True), None, [9]),
    ],
)
def test_newest_best_and_every_kth_are_kept(keep, best, left, root):
    for step in range(1, 10):
        storage.make_folder(storage.join(root, f"{step:08d}"))
        storage.write_text(storage.join(root, f"{step:08d}", "manifest.json"), "{}")
        checkpoints.prune(root, keep, step, best if best and best <= step else None)
    assert checkpoints.steps(root) == left


def test_later_checkpoints_do_not_push_out_those_of_the_run(tmp_path):
    for step in (2, 4, 9):  # 9 was damaged: the run went on from 4
        checkpoints.write(str(tmp_path), step, ARRAYS, {})
    checkpoints.write(str(tmp_path), 6, ARRAYS, {})
    checkpoints.prune(str(tmp_path), Keep(2, 0, False), 6)
    assert checkpoints.steps(str(tmp_path)) == [9, 6, 4]


def test_order_of_checkpoints_does_not_depend_on_the_clock(tmp_path):
    for step, when in ((3, 1_000_000_000), (5, 0), (4, 2_000_000_000)):
        path = checkpoints.write(str(tmp_path), step, ARRAYS, {})
        for name in (path, *(storage.join(path, n) for n in os.listdir(path))):
            os.utime(name, (when, when))
    assert checkpoints.newest(str(tmp_path))[1]["step"] == 5
    checkpoints.prune(str(tmp_path), Keep(2, 0, False), 5)
    assert checkpoints.steps(str(tmp_path)) == [5, 4]


def test_weights_alone_are_the_average_if_asked(root):
    arrays = {**ARRAYS, "ema/head/bias": (np.array([5, 6, 7], np.float32), "float32")}
    path = checkpoints.write_weights(root, 7, arrays, True, {"format": "pt"})
    got = dict(arrays_file.read(storage.join(path, "model.safetensors")))
    np.testing.assert_array_equal(got["head/bias"], [5, 6, 7])
    np.testing.assert_array_equal(got["head/kernel"], ARRAYS["parameters/head/kernel"][0])
    assert storage.names(path) == ["model.safetensors"]
