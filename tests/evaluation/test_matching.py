"""Labels of the data against the head: by name, by a map, ReaL sets."""

import json

import numpy as np
import pytest

from vit_tpu.data.arrays import from_arrays
from vit_tpu.errors import UserError
from vit_tpu.evaluation import labels


def _source(names, values, ids=None):
    values = np.asarray(values)
    return from_arrays(np.zeros((len(values), 2, 2, 1), np.uint8), values, class_names=names, name="data", ids=ids)


def _write(path, value):
    path.write_text(json.dumps(value))
    return path


def test_same_names_are_left_alone():
    found = labels.match(_source(["cat", "dog"], [0, 1, 1]), ("cat", "dog"), 2, None)
    assert found.outputs is None and found.labels.tolist() == [0, 1, 1] and found.note == ""


def test_names_in_another_order_are_brought_into_the_heads():
    found = labels.match(_source(["cat", "dog"], [0, 1, 1]), ("dog", "fox", "cat"), 3, None)
    assert found.labels.tolist() == [2, 0, 0] and found.names == ("dog", "fox", "cat")
    assert "by name" in found.note
    rows = labels.match(_source(["cat", "dog"], np.array([[1.0, 0], [1, 1]])), ("dog", "fox", "cat"), 3, None)
    assert rows.labels.tolist() == [[0, 0, 1], [1, 0, 1]]


def test_a_class_the_head_lacks_is_named():
    with pytest.raises(UserError, match=r'data has dogs \(did you mean "dog"\?\), 1 of its 2 classes'):
        labels.match(_source(["cat", "dogs"], [0, 1]), ("cat", "dog"), 2, None)


def test_numbered_classes_go_by_number():
    assert labels.match(_source(None, [0, 1]), ("cat", "dog"), 2, None).names == ("cat", "dog")
    assert labels.match(_source(["cat", "dog"], [0, 1]), (), 2, None).names == ("cat", "dog")
    assert "2 classes, the head 3" in labels.match(_source(None, [0, 1]), (), 3, None).note
    assert "have no names: output 0 is taken for" in labels.match(_source(["cat", "dog"], [0, 1]), (), 2, None).note
    assert labels.match(_source(None, [0, 1]), (), 2, None).note == ""
    with pytest.raises(UserError, match="has 3 classes, but the head has 2"):
        labels.match(_source(None, [0, 2]), (), 2, None)


@pytest.mark.parametrize("given", [{"tabby": "cat", "1": "cat", "poodle": "dog"}, ["cat", "cat", "dog", None],
                                   {"tabby": 0, "siamese": 0, "poodle": 1}])  # fmt: skip
def test_a_map_adds_up_outputs_of_one_class(tmp_path, given):
    outputs = ("tabby", "siamese", "poodle", "car")
    source = _source(["cat", "dog", "bird"], [0, 1, 2])
    found = labels.match(source, outputs, 4, _write(tmp_path / "map.json", given))
    assert found.labels.tolist() == [0, 1, -1]  # no output stands for a bird
    assert found.note == "3 of 4 outputs stand for 2 of 3 classes"
    logits = np.log(np.array([[0.2, 0.25, 0.35, 0.2]]))
    shares = np.exp(found.logits(logits, "softmax"))[0]
    np.testing.assert_allclose(shares, [0.45, 0.35, 0.0], atol=1e-12)  # cat wins though poodle is the largest output
    np.testing.assert_allclose(found.logits(logits, "sigmoid")[0, :2], np.log([0.25, 0.35]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tabbi": "cat"}, 'output "tabbi" is not known (did you mean "tabby"?)'),
        ({"tabby": "cats"}, 'class "cats" is not known (did you mean "cat"?)'),
        (["cat"], "lists 1 classes, but the head has 2"),
        ({"tabby": 7}, 'class "7" is not known'),
        ({}, "maps nothing"),
        (3, "neither a JSON object"),
    ],
)
def test_a_wrong_map_is_one_sentence(tmp_path, given, message):
    with pytest.raises(UserError) as error:
        labels.read_map(_write(tmp_path / "m.json", given), ("tabby", "poodle"), ("cat", "dog"), 2)
    assert message in str(error.value)


def test_a_map_that_is_no_json(tmp_path):
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        labels.read_map(tmp_path / "m.json", (), (), 2)
    with pytest.raises(UserError, match="cannot be read"):
        labels.read_map(tmp_path / "none.json", (), (), 2)


def test_real_labels_follow_the_numbers_in_names(tmp_path):
    path = _write(tmp_path / "real.json", [[1], [], [2, 3], [4]])
    names = ["n02/ILSVRC2012_val_00000004.JPEG", "n01/ILSVRC2012_val_00000003.JPEG"]
    sets, how = labels.read_real(path, _source(None, [0, 1], names), 5)
    assert sets == [[4], [2, 3]] and "numbers" in how
    with pytest.raises(UserError, match="image number 5"):
        labels.read_real(path, _source(None, [0], ["ILSVRC2012_val_00000005.JPEG"]), 5)


def test_real_labels_follow_sorted_file_names_across_class_folders(tmp_path):
    import dataclasses

    path = _write(tmp_path / "real.json", [[1], [], [2, 3]])
    source = _source(None, [0, 0, 1], ["x/c.jpg", "y/a.jpg", "y/b.jpg"])
    files = dataclasses.replace(source, image_shape=None)
    assert labels.read_real(path, files, 4)[0] == [[2, 3], [1], []]
    assert labels.read_real(path, source, 4)[0] == [[1], [], [2, 3]]  # arrays: in their own order
    with pytest.raises(UserError, match="hold 3 sets, but data 2 images"):
        labels.read_real(path, _source(None, [0, 1]), 4)
    with pytest.raises(UserError, match="no list of lists"):
        labels.read_real(_write(tmp_path / "bad.json", [1, 2, 3]), source, 4)
    with pytest.raises(UserError, match="name class 3, but the head has 3"):
        labels.read_real(path, source, 3)
