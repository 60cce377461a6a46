import builtins

import pytest
import tensorflow as tf
from shard_files import array_record, example, imagenet, picture, shards

from vit_tpu.data import array_records
from vit_tpu.data.array_records import from_array_records
from vit_tpu.data.examples import Keys
from vit_tpu.errors import UserError

LABELS = [0, 2, 1, 1, 0, 2, 0]


@pytest.fixture
def folder(tmp_path):
    shards(tmp_path, array_record, [imagenet(i, n) for i, n in enumerate(LABELS)], 3, "x-train.array_record")
    return shards(tmp_path, array_record, [imagenet(0, 1), imagenet(1, 0)], 1, "x-test.array_record")


def test_any_record_of_any_file_is_read_by_its_number(folder):
    source = from_array_records(folder)
    assert source.labels.tolist() == LABELS and source.num_classes == 3 and source.encoded
    dataset = tf.data.Dataset.range(7).map(lambda i: source.get(6 - i), num_parallel_calls=4)
    for k, record in enumerate(dataset.as_numpy_iterator()):
        i = 6 - k
        assert record["image"] == picture(i) and record["label"] == LABELS[i]
        assert record["id"].decode() == source.name_of(i)
    assert source.name_of(6) == "x-train.array_record-00002-of-00003#2"
    assert from_array_records(folder, "validation").labels.tolist() == [1, 0]


def test_many_files_are_read_with_few_open(folder, monkeypatch):
    monkeypatch.setattr(array_records, "_OPEN", 1)
    source = from_array_records(folder)
    assert [source.get(tf.constant(i, tf.int64))["image"].numpy() for i in (6, 0, 3)] == [
        picture(6),
        picture(0),
        picture(3),
    ]


def test_own_keys_and_a_hashed_split(tmp_path):
    array_record(tmp_path / "a.array_record", [example(pic=picture(i), y=1 + i % 2) for i in range(30)])
    parts = [from_array_records(tmp_path, split, keys=Keys("pic", "y"), label_offset=-1, validation_share=0.2)
             for split in ("train", "validation")]  # fmt: skip
    ids = [part.name_of(i) for part in parts for i in range(part.num_examples)]
    assert sorted(ids, key=lambda name: int(name.partition("#")[2])) == [f"a.array_record#{i}" for i in range(30)]
    for part in parts:
        record = part.get(tf.constant(2, tf.int64))
        position = int(part.name_of(2).partition("#")[2])
        assert record["image"].numpy() == picture(position) and int(record["label"]) == position % 2


def test_wrong_files_are_one_line_of_error(tmp_path):
    (tmp_path / "a.array_record").write_bytes(b"not records" * 20_000)
    with pytest.raises(UserError, match="a.array_record is not an ArrayRecord file") as error:
        from_array_records(tmp_path)
    assert "\n" not in str(error.value)
    array_record(tmp_path / "a.array_record", [imagenet(i, 0) for i in range(9)])
    data = (tmp_path / "a.array_record").read_bytes()
    (tmp_path / "a.array_record").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="a.array_record holds no images, or was cut short"):
        from_array_records(tmp_path)
    (tmp_path / "a.array_record").write_bytes(data[:400] + bytes([data[400] ^ 1]) + data[401:])
    with pytest.raises(UserError, match="a.array_record is damaged .*hash mismatch.*: copy it again"):
        from_array_records(tmp_path)
    array_record(tmp_path / "a.array_record", [example(image=picture(0), label=1)])
    with pytest.raises(UserError, match=r'a.array_record#0 has no image .*"image/encoded".*it has image, label'):
        from_array_records(tmp_path)
    array_record(tmp_path / "b.array_record", [])
    with pytest.raises(UserError, match="b.array_record holds no images"):
        from_array_records(tmp_path, keys=Keys("image", "label"))


def test_remote_files_and_a_missing_package_are_refused(folder, monkeypatch):
    tf.io.gfile.makedirs("ram://arrays")
    tf.io.gfile.copy(str(folder / "x-test.array_record-00000-of-00001"), "ram://arrays/train-00000-of-00001", True)
    with pytest.raises(
        UserError, match="ram://arrays/train-00000-of-00001: ArrayRecord files are read from local disks"
    ):
        from_array_records("ram://arrays")
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("array_record"):
            raise ImportError("No module named 'array_record'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"need array_record .*pip install 'vit_tpu\[data\]'"):
        from_array_records(folder)
