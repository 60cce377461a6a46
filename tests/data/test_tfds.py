import builtins
import json

import numpy as np
import pytest
import tensorflow as tf
from shard_files import picture, tfds_folder

from vit_tpu.data.tfds import from_tfds
from vit_tpu.errors import UserError


@pytest.fixture(params=["tfrecord", "array_record"])
def root(request, tmp_path):
    tfds_folder(tmp_path, {"train": 11, "test": 4}, request.param)
    return tmp_path


def test_splits_names_and_encoded_images_come_through(root):
    train, test = from_tfds(root, "insects"), from_tfds(root, "insects", "validation")
    assert (train.num_examples, test.num_examples) == (11, 4)
    assert train.class_names == test.class_names == ("ant", "bee", "cow")
    assert train.labels.tolist() == [i % 3 for i in range(11)]
    assert train.name == "insects/1.0.0/train" and test.name == "insects/1.0.0/test"
    for i in (10, 0, 5, 6):
        assert train.get(tf.constant(i, tf.int64))["image"].numpy() == picture(i)


def test_the_records_are_those_of_tfds_itself(root):
    tfds = pytest.importorskip("tensorflow_datasets")
    builder = tfds.builder_from_directory(str(root / "insects/1.0.0"))
    source = from_tfds(root, "insects", train_name="train[30%:]+test[:50%]")
    if builder.info.file_format.value == "tfrecord":
        skip = {"image": tfds.decode.SkipDecoding()}
        config = tfds.ReadConfig(interleave_cycle_length=1)
        own = list(tfds.as_numpy(builder.as_dataset("train[30%:]+test[:50%]", decoders=skip, read_config=config)))
        expected = [(row["image"], row["label"]) for row in own]
    else:
        own = list(builder.as_data_source("train[30%:]")) + list(builder.as_data_source("test[:50%]"))
        expected = [(row["image"], row["label"]) for row in own]
    assert source.num_examples == len(expected) == 10
    for i, (image, label) in enumerate(expected):
        record = source.get(tf.constant(i, tf.int64))
        found = record["image"].numpy()
        if not isinstance(image, bytes):
            found = tf.io.decode_png(found).numpy()
        np.testing.assert_array_equal(found, image)
        assert int(record["label"]) == label


def test_parts_of_splits_and_a_hashed_validation(root, tmp_path):
    first = from_tfds(root, "insects", train_name="train[:6]", validation_name="train[6:]")
    second = from_tfds(root, "insects", "validation", train_name="train[:6]", validation_name="train[6:]")
    ids = [s.name_of(i) for s in (first, second) for i in range(s.num_examples)]
    assert len(set(ids)) == len(ids) == 11
    alone = tfds_folder(tmp_path / "alone", {"train": 30})
    parts = [from_tfds(alone, None, split) for split in ("train", "validation")]
    assert parts[0].num_examples + parts[1].num_examples == 30 and parts[1].num_examples > 0
    assert "by hash" in parts[1].name


def test_splits_that_share_records_are_told(tmp_path, caplog):
    root = tfds_folder(tmp_path, {"train": 9, "test": 3}, count=3)
    with caplog.at_level("WARNING", logger="absl"):
        from_tfds(root, None, "validation", train_name="train[:6]", validation_name="train[6:]+test")
        from_tfds(root, None, "validation")
        assert not caplog.text
        from_tfds(root, None, "validation", train_name="train[:6]", validation_name="train[5:]")
    assert "train[:6] and train[5:] share records" in caplog.text


