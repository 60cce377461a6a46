"""scikit-learn's handwritten digits: 1,797 images of 8x8, inside the package, no download."""

from __future__ import annotations

import numpy as np

from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError


def digits(split: str = "train") -> Source:
    """Returns the digits' `split`: 1,437 training or 360 validation images, uint8 [8, 8, 1].

    Pixel values 0..16 become floor(value * 255 / 16 + 0.5), so 16 is 255. The split is fixed and
    uses no random numbers: the images, sorted by class and within a class in their given order,
    are dealt out, every fifth to validation. Each class gives a fifth, rounded up or down.

    Raises:
      UserError: for another split name.
    """
    if split not in ("train", "validation"):
        raise UserError(f'unknown split "{split}": the digits have train and validation')
    from sklearn.datasets import load_digits  # here: importing it takes a second

    bunch = load_digits()
    images = np.floor(bunch.images * 255 / 16 + 0.5).astype(np.uint8)[..., None]
    by_class = np.argsort(bunch.target, kind="stable")
    in_validation = np.arange(len(by_class)) % 5 == 0
    chosen = np.sort(by_class[in_validation == (split == "validation")])
    return from_arrays(
        images[chosen],
        bunch.target[chosen].astype(np.int32),
        name=f"digits/{split}",
        num_classes=10,
    )
