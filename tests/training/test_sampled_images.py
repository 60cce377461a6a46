"""Examples for pictures, calibration and comparison are those that the evaluation sees."""

import numpy as np
import pytest
from PIL import Image
from tiny_run import config

from vit_tpu.data.broken import BrokenRecords
from vit_tpu.training import inputs


@pytest.mark.parametrize("crop", ["resize", "inception"])
@pytest.mark.parametrize("exif", ["ignore", "apply"])
def test_samples_equal_the_evaluations_images(tmp_path, crop, exif):
    random = np.random.default_rng(0)
    for i in range(6):
        folder = tmp_path / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        turned = Image.Exif()
        turned[0x0112] = 6
        pixels = np.repeat(np.repeat(random.integers(0, 256, (4, 3, 3), np.uint8), 8, 0), 8, 1)
        Image.fromarray(pixels).save(folder / f"{i}.jpg", exif=turned, quality=95)
    c = config(data__source="folder", data__path=str(tmp_path), data__crop=crop, data__exif=exif, image_size=16,
               batch_size=6, data__validation_fraction=0.01)  # fmt: skip
    source = inputs.open_source(c, "train")
    images, labels = inputs.sample(c, source, 6)
    batch, wanted, _ = next(iter(inputs.eval_data(c, source, BrokenRecords(0))))
    np.testing.assert_allclose(images / 127.5 - 1, batch, atol=1e-6)
    np.testing.assert_array_equal(labels, wanted)
