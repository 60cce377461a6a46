"""From config keys to a source: what is refused before anything starts, and with which words."""

import numpy as np
import pytest
import tensorflow as tf
from shard_files import imagenet, shards, tfds_folder, tfrecord

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.training import inputs


def _config(**data):
    plain = {"data.mixup": 0.0, "model.num_classes": data.pop("num_classes", None)}
    plain["training.loss"] = data.pop("loss", "softmax")
    return configs.load_config(None, plain | {f"data.{key}": value for key, value in data.items()})


@pytest.mark.parametrize(
    "data, message",
    [
        ({"source": "tfrecords"}, r'data.source is "tfrecords" \(did you mean "tfrecord"\?\); choose one of'),
        ({"source": "tfrecord"}, "data.source=tfrecord needs data.path"),
        ({"source": "array_record"}, "data.source=array_record needs data.path"),
        ({"source": "manifest"}, "data.source=manifest needs data.path"),
        ({"source": "tfds"}, "data.source=tfds needs data.name, such as cifar10"),
        ({"source": "folder", "path": "x", "split": "train"}, "data.split means nothing to data.source=folder"),
        ({"source": "digits", "name": "cifar10"}, "data.name means nothing to data.source=digits, only to tfds"),
        (
            {"source": "folder", "path": "x", "label_offset": -1},
            "data.label_offset means nothing to data.source=folder",
        ),
        ({"source": "manifest", "path": "x", "multi_label": True}, "which need training.loss=sigmoid"),
        ({"exif": "warn"}, 'data.exif is "warn"; choose one of ignore, apply'),
        ({"background": (0, 0, 256)}, r"data.background is \(0, 0, 256\): give red, green and blue from 0 to 255"),
        ({"label_key": "y"}, "data.label_key means nothing to data.source=digits"),
    ],
)
def test_keys_that_cannot_work_are_refused(data, message):
    with pytest.raises(UserError, match=message) as error:
        _config(**data)
    assert "\n" not in str(error.value)


def _imagenet(root, labels):
    shards(root, tfrecord, [imagenet(i, n) for i, n in enumerate(labels)], 2, "train")
    shards(root, tfrecord, [imagenet(i, n) for i, n in enumerate(labels)], 1, "validation")
    return {"source": "tfrecord", "path": str(root)}


def test_labels_that_count_from_one_get_the_hint(tmp_path):
    data = _imagenet(tmp_path, [1, 2, 3, 3])
    with pytest.raises(
        UserError, match="labels run from 1 to 3 and none is 0: set data.label_offset=-1, or model.num_cl"
    ):
        inputs.open_source(_config(**data), "train")
    config = _config(**data, num_classes=3)
    with pytest.raises(UserError, match=r"train-00001-of-00002#0 has label 3.*numbered 1..3, set data.label_offset=-1"):
        inputs.num_classes(config, inputs.open_source(config, "train"))
    config = _config(**data, label_offset=-1)
    assert inputs.num_classes(config, inputs.open_source(config, "train")) == 3
    assert inputs.open_source(config, "validation").labels.tolist() == [0, 1, 2, 2]
    config = _config(**data, num_classes=4)  # asked for: class 0 stays empty
    assert inputs.num_classes(config, inputs.open_source(config, "train")) == 4


def test_a_label_of_the_validation_data_beyond_the_head_is_refused(tmp_path):
    """Without data.class_names each file only shows its own labels."""
    images = np.zeros((4, 6, 6, 3), np.uint8)
    np.savez(tmp_path / "d.npz", x_train=images, y_train=[0, 1, 2, 1], x_test=images, y_test=[0, 1, 2, 5])
    config = _config(source="npz", path=str(tmp_path / "d.npz"))
    head = inputs.num_classes(config, inputs.open_source(config, "train"))
    with pytest.raises(UserError, match="d/validation/3 has label 5, but the head has 3 classes"):
        inputs.num_classes(config, inputs.open_source(config, "validation"), head)


def test_labels_of_npz_files_count_from_one_too(tmp_path):
    np.savez(tmp_path / "d.npz", x_train=np.zeros((4, 2, 2), np.uint8), y_train=[1, 2, 1, 2],
             x_test=np.zeros((1, 2, 2), np.uint8), y_test=[2])  # fmt: skip
    data = {"source": "npz", "path": str(tmp_path / "d.npz")}
    with pytest.raises(UserError, match="d/train: labels run from 1 to 2 and none is 0: set data.label_offset=-1"):
        inputs.open_source(_config(**data), "train")
    assert inputs.open_source(_config(**data, label_offset=-1), "train").labels.tolist() == [0, 1, 0, 1]


def test_a_class_names_file_that_does_not_match_is_refused_with_both_counts(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("a\nb\n")
    with pytest.raises(
        UserError, match=r"names.txt names 2 classes, but digits/train has 10 \(labels run from 0 to 9\)"
    ):
        inputs.open_source(_config(class_names=str(names)), "train")
    data = _imagenet(tmp_path / "r", [0, 1, 2])
    with pytest.raises(
        UserError, match=r"r/train-\*-of-00002 \(2 shards\) has 3 classes .*#1 has 2\), but there are 2 class"
    ):
        inputs.open_source(_config(**data, class_names=str(names)), "train")
    tfds_folder(tmp_path, {"train": 6, "test": 3})
    data = {"source": "tfds", "path": str(tmp_path), "name": "insects"}
    with pytest.raises(UserError, match=r"names 2 classes, but insects/1.0.0 has 3 \(ant, bee, cow"):
        inputs.open_source(_config(**data, class_names=str(names)), "train")
    names.write_text("cow\nbee\nant\n")
    source = inputs.open_source(_config(**data, class_names=str(names)), "train")
    assert source.class_names == ("cow", "bee", "ant") and source.labels.tolist() == [2, 1, 0, 2, 1, 0]


def test_keys_reach_their_source(tmp_path):
    (tmp_path / "list.csv").write_text("file,y,split\na.png,cat;dog,a\nb.png,cat,b\n")
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(b"x")
    config = _config(
        source="manifest", path=str(tmp_path / "list.csv"), image_key="file", label_key="y", split="b",
        validation_split="a", multi_label=True, loss="sigmoid",
    )  # fmt: skip
    assert inputs.open_source(config, "train").labels.tolist() == [[1, 0]]
    assert inputs.open_source(config, "validation").labels.tolist() == [[1, 1]]
    options = inputs.decode_options(_config(exif="apply", background=(1, 2, 3)))
    assert options.exif == "apply" and options.background == (1, 2, 3)


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").write_bytes(b"x")
    config = _config(source="folder", path=str(tmp_path))
    import os

    original = os.scandir

    def refuse(path):
        if str(path).endswith("train/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        UserError, match=r"folder .*train/b cannot be read \(Permission denied\): check its access rights"
    ):
        inputs.open_source(config, "train")
    monkeypatch.undo()

    def deny(path):
        raise tf.errors.PermissionDeniedError(None, None, f"{path};\n\tPermission denied")

    monkeypatch.setattr(tf.io.gfile, "listdir", deny)
    with pytest.raises(UserError, match="cannot be read .*Permission denied"):
        inputs.open_source(config, "train")
    with pytest.raises(UserError, match="cannot be read .*Permission denied") as error:
        inputs.open_source(_config(source="tfrecord", path=str(tmp_path)), "train")
    assert "\n" not in str(error.value)