def test_the_newest_version_and_an_only_configuration_are_found(tmp_path):
    folder = tfds_folder(tmp_path, {"train": 3, "test": 3})
    info = json.loads((folder / "dataset_info.json").read_text())
    for version in ("1.9.0", "1.10.0"):  # 1.10.0 is the newer one
        newer = tmp_path / "insects" / version
        newer.mkdir()
        for path in folder.iterdir():
            (newer / path.name).write_bytes(path.read_bytes())
        (newer / "dataset_info.json").write_text(json.dumps(info | {"version": version}))
    (tmp_path / "insects" / "1.11.0").mkdir()  # begun, not finished
    assert from_tfds(tmp_path, "insects").name == "insects/1.10.0/train"
    assert from_tfds(tmp_path, "insects:1.0.0").name == "insects/1.0.0/train"
    assert from_tfds(newer).num_examples == 3
    (tmp_path / "beetles").mkdir()
    (tmp_path / "insects").rename(tmp_path / "beetles" / "plain")
    assert from_tfds(tmp_path, "beetles").num_examples == 3
    assert from_tfds(tmp_path, "beetles/plain:1.0.0").num_examples == 3


def test_not_prepared_names_the_command_that_prepares_it(root):
    with pytest.raises(UserError, match="tfds build cifar10 --data_dir=") as error:
        from_tfds(root, "cifar10")
    assert f'"cifar10" is not prepared in {root}' in str(error.value) and "insects" in str(error.value)
    with pytest.raises(UserError, match=r'did you mean "insects".*tfds build insect '):
        from_tfds(root, "insect")
    with pytest.raises(UserError, match="has versions 1.0.0: tfds build insects:2.0.0 --data_dir"):
        from_tfds(root, "insects:2.0.0")
    with pytest.raises(UserError, match="set data.name to one of insects"):
        from_tfds(root)
    with pytest.raises(UserError, match="is not prepared in .*nowhere, which has nothing"):
        from_tfds(root / "nowhere", "insects")


def test_the_default_place_is_the_one_of_tfds(tmp_path, monkeypatch):
    tfds_folder(tmp_path, {"train": 3, "test": 3})
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert from_tfds(None, "insects").num_examples == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train_name": "trian"}, r'data.split: insects/1.0.0 has no split "trian" \(did you mean "train"\?\); it has'),
        ({"train_name": "train[:x]"}, r'"train\[:x\]" is not a split of insects/1.0.0'),
        ({"train_name": "train[5:5]"}, r'the split "train\[5:5\]" is empty'),
        ({"image_key": "picture"}, 'data.image_key: .* has no feature "picture".*it has .*image'),
        ({"image_key": "id"}, '"id" is Text, not an image'),
        ({"multi_label": True}, "no label features .*: choose one with data.label_key"),
        ({"names": ("a", "b")}, r"names 2 classes, but insects/1.0.0 has 3 \(ant, bee, cow, ...\)"),
        ({"label_key": "id"}, 'labels are words such as "train_0": set data.class_names'),
    ],
)
def test_wrong_options_are_one_line_of_error(root, options, message):
    with pytest.raises(UserError, match=message) as error:
        from_tfds(root, "insects", **options)
    assert "\n" not in str(error.value)


def test_an_empty_split_and_incomplete_copies_are_named(tmp_path):
    folder = tfds_folder(tmp_path, {"train": 6, "test": 0}, count=1)
    with pytest.raises(UserError, match='insects/1.0.0: the split "test" is empty'):
        from_tfds(tmp_path, "insects", "validation")
    shard = next(folder.glob("*train*"))
    shard.rename(tmp_path / "away")
    with pytest.raises(UserError, match="train.tfrecord-00000-of-00001 is missing: prepare the dataset again"):
        from_tfds(tmp_path, "insects")
    data = (tmp_path / "away").read_bytes()
    length = int.from_bytes(data[:8], "little") + 16
    shard.write_bytes(data[:length])
    with pytest.raises(UserError, match="holds 1 records, insects/1.0.0 announces 6"):
        from_tfds(tmp_path, "insects")
    (folder / "features.json").write_text("{")
    with pytest.raises(UserError, match="is not a readable TensorFlow Datasets folder"):
        from_tfds(tmp_path, "insects")


def test_a_missing_package_is_named(root, monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "tensorflow_datasets":
            raise ImportError("No module named 'importlib_resources'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"importlib_resources'\): pip install 'vit_tpu\[data\]'"):
        from_tfds(root, "insects")
