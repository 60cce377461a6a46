import json

import pytest
import tensorflow as tf
from shard_files import picture

from vit_tpu.data.manifests import from_manifest
from vit_tpu.errors import UserError

NAMES = ["cat", "dog", "cat", "ape"]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(40):
        (tmp_path / "images" / f"{i}.png").write_bytes(picture(i % 36))
    return tmp_path


def _csv(root, lines, name="list.csv"):
    path = root / name
    path.write_text("\n".join(lines) + "\n")
    return path


def _rows(labels, split=""):
    return [f"images/{i}.png,{label}{split}" for i, label in enumerate(labels)]


def _both(path, **options):
    return from_manifest(path, **options), from_manifest(path, "validation", **options)


def _ids(source):
    return [source.name_of(i) for i in range(source.num_examples)]


def test_a_split_column_decides(root):
    lines = ["image,label,split", *_rows(NAMES, ",train"), "images/7.png,dog,val", "images/8.png,cat,dev"]
    train, valid = _both(_csv(root, lines))
    assert train.class_names == valid.class_names == ("ape", "cat", "dog")
    assert train.labels.tolist() == [1, 2, 1, 0] and valid.labels.tolist() == [2]
    record = train.get(tf.constant(3, tf.int64))
    assert (
        record["image"].numpy() == picture(3) and record["id"].numpy() == b"images/3.png" and int(record["label"]) == 0
    )
    assert _ids(valid) == ["images/7.png"]
    assert _ids(from_manifest(root / "list.csv", "validation", validation_name="dev")) == ["images/8.png"]
    with pytest.raises(UserError, match='data.validation_split: .* has no split "test"'):
        from_manifest(root / "list.csv", validation_name="test")


def test_without_a_split_ids_are_dealt_out_for_good(root):
    lines = ["image,label", *_rows(range(40))]
    train, valid = _both(_csv(root, lines))
    assert sorted(_ids(train) + _ids(valid)) == sorted(f"images/{i}.png" for i in range(40))
    assert train.num_classes == valid.num_classes == 40
    reversed_list = _csv(root, [lines[0], *reversed(lines[1:])], "other.csv")
    assert set(_ids(from_manifest(reversed_list, "validation"))) == set(_ids(valid))
    one_split = _csv(root, ["image,label,split", *_rows(range(40), ",train")], "one.csv")
    assert _ids(from_manifest(one_split, "validation")) == _ids(valid)


def test_json_lines_with_lists_ids_and_own_keys(root):
    rows = [{"file": "images/0.png", "y": ["cat", "dog"], "id": 5},
            {"file": f"{root}/images/1.png", "y": [], "id": "b"},
            {"file": "images/2.png", "y": "dog"}]  # fmt: skip
    path = root / "list.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    source = from_manifest(
        path, image_key="file", label_key="y", multi_label=True, names=("ape", "cat", "dog"), validation_share=1e-9
    )
    assert source.labels.tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 1]]
    assert _ids(source) == ["5", "b", "images/2.png"]
    assert source.get(tf.constant(1, tf.int64))["image"].numpy() == picture(1)


def test_csv_with_several_labels(root):
    path = _csv(root, ["image,label", "images/0.png,cat;dog", "images/1.png,", "images/2.png, dog "])
    source = from_manifest(path, multi_label=True, validation_share=1e-9)
    assert source.class_names == ("cat", "dog")
    assert source.labels.tolist() == [[1, 1], [0, 0], [0, 1]]
    with pytest.raises(UserError, match=r"list.csv line 2 has 2 labels \(cat, dog\): set data.multi_label=true"):
        from_manifest(path)


def test_one_list_for_each_split_shares_the_class_names(root):
    _csv(root, ["image,label", *_rows(["b", "c"])], "train.csv")
    _csv(root, ["image\tlabel", "images/5.png\ta", "images/6.png\tc"], "test.csv")
    train, valid = _both(f"{root}/{{split}}.csv")
    assert train.class_names == valid.class_names == ("a", "b", "c")
    assert train.labels.tolist() == [1, 2] and valid.labels.tolist() == [0, 2]


def test_labels_by_number_with_an_offset_or_by_name_from_a_file(root):
    path = _csv(root, ["image,label", *_rows([1, 2, 3])])
    assert from_manifest(path, label_offset=-1, validation_share=1e-9).labels.tolist() == [0, 1, 2]
    path = _csv(root, ["image,label", *_rows(["dog", "1", "cat"])])
    source = from_manifest(path, names=("dog", "cat"), validation_share=1e-9)
    assert source.labels.tolist() == [0, 1, 1]  # a number counts where it is no name


