import numpy as np
import pytest

from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.labels import check_labels, tell_unseen
from vit_tpu.errors import UserError


def _source(labels, **kwargs):
    labels = np.asarray(labels)
    return from_arrays(np.zeros((len(labels), 4, 4, 1), np.uint8), labels, name="a", **kwargs)


def test_labels_that_fit_pass():
    check_labels(_source([0, 1, 2]), 3)
    check_labels(_source([0, 1, 2]), 5)
    check_labels(_source(np.eye(3, dtype=np.float32)), 3)


def test_a_label_beyond_the_head_names_the_record():
    with pytest.raises(UserError) as error:
        check_labels(_source([0, 2, 7, 1], num_classes=3), 3)
    message = str(error.value)
    assert "a/2 has label 7" in message and "0..2" in message and "from 0 to 7" in message
    assert "num_classes=8" in message and "\n" not in message


def test_labels_from_one_get_the_hint():
    with pytest.raises(UserError, match=r"a/2 has label 3.*numbered 1\.\.3, set data.label_offset=-1"):
        check_labels(_source([1, 2, 3]), 3)


def test_negative_labels_are_refused():
    with pytest.raises(UserError, match=r"a/1 has label -1.*unlabelled"):
        check_labels(_source([0, -1, 2], num_classes=3), 3)


def test_a_smaller_head_than_the_classes_is_refused_even_if_labels_fit():
    with pytest.raises(UserError, match="a has 10 classes, but the head has 3: set num_classes=10"):
        check_labels(_source([0, 1, 2], num_classes=10), 3)


@pytest.mark.parametrize("bad", [-0.5, 1.5, np.nan, np.inf])
def test_a_row_outside_zero_to_one_names_the_record(bad):
    rows = np.eye(3, dtype=np.float32)
    rows[1, 0] = bad
    with pytest.raises(UserError, match="a/1 has label values"):
        check_labels(_source(rows), 3)


def test_classes_without_an_example_are_told(caplog):
    images = np.zeros((2, 4, 4, 1), np.uint8)
    with caplog.at_level("WARNING", logger="absl"):
        tell_unseen(from_arrays(images, np.array([0, 1])))
        tell_unseen(from_arrays(images, np.array([[1, 0.0], [0.5, 1]])))
        assert not caplog.text
        tell_unseen(from_arrays(images, np.array([0, 2]), class_names=["ant", "bee", "cow", "dog"]))
        tell_unseen(from_arrays(images, np.array([0, 1])), 3)
    assert "2 of 4 classes have no example: bee, dog" in caplog.text
    assert "arrays has 2 classes, the head 3: the other outputs never get an example" in caplog.text


def test_rows_of_another_width_are_refused():
    with pytest.raises(UserError, match="rows of 3 values, but the head has 4"):
        check_labels(_source(np.eye(3, dtype=np.float32)), 4)
