import numpy as np
import pytest
import tensorflow as tf

from vit_tpu.data import class_names
from vit_tpu.data.arrays import from_arrays
from vit_tpu.errors import UserError


def _file(tmp_path, text):
    path = tmp_path / "names.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def _source(labels, names=None):
    return from_arrays(np.zeros((len(labels), 2, 2, 1), np.uint8), np.asarray(labels), name="a", class_names=names)


def test_one_name_a_line(tmp_path):
    assert class_names.read(_file(tmp_path, "\ufeff ant\r\nbee, the\r\ncow\n\n")) == ("ant", "bee, the", "cow")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names.txt is empty"),
        ("a\n\nb\n", "line 2 of .*names.txt is blank"),
        ("a\nb\na\n", 'names "a" in lines 1 and 3'),
        (b"\xff\xfe", "is not text in UTF-8"),
    ],
)
def test_wrong_files_are_one_line_of_error(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as error:
        class_names.read(_file(tmp_path, text))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="the file .*nowhere.txt cannot be read"):
        class_names.read(str(tmp_path / "nowhere.txt"))


def test_numbered_classes_get_the_names():
    source = class_names.apply(_source([0, 2, 1]), ("x", "y", "z", "w"), "f")
    assert source.class_names == ("x", "y", "z", "w") and source.num_classes == 4


def test_named_classes_are_put_in_the_files_order():
    source = class_names.apply(_source([0, 2, 1], ["a", "b", "c"]), ("c", "a", "b"), "f")
    assert source.labels.tolist() == [1, 0, 2] and source.class_names == ("c", "a", "b")
    assert [int(source.get(tf.constant(i, tf.int64))["label"]) for i in range(3)] == [1, 0, 2]
    assert source.get(tf.constant([2, 0], tf.int64))["label"].numpy().tolist() == [2, 1]


def test_wholly_other_names_replace_the_datas():
    source = class_names.apply(_source([0, 1], ["n01", "n02"]), ("tench", "goldfish"), "f")
    assert source.labels.tolist() == [0, 1] and source.class_names == ("tench", "goldfish")


@pytest.mark.parametrize(
    "source, names, message",
    [
        (_source([0, 1], ["a", "b"]), ("a", "b", "c"), r"f names 3 classes, but a has 2 \(a, b, ...\)"),
        (_source([0, 5]), ("x", "y"), r"f names 2 classes, but a has 6 \(labels run from 0 to 5\): add the missing"),
        (_source([1, 2]), ("x", "y"), "f names 2 classes, but a has 3 .*numbered 1..2, set data.label_offset=-1"),
        (_source([0, 1], ["cat", "dog"]), ("dog", "catt"), r'only 1 names in common.*"catt".*did you mean "cat"'),
        (_source(np.eye(3)), ("x", "y"), "f names 2 classes, but a has 3"),
        (_source(np.eye(3)), ("x", "y", "z", "w"), "f names 4 classes, but a has 3"),
    ],
)
def test_names_that_do_not_match_are_refused_with_both_counts(source, names, message):
    with pytest.raises(UserError, match=message) as error:
        class_names.apply(source, names, "f")
    assert "\n" not in str(error.value)


def _number(values, **options):
    labels, names = class_names.number(values, name="a", name_of=lambda i: f"a/{i}", **options)
    return labels.tolist(), names


def test_numbers_words_and_several_labels():
    assert _number([3, 0]) == ([3, 0], ("0", "1", "2", "3"))
    assert _number(["3", "0"]) == ([3, 0], ("0", "1", "2", "3"))
    assert _number(["b", "a", "b"]) == ([1, 0, 1], ("a", "b"))
    assert _number(["b", "10", "9"]) == ([2, 0, 1], ("10", "9", "b"))  # one word makes all of them names
    assert _number([1, 2], offset=-1) == ([0, 1], ("0", "1"))
    assert _number([["a", "b"], [], "a"], multi_label=True) == ([[1, 1], [0, 0], [1, 0]], ("a", "b"))
    assert _number([[0, 2], [1]], multi_label=True)[0] == [[1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    "values, options, message",
    [
        ([0, [1, 2]], {}, r"a/1 has 2 labels \(1, 2\)"),
        ([0, []], {}, "a/1 has no label"),
        (["cat", "dgo"], {"names": ("cat", "dog")}, r'a/1 has the label "dgo".*2 class names \(did you mean "dog"'),
        ([0, True], {}, "a/1 has the label True"),
        ([0, None], {}, "a/1 has the label None"),
        ([0, 2**31], {}, "label 2147483648 does not fit in int32"),
        ([0, -(2**40)], {}, "does not fit in int32"),
        (
            [[0], [3]],
            {"multi_label": True, "names": ("x", "y", "z")},
            r"a has 4 classes \(labels run from 0 to 3, a/1 has 3\), but there are 3 class names: name them all",
        ),
        ([[1], [3]], {"multi_label": True, "names": ("x", "y", "z")}, "numbered 1..3, set data.label_offset=-1"),
        ([0, 3], {"names": ("x", "y", "z")}, r"a has 4 classes .*, but there are 3 class names"),
        ([1, 3], {"names": ("x", "y", "z")}, "numbered 1..3, set data.label_offset=-1"),
        ([[0], [-1]], {"multi_label": True}, "a/1 has -1.*remove unlabelled records"),
        (["x"], {"collect": False}, 'labels are words such as "x": set data.class_names'),
    ],
)
def test_labels_that_make_no_sense_name_the_record(values, options, message):
    with pytest.raises(UserError, match=message) as error:
        _number(values, **options)
    assert "\n" not in str(error.value)
