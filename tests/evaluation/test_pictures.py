"""The pictures are drawn for few and many classes, and show what they should."""

import numpy as np
import pytest

from vit_tpu.evaluation import metrics, pictures, sheet
from vit_tpu.evaluation.predicting import Prediction


def _texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_few_classes_show_every_number(tmp_path):
    matrix = np.array([[5, 1, 0], [0, 6, 0], [2, 0, 4]])
    figure = pictures.confusion_picture(matrix, ("cat", "dog", "fox"), "a run")
    assert sorted(_texts(figure)) == sorted(["5\n83%", "1", "6\n100%", "2", "4\n67%"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["cat", "dog", "fox"]
    assert "83.33% of 18 right" in figure.axes[0].get_xlabel()
    pictures.save(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize("classes", [50, 1000])
def test_many_classes_list_the_worst_confusions(tmp_path, classes):
    matrix = np.diag(np.full(classes, 40))
    matrix[7, 31] = 25
    matrix[3, 4] = 9
    figure = pictures.confusion_picture(matrix, [f"class {i}" for i in range(classes)], "a run")
    texts = _texts(figure)
    assert texts[1] == "class 7 -> class 31\n    25 of 65 (38%)" and texts[2].startswith("class 3 -> class 4")
    assert len(texts) == 3
    drawn = figure.axes[0].images[0].get_array()
    assert len(drawn) <= 250 and drawn.max() == pytest.approx(25 / 65)  # a single cell survives the summary
    pictures.save(figure, tmp_path / "a.png")


def test_reliability_draws_a_bar_a_bin_in_use(tmp_path):
    confidence, hit = np.array([0.95, 0.94, 0.5]), np.array([True, False, True])
    rows = metrics.reliability(confidence, hit)
    figure = pictures.reliability_picture(rows, metrics.calibration_error(confidence, hit), "a run")
    heights = [bar.get_height() for bar in figure.axes[0].patches[::2]]
    assert sorted(heights) == [0.5, 1.0]
    pictures.save(figure, tmp_path / "a.png")


@pytest.mark.parametrize("count", [1, 7])
def test_a_contact_sheet_says_label_and_confidence(tmp_path, count):
    rows = [
        Prediction(f"in/{i}.jpg", "cat", 0.25 + i / 10, (("cat", 0.25 + i / 10), ("dog", 0.1))) for i in range(count)
    ]
    figure = sheet.contact_sheet(rows, [np.full((8, 8, 3), 20 * i, np.uint8) for i in range(count)], "a run")
    assert [axis.get_title() for axis in figure.axes][0] == "cat  25%" and len(figure.axes) == count
    assert figure.axes[0].get_xlabel() == "dog 10%\nin/0.jpg"
    sheet.save(figure, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 2000
