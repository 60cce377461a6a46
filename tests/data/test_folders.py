import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.data.folders import from_folders
from vit_tpu.errors import UserError


def _tree(root, files):
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def _names(source):
    return [source.name_of(i) for i in range(source.num_examples)]


@pytest.mark.parametrize("held_out", ["val", "valid", "validation", "test"])
def test_train_and_validation_folders(tmp_path, held_out):
    _tree(tmp_path, ["train/b/2.jpg", "train/b/1", "train/a/x/3.png", f"{held_out}/a/4.jpg",
                     f"{held_out}/b/5.jpg", "train/a/.hidden", "train/.cache/6.jpg"])  # fmt: skip
    train, validation = from_folders(tmp_path), from_folders(str(tmp_path), "validation")
    assert train.class_names == validation.class_names == ("a", "b")
    assert _names(train) == ["a/x/3.png", "b/1", "b/2.jpg"]
    assert _names(validation) == ["a/4.jpg", "b/5.jpg"]
    assert train.labels.tolist() == [0, 1, 1] and train.encoded
    record = train.get(tf.constant(2, tf.int64))
    assert record["image"].numpy() == b"train/b/2.jpg"
    assert int(record["label"]) == 1 and record["id"].numpy() == b"b/2.jpg"


@pytest.mark.parametrize("below", ["", "train/"])
def test_the_hashed_split_is_disjoint_complete_and_stable(tmp_path, below):
    files = [f"{below}{c}/{i}.jpg" for c in "ab" for i in range(100)]
    _tree(tmp_path, files)
    train, validation = (set(_names(from_folders(tmp_path, s))) for s in ("train", "validation"))
    assert not train & validation
    assert {below + name for name in train | validation} == set(files)
    assert 8 < len(validation) < 35
    _tree(tmp_path, [f"{below}a/new{i}.jpg" for i in range(50)])
    assert validation <= set(_names(from_folders(tmp_path, "validation")))
    assert train <= set(_names(from_folders(tmp_path)))


def test_the_hashed_split_is_the_same_on_every_machine(tmp_path):
    _tree(tmp_path, [f"a/{i}" for i in range(30)])
    assert _names(from_folders(tmp_path, "validation")) == ["a/18", "a/2", "a/23"]


@pytest.mark.parametrize(
    "files, split, message",
    [
        ([], "train", "is empty: expected .*/<class>/<image>"),
        (["1.jpg"], "train", "has no class folders"),
        (["train/1.jpg", "test/a/1.jpg"], "train", "train has no class folders"),
        (["test/a/1.jpg"], "train", "has test/ but no train/"),
        (
            ["train/a/1", "train/b/1", "val/a/1", "val/c/1"],
            "train",
            r"class folders differ \(only in .*train: b; only in .*val: c\)",
        ),
        (["train/a/1", "train/b/.x", "val/a/1", "val/b/1"], "train", "train/b has no images"),
        (["train/a/1", "train/b/1", "val/a/1", "val/b/.x"], "validation", "val/b has no images"),
        (["a/1"], "validation", "the validation split is empty"),
        (["a/1"], "dev", 'unknown split "dev"'),
    ],
)
def test_wrong_trees_are_one_line_of_error(tmp_path, files, split, message):
    _tree(tmp_path, files)
    with pytest.raises(UserError, match=message) as error:
        from_folders(tmp_path, split)
    assert "\n" not in str(error.value)


def test_a_missing_folder(tmp_path):
    with pytest.raises(UserError, match="there is no folder .*nowhere: check the path"):
        from_folders(tmp_path / "nowhere")


def test_a_share_outside_zero_to_one(tmp_path):
    with pytest.raises(UserError, match="data.validation_fraction is 1"):
        from_folders(tmp_path, validation_share=1)


def test_labels_follow_the_files(tmp_path):
    _tree(tmp_path, [f"{c}/{i}" for c in "abc" for i in range(20)])
    source = from_folders(tmp_path)
    expected = [source.class_names.index(name[0]) for name in _names(source)]
    np.testing.assert_array_equal(source.labels, expected)


def test_pipes_are_no_images_and_links_are(tmp_path):
    import os

    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
        for i in range(30):
            (tmp_path / name / "deep" / f"{i}.png").write_bytes(b"x")
        os.mkfifo(tmp_path / name / "pipe.png")
        os.symlink(tmp_path / name / "deep" / "0.png", tmp_path / name / "link.png")
        os.symlink(tmp_path / "gone.png", tmp_path / name / "dangling.png")  # reported when it is read
        os.symlink(tmp_path / name / "deep", tmp_path / name / "again")  # not followed, as before
    found = from_folders(tmp_path, "train", validation_share=1e-9)
    ids = [found.name_of(i) for i in range(found.num_examples)]
    assert len(ids) == 2 * 32 and {"a/link.png", "a/dangling.png", "b/deep/7.png"} <= set(ids)
    assert not any("pipe" in name or "again" in name for name in ids)
