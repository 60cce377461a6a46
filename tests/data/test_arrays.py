import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.data.arrays import from_arrays, from_npz
from vit_tpu.errors import UserError

IMAGES = np.arange(6 * 4 * 5 * 3, dtype=np.uint32).astype(np.uint8).reshape(6, 4, 5, 3)
LABELS = np.array([0, 1, 2, 2, 1, 0])


def test_records_come_by_index_alone_and_together():
    source = from_arrays(IMAGES, LABELS, name="a")
    one = source.get(tf.constant(4, tf.int64))
    np.testing.assert_array_equal(one["image"], IMAGES[4])
    assert int(one["label"]) == 1 and one["label"].dtype == tf.int32
    assert one["id"].numpy() == b"a/4" and source.name_of(4) == "a/4"
    many = source.get(tf.constant([5, 0], tf.int64))
    np.testing.assert_array_equal(many["image"], IMAGES[[5, 0]])
    assert many["id"].numpy().tolist() == [b"a/5", b"a/0"]
    assert source.num_classes == 3 and source.class_names == ("0", "1", "2")
    assert source.image_shape == (4, 5, 3) and not source.encoded


def test_grey_images_label_columns_and_ids():
    source = from_arrays(IMAGES[..., 0], LABELS[:, None], class_names=["x", "y", "z", "w"], ids=list("abcdef"))
    assert source.image_shape == (4, 5, 1) and source.num_classes == 4
    assert source.labels.tolist() == LABELS.tolist()
    assert source.name_of(2) == "c" and source.get(tf.constant(2, tf.int64))["id"].numpy() == b"c"


def test_label_rows_are_kept_as_float32():
    source = from_arrays(IMAGES, np.eye(6))
    assert source.labels.dtype == np.float32 and source.num_classes == 6


@pytest.mark.parametrize(
    "images, labels, message",
    [
        (IMAGES / 255, LABELS, "images are float64, expected uint8"),
        (IMAGES[..., :2], LABELS, r"shape \[6, 4, 5, 2\]"),
        (IMAGES, LABELS[:5], "6 images but 5 labels"),
        (IMAGES[:0], LABELS[:0], "no examples"),
        (IMAGES, LABELS + 0.5, "labels are float64"),
        (IMAGES, LABELS + 2**40, "does not fit in int32"),
        (IMAGES, np.array(list("abcdef")), "labels are <U1"),
    ],
)
def test_wrong_arrays_are_one_line_of_error(images, labels, message):
    with pytest.raises(UserError, match=message) as error:
        from_arrays(images, labels)
    assert "\n" not in str(error.value)


def test_wrong_names_are_refused():
    with pytest.raises(UserError, match="2 class names for 3 classes"):
        from_arrays(IMAGES, LABELS, num_classes=3, class_names=["a", "b"])
    with pytest.raises(UserError, match="1 ids for 6 images"):
        from_arrays(IMAGES, LABELS, ids=["a"])


def test_npz_names_of_keras_and_ours(tmp_path):
    np.savez(tmp_path / "k.npz", x_train=IMAGES[:4], y_train=LABELS[:4], x_test=IMAGES[4:],
             y_test=LABELS[4:], class_names=np.array(["x", "y", "z"]))  # fmt: skip
    train, test = from_npz(tmp_path / "k.npz"), from_npz(tmp_path / "k.npz", "validation")
    assert (train.num_examples, test.num_examples) == (4, 2)
    assert test.class_names == ("x", "y", "z") and test.num_classes == 3
    assert train.name_of(3) == "k/train/3"


def test_an_npz_with_one_split_is_dealt_out_by_position(tmp_path):
    images = np.arange(50, dtype=np.uint8).repeat(4).reshape(50, 2, 2, 1)
    path = tmp_path / "o.npz"
    np.savez(path, images=images, labels=np.arange(50) % 3)
    train, valid = from_npz(path, validation_share=0.2), from_npz(path, "validation", validation_share=0.2)
    ids = [source.name_of(i) for source in (train, valid) for i in range(source.num_examples)]
    assert sorted(ids) == sorted(f"o/{i}" for i in range(50)) and valid.num_examples == 3
    for source in (train, valid):
        record = source.get(tf.constant([2, 0], tf.int64))
        positions = [int(name.decode().partition("/")[2]) for name in record["id"].numpy()]
        assert record["image"].numpy()[:, 0, 0, 0].tolist() == positions
        assert record["label"].numpy().tolist() == [p % 3 for p in positions] == source.labels[[2, 0]].tolist()
    np.savez(path, train_images=images[:40], train_labels=np.arange(1, 41) % 3 + 1)
    assert from_npz(path, label_offset=-1).num_classes == 3  # a named training split without validation, too
    assert set(ids) >= {from_npz(path, "validation").name_of(0)}
    np.savez(path, images=images[:2], labels=[0, 1])
    with pytest.raises(UserError, match="o: the validation split is empty: 2 examples, of which 10% are held out"):
        from_npz(path, "validation")


def test_wrong_npz_files_are_one_line_of_error(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        from_npz(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match="text.npz is another format .*hello.*: write images and labels with numpy.sav"):
        from_npz(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", IMAGES)
    with pytest.raises(UserError, match="one.npy is one array alone"):
        from_npz(tmp_path / "one.npy")
    (tmp_path / "zip.npz").write_bytes(b"PK\x03\x04hello")
    with pytest.raises(UserError, match="not a readable .npz file"):
        from_npz(tmp_path / "zip.npz")
    np.savez(tmp_path / "p.npz", images=np.array([{}], object), labels=LABELS[:1])
    with pytest.raises(UserError, match="not a readable .npz file"):
        from_npz(tmp_path / "p.npz")
    np.savez(tmp_path / "w.npz", picture=IMAGES)
    with pytest.raises(UserError, match="holds picture, no train split"):
        from_npz(tmp_path / "w.npz")
    with pytest.raises(UserError, match='unknown split "dev"'):
        from_npz(tmp_path / "w.npz", "dev")
