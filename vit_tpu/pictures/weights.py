"""Pictures of what a ViT has learnt: patch filters and the similarity of position embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_tpu.models.vit import ViT


def filters(model: ViT, count: int = 28) -> np.ndarray:
    """Returns the principal components of the patch embedding as pictures (figure 7 of arXiv 2010.11929).

    Args:
      model: a ViT.
      count: how many, the strongest first; no more than width or pixels of a patch.

    Returns:
      uint8 [n, p, p, C], each stretched to its own extremes.
    """
    kernel = np.asarray(model.embedding.params["kernel"], np.float32)  # [p, p, C, D]
    size, _, channels, width = kernel.shape
    # Rows are the D filters; their principal directions in pixel space are the right singular vectors.
    flat = kernel.reshape(-1, width).T
    _, _, directions = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    shown = directions[:count].reshape(-1, size, size, channels)
    low = shown.min((1, 2, 3), keepdims=True)
    high = shown.max((1, 2, 3), keepdims=True)
    return np.round(255 * (shown - low) / np.maximum(high - low, 1e-12)).astype(np.uint8)


def position_similarity(model: ViT) -> np.ndarray | None:
    """Returns the cosine similarity of each patch's position embedding with all others: float32 [rows, columns, rows,
    columns]; None for a model whose positions are not learnt."""
    if model.settings["posemb"] != "learn":
        return None
    table = np.asarray(model.positions.params["posemb"], np.float32)[0]
    unit = table / np.maximum(np.linalg.norm(table, axis=-1, keepdims=True), 1e-12)
    rows = model.image_size[0] // model.variant.patch_size
    columns = model.image_size[1] // model.variant.patch_size
    return (unit @ unit.T).reshape(rows, columns, rows, columns)


def filter_sheet(model: ViT, count: int = 28) -> Any:
    """Returns a matplotlib figure of `filters`."""
    from matplotlib.figure import Figure

    pictures = filters(model, count)
    columns = min(7, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(columns, rows + 0.4), layout="constrained")
    figure.suptitle("principal components of the patch embedding", fontsize=9)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis in axes:
        axis.set_axis_off()
    for axis, picture in zip(figure.axes, pictures):
        axis.imshow(picture[..., 0] if picture.shape[-1] == 1 else picture, cmap="gray", interpolation="nearest")
    return figure


def similarity_sheet(model: ViT, most: int = 7) -> Any | None:
    """Returns a matplotlib figure of `position_similarity`, one small map for each of at most `most` x `most`
    positions spread over the grid; None for positions that are not learnt."""
    from matplotlib.figure import Figure

    similar = position_similarity(model)
    if similar is None:
        return None
    rows, columns = similar.shape[:2]
    chosen = [np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int)) for n in (rows, columns)]
    figure = Figure(figsize=(0.8 * len(chosen[1]) + 0.8, 0.8 * len(chosen[0]) + 0.4), layout="constrained")
    figure.suptitle("similarity of position embeddings", fontsize=9)
    axes = figure.subplots(len(chosen[0]), len(chosen[1]), squeeze=False)
    image: Any = None
    for i, row in enumerate(chosen[0]):
        for j, column in enumerate(chosen[1]):
            axes[i, j].set(xticks=[], yticks=[])
            image = axes[i, j].imshow(similar[row, column], vmin=-1, vmax=1, cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.7, label="cosine")
    return figure


def pixels(figure: Any, dpi: int = 100) -> np.ndarray:
    """Returns a figure drawn as uint8 [H, W, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
