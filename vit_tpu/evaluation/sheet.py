"""A contact sheet: pictures with the label and the confidence of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_tpu.errors import UserError
from vit_tpu.evaluation import files
from vit_tpu.evaluation.predicting import Prediction

COLUMNS = 6
_SURE, _UNSURE = np.array([0.11, 0.47, 0.22]), np.array([0.75, 0.33, 0.0])


def contact_sheet(
    rows: Sequence[Prediction], pictures: Sequence[np.ndarray], title: str = "", columns: int = COLUMNS
) -> Any:  # fmt: skip
    """Draws each picture with its label, a bar as long as the probability, the runner-up and the file's name.

    Args:
      rows: predictions.
      pictures: uint8 [H, W, C] each, as the model sees them.
      title: above all.
      columns: pictures in a row.

    Returns:
      A matplotlib figure.
    """
    from vit_tpu.training.plots import _pyplot

    plt = _pyplot()
    columns = min(columns, len(rows))
    lines = -(-len(rows) // columns)
    side, heading = 1.9, 0.35 if title else 0.05
    height = lines * (side + 0.72) + heading
    figure = plt.figure(figsize=(max(columns * side, 4.0), height))
    grid = figure.add_gridspec(
        lines, columns, left=0.01, right=0.99, top=1 - (heading + 0.42) / height, bottom=0.36 / height,
        wspace=0.06, hspace=0.66 / side,
    )  # fmt: skip
    if title:
        figure.text(0.01, 1 - 0.22 / height, title, fontsize=9, va="center", parse_math=False)
    for i, (row, picture) in enumerate(zip(rows, pictures)):
        axis = figure.add_subplot(grid[i // columns, i % columns])
        shown = picture[..., 0] if picture.shape[-1] == 1 else picture
        axis.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="nearest" if len(shown) < 64 else "antialiased")
        axis.set(xticks=[], yticks=[])
        colour = _SURE * row.probability + _UNSURE * (1 - row.probability)
        for spine in axis.spines.values():
            spine.set_visible(False)
        axis.set_title(f"{short(row.label, 20)}  {100 * row.probability:.0f}%", fontsize=8.5, pad=7,
                       color=colour, parse_math=False)  # fmt: skip
        axis.plot([0, 1], [1.03, 1.03], transform=axis.transAxes, color="#dddddd", linewidth=3, clip_on=False)
        axis.plot([0, row.probability], [1.03, 1.03], transform=axis.transAxes, color=colour, linewidth=3,
                  clip_on=False, solid_capstyle="butt")  # fmt: skip
        second = f"{short(row.top[1][0], 20)} {100 * row.top[1][1]:.0f}%\n" if len(row.top) > 1 else ""
        axis.set_xlabel(second + short(files.shown(row.file), 30), fontsize=6.5, color="#555555",
                        labelpad=3, parse_math=False)  # fmt: skip
    return figure


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes the sheet as a picture; the ending decides the format.

    Raises:
      UserError: an unknown ending, or the file cannot be written.
    """
    from vit_tpu.evaluation import pictures

    try:
        pictures.save(figure, path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be written ({reason}): free space or choose another place") from None


def short(text: str, length: int) -> str:
    """Returns the end of a text that is too long: of a file's name the part that differs."""
    return text if len(text) <= length else "..." + text[-(length - 3) :]