@pytest.mark.parametrize(
    "lines, message",
    [
        (["image,lable", "images/0.png,1"], r'has no column "label" \(did you mean "lable"\?\); it has image, lable'),
        (["images/0.png,cat", "images/1.png,dog"], 'has no column "image" .*it has images/0.png, cat: .* first line'),
        (["image,label"], "lists no images"),
        (["image,label", "images/0.png,1,2"], "line 2 has 3 fields, the first line names 2"),
        (["image,label", "images/0.png"], "line 2 has 1 fields, the first line names 2"),
        (["image,label", "images/0.png,"], "line 2 has no label"),
        (["image,label", "images/none.png,1"], "line 2: there is no file .*images/none.png: paths count from the list"),
        (["image,label,id", "images/0.png,1,a", "images/1.png,1,a"], 'line 3 and .*line 2 have the same id "a"'),
        (["image,label,split", "images/0.png,1,trian"], r'has no split "train" \(did you mean "trian"'),
        (['{"image": "images/0.png", "label": 1', "x"], "line 1 is not JSON"),
        (['{"image": "images/0.png", "label": 1}', "[1]"], "line 2 is not an object"),
        (['{"image": "images/0.png", "label": 1.5}'], "line 1 has the label 1.5: use a whole number or a class name"),
        (['{"image": "images/0.png", "label": null}'], "line 1: label is null: give it one"),
        (['{"image": "images/0.png", "lable": 1}'], r'line 1 has no "label" \(did you mean "lable"\?\)'),
        (['[{"image": "images/0.png", "label": 1}]'], "is one JSON array: write one object a line"),
        (['{"image": 3, "label": 1}'], "line 1: image is 3, not a path"),
    ],
)  # fmt: skip
def test_wrong_lists_name_the_line(root, lines, message):
    with pytest.raises(UserError, match=message) as error:
        from_manifest(_csv(root, lines))
    assert "\n" not in str(error.value)


def test_lists_that_cannot_be_read(root):
    with pytest.raises(UserError, match="the list .*nowhere.csv cannot be read"):
        from_manifest(root / "nowhere.csv")
    (root / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        from_manifest(root / "binary.csv")
    path = _csv(root, ["image,label", *_rows([0, 1])])
    with pytest.raises(UserError, match="has no split column"):
        from_manifest(path, train_name="train")
    with pytest.raises(UserError, match="list.csv: the validation split is empty: 2 examples"):
        from_manifest(path, "validation", validation_share=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffimage,label\r\nimages/0.png,a b\r\nimages/1.png,c\r\n\r\n",
        "image,label\rimages/0.png,a b\rimages/1.png,c",
        "image;label\nimages/0.png;a b\nimages/1.png;c\n",
        'image, label\n"images/0.png", "a b"\nimages/1.png, c\n',
        '\ufeff{"image": "images/0.png", "label": "a b"}\r\n\r\n{"image": "images/1.png", "label": "c"}\r\n',
    ],
    ids=["bom-crlf", "cr", "semicolons", "spaces", "jsonl"],
)
def test_lists_as_spreadsheets_write_them(root, text):
    (root / "list.csv").write_bytes(text.encode())
    source = from_manifest(root / "list.csv", validation_share=1e-9)
    assert source.class_names == ("a b", "c") and source.labels.tolist() == [0, 1]
    assert _ids(source) == ["images/0.png", "images/1.png"]


def test_an_image_with_two_labels_or_in_two_splits_is_told(root, caplog):
    lines = ["image,label,split", "images/0.png,a,train", "images/0.png,a,train", "images/1.png,b,train"]
    with caplog.at_level("WARNING", logger="absl"):
        from_manifest(_csv(root, [*lines, "images/2.png,b,val"]))
        assert not caplog.text
        from_manifest(_csv(root, [*lines, "images/0.png,b,train", "images/1.png,b,val"]))
    assert "1 lines list an image again with another label, such as" in caplog.text
    assert "1 lines list an image again with another split" in caplog.text and "list.csv line 6" in caplog.text


def test_lists_and_files_of_other_file_systems(root):
    tf.io.gfile.makedirs("ram://lists/images")
    for i in range(2):
        tf.io.gfile.copy(str(root / f"images/{i}.png"), f"ram://lists/images/{i}.png", True)
    with tf.io.gfile.GFile("ram://lists/list.csv", "w") as file:
        file.write("image,label\nimages/0.png,0\nram://lists/images/1.png,1\n")
    source = from_manifest("ram://lists/list.csv", validation_share=1e-9)
    assert [source.get(tf.constant(i, tf.int64))["image"].numpy() for i in (0, 1)] == [picture(0), picture(1)]
