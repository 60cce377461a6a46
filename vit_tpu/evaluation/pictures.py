"""The pictures of an evaluation: confusion matrix, and accuracy over confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NUMBERED = 20  # classes up to which every cell shows its number
NAMED = 60  # classes up to which the axes name every class
LISTED = 12  # confusions listed beside a large matrix


def confusion_picture(matrix: np.ndarray, names: Sequence[str], title: str = "") -> Any:
    """Draws int [C, C] counts (label by prediction) as shares of each row; returns a matplotlib figure.

    Few classes show every number. For many the matrix is summed into blocks that a screen can show, the right answers
    on the diagonal are left out of the colours, and the most frequent confusions are listed by name.
    """
    classes = len(matrix)
    count = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, count, out=np.zeros(matrix.shape), where=count > 0)
    accuracy = np.trace(matrix) / max(matrix.sum(), 1)
    heading = f"{100 * accuracy:.2f}% of {int(matrix.sum()):,} right, {classes} classes"
    if classes <= NUMBERED:
        return _small(matrix, shares, names, title, heading)
    return _large(matrix, shares, names, title, heading)


def _small(matrix: np.ndarray, shares: np.ndarray, names: Sequence[str], title: str, heading: str) -> Any:
    figure, axis = _figure(2.2 + 0.55 * len(names) + 0.07 * max(map(len, names)), 1.9 + 0.55 * len(names))
    off = shares.copy()
    np.fill_diagonal(off, 0.0)
    top = max(off.max(), 0.08) * 1.25  # a single error in a small set is no alarm
    axis.imshow(off, cmap="Reds", vmin=0.0, vmax=top)
    for i in range(len(names)):
        for j in range(len(names)):
            if matrix[i, j]:
                text = f"{matrix[i, j]:,}\n{100 * shares[i, j]:.0f}%" if i == j else f"{matrix[i, j]:,}"
                colour = "#1b7837" if i == j else "white" if off[i, j] > 0.65 * top else "black"
                axis.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    _axes(axis, names)
    axis.set_title(_shortened(title, 70), fontsize=9, loc="left")
    axis.set_xlabel(f"predicted          ({heading})")
    return figure


def _large(matrix: np.ndarray, shares: np.ndarray, names: Sequence[str], title: str, heading: str) -> Any:
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 8.2), constrained_layout=True)
    axis, side = figure.subplots(1, 2, width_ratios=(1.65, 1))
    off = shares.copy()
    np.fill_diagonal(off, 0.0)
    block = -(-len(names) // 250)
    drawn = _blocks(off, block)
    image = axis.imshow(drawn, cmap="OrRd", vmin=0.0, vmax=max(np.quantile(drawn, 0.9995), 0.02),
                        interpolation="nearest", extent=(-0.5, len(names) - 0.5, len(names) - 0.5, -0.5))  # fmt: skip
    label = "share of the label's examples called this class"
    figure.colorbar(image, ax=axis, shrink=0.7, label=label if block == 1 else f"{label}, largest in {block} x {block}")
    if len(names) <= NAMED:
        _axes(axis, names, size=7)
    else:
        axis.set(xlabel="predicted class number", ylabel="label's class number")
    axis.set_xlabel(f"{axis.get_xlabel()}\n({heading}; right answers not coloured)")
    axis.set_title(_shortened(title, 90), fontsize=9, loc="left")
    side.axis("off")
    side.text(0.0, 1.0, "most frequent confusions", fontweight="bold", va="top", fontsize=10)
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    for line, flat in enumerate(np.argsort(-wrong, axis=None, kind="stable")[:LISTED]):
        i, j = np.unravel_index(flat, wrong.shape)
        if wrong[i, j]:
            first = f"{_shortened(names[i], 26)} -> {_shortened(names[j], 26)}"
            text = f"{first}\n    {wrong[i, j]:,} of {int(matrix[i].sum()):,} ({100 * shares[i, j]:.0f}%)"
            side.text(0.0, 0.94 - 0.076 * line, text, va="top", fontsize=8.5)
    return figure


def reliability_picture(rows: Sequence[dict[str, Any]], error: float, title: str = "") -> Any:
    """Draws accuracy over confidence for each bin, with the number of examples below; returns a matplotlib figure."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(5.2, 5.6), constrained_layout=True)
    axis, counts = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    axis.plot([0, 1], [0, 1], color="#666666", linewidth=1, linestyle="--", label="perfectly calibrated")
    width = rows[0]["high"] - rows[0]["low"]
    first = True
    for row in rows:
        if not row["count"]:
            continue
        middle = (row["low"] + row["high"]) / 2
        axis.bar(middle, row["accuracy"], width * 0.92, color="#1f77b4", alpha=0.85,
                 label="accuracy" if first else None)  # fmt: skip
        gap = row["confidence"] - row["accuracy"]  # hatched, so that it is seen on the bar as well as above it
        axis.bar(middle, gap, width * 0.92, bottom=row["accuracy"], fill=False, edgecolor="#d95f02", hatch="////",
                 linewidth=1.2, label="gap to the mean confidence" if first else None)  # fmt: skip
        first = False
    axis.set(ylim=(0, 1.02), xlim=(0, 1), ylabel="accuracy")
    axis.legend(loc="upper left", fontsize=8, framealpha=0.9, edgecolor="none")
    axis.set_title(f"{_shortened(title, 60)}\nexpected calibration error {100 * error:.2f}%", fontsize=9, loc="left")
    numbers = [row["count"] for row in rows]
    counts.bar([(row["low"] + row["high"]) / 2 for row in rows], numbers, width * 0.92, color="#666666")
    if max(numbers) > 100 * max(min(n for n in numbers if n), 1):
        counts.set_yscale("log")
    counts.set(xlabel="confidence (probability of the predicted class)", ylabel="examples")
    for each in (axis, counts):
        each.spines[["top", "right"]].set_visible(False)
    return figure


def save(figure: Any, path: Any) -> None:
    """Writes a figure as a picture and closes it."""
    import warnings

    import matplotlib.pyplot as plt

    with warnings.catch_warnings():  # a name in a script that the font lacks is drawn as boxes, which one sees
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, dpi=120)
    plt.close(figure)


def _blocks(values: np.ndarray, size: int) -> np.ndarray:
    """The largest value of each size x size block."""
    if size == 1:
        return values
    side = -(-len(values) // size)
    padded = np.zeros((side * size, side * size))
    padded[: len(values), : len(values)] = values
    return padded.reshape(side, size, side, size).max((1, 3))


def _axes(axis: Any, names: Sequence[str], size: int = 9) -> None:
    short = [_shortened(name, 22) for name in names]
    slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, short)) > 3 else {}
    axis.set_xticks(range(len(names)), short, fontsize=size, **slanted)
    axis.set_yticks(range(len(names)), short, fontsize=size)
    axis.set(xlabel="predicted", ylabel="label")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), constrained_layout=True)


def _shortened(text: str, length: int) -> str:
    return plain(text if len(text) <= length else text[: length - 3] + "...")


def plain(text: str) -> str:
    """Returns a text that matplotlib draws as it is: it reads what stands between two dollar signs as a formula."""
    return text.replace("$", r"\$")
