"""The pictures of a run: learning curves and a sheet of right and wrong predictions."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

TRAIN, VALIDATION, GREY = "#1f77b4", "#d95f02", "#666666"


def read_metrics(workdir: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the training lines and the validation lines of a run's metrics.jsonl; for a step written twice (a
    resumed run) the last."""
    train: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, Any]] = {}
    for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "validation" in record:
            validation[record["step"]] = {"step": record["step"], **record["validation"]}
        else:
            train[record["step"]] = record
    return [train[step] for step in sorted(train)], [validation[step] for step in sorted(validation)]


def learning_curves(workdir: str | os.PathLike[str], title: str = "") -> pathlib.Path:
    """Draws loss, accuracy, learning rate with gradient norm, and speed over the steps; returns the picture's path."""
    plt = _pyplot()
    train, validation = read_metrics(workdir)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, constrained_layout=True)
    (loss, accuracy), (rate, speed) = axes
    _line(loss, train, "loss", TRAIN, "training (with augmentation)")
    _line(loss, validation, "loss", VALIDATION, "validation", marker="o")
    loss.set(title="loss", yscale="log")
    _line(accuracy, train, "accuracy", TRAIN, "training", factor=100)
    _line(accuracy, validation, "accuracy", VALIDATION, "validation", marker="o", factor=100)
    accuracy.set(title="accuracy, %", ylim=(None, 101))
    if validation and "accuracy" in validation[-1]:
        best = max(validation, key=lambda line: line["accuracy"])
        last = validation[-1]
        accuracy.set_title(
            f"accuracy, %   (validation: last {100 * last['accuracy']:.2f}, best {100 * best['accuracy']:.2f})",
            fontsize=10,
        )
    _line(rate, train, "learning_rate", GREY, "learning rate")
    rate.set(title="learning rate and gradient norm before clipping", xlabel="step")
    rate.title.set_fontsize(10)
    norm = rate.twinx()
    _line(norm, train, "grad_norm", "#7b3294", "gradient norm", alpha=0.7)
    norm.set_yscale("log")
    norm.tick_params(axis="y", colors="#7b3294")
    _line(speed, train, "images_per_second", TRAIN, "images/s")
    speed.set(title="training images per second", xlabel="step", ylim=(0, None))
    handles = [handle for axis in (rate, norm) for handle in axis.get_lines()]
    rate.legend(handles, [handle.get_label() for handle in handles], fontsize=8, frameon=False)
    for axis in (loss, accuracy):
        axis.legend(fontsize=8, frameon=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    return _save(figure, workdir, "learning_curves.png")


def prediction_sheet(
    workdir: str | os.PathLike[str], images: Sequence[np.ndarray], labels: np.ndarray, probabilities: np.ndarray,
    class_names: Sequence[str], ids: Sequence[str], columns: int = 8,
) -> pathlib.Path:  # fmt: skip
    """Draws the most confident wrong predictions above the most confident right ones; returns the picture's path.

    Args:
      workdir: the run's folder.
      images: uint8 [H, W, C] each.
      labels: int [n]; probabilities: float [n, C].
      class_names: by label.
      ids: shown under wrong predictions, so that the file can be found.
    """
    plt = _pyplot()
    predicted, confidence = probabilities.argmax(-1), probabilities.max(-1)
    order = np.argsort(-confidence)
    wrong = [i for i in order if predicted[i] != labels[i]]
    right = [i for i in range(len(labels)) if predicted[i] == labels[i]]
    sample = right[:: max(len(right) // (2 * columns), 1)][: 2 * columns]
    blocks = [
        (f"wrong: {len(wrong):,} of {len(labels):,}, the most confident first", wrong[: 2 * columns]),
        (f"right: {len(right):,} of {len(labels):,}, a sample", sample),
    ]
    blocks = [(title, block) for title, block in blocks if block]
    rows = sum(-(-len(block) // columns) for _, block in blocks)
    heights = [r for _, block in blocks for r in (0.22, *[1.0] * -(-len(block) // columns))]
    figure = plt.figure(figsize=(1.45 * columns, 1.8 * rows + 0.4 * len(blocks)))
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights, hspace=0.45, wspace=0.15,
                               left=0.02, right=0.98, top=0.99, bottom=0.03)  # fmt: skip
    line = 0
    for title, block in blocks:
        heading = figure.add_subplot(grid[line, :])
        heading.axis("off")
        heading.text(0.0, 0.5, title, fontsize=11, fontweight="bold", va="center")
        line += 1
        for start in range(0, len(block), columns):
            for column, i in enumerate(block[start : start + columns]):
                hit = predicted[i] == labels[i]
                axis = figure.add_subplot(grid[line, column])
                _picture(axis, images[i], f"{class_names[predicted[i]]} {100 * confidence[i]:.0f}%", hit)
                if not hit:
                    axis.set_xlabel(
                        f"is {class_names[labels[i]]}\n{_short(ids[i])}", fontsize=6, color=GREY, labelpad=2
                    )
            line += 1
    return _save(figure, workdir, "validation_predictions.png")


def _picture(axis: Any, image: np.ndarray, title: str, hit: bool) -> None:
    axis.imshow(image[..., 0] if image.shape[-1] == 1 else image, cmap="gray", interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=8, color="#1b7837" if hit else "#b2182b", pad=3)
    for spine in axis.spines.values():
        spine.set_color("#1b7837" if hit else "#b2182b")


def _line(
    axis: Any, lines: list[dict[str, Any]], name: str, colour: str, label: str, factor: float = 1.0, **style: Any
) -> None:
    points = [(line["step"], line[name] * factor) for line in lines if line.get(name) is not None]
    if not points:
        return
    if "marker" in style and len(points) > 30:
        style["markersize"] = 2.5
    elif "marker" in style:
        style["markersize"] = 4
    axis.plot(*zip(*points), color=colour, label=label, linewidth=1.3, **style)


def _short(text: str, length: int = 24) -> str:
    return text if len(text) <= length else "..." + text[-(length - 3) :]


def _save(figure: Any, workdir: str | os.PathLike[str], name: str) -> pathlib.Path:
    path = pathlib.Path(workdir) / "plots" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path


def _pyplot() -> Any:
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules and not os.environ.get("MPLBACKEND"):  # a notebook's choice stands
        matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt
