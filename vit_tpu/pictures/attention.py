"""Where a model looks: attention rollout (arXiv 2005.00928) and the attention of the MAP head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import base
from vit_tpu.layers.patches import grid_of
from vit_tpu.models.rebuild import float32_copy
from vit_tpu.models.vit import ViT

KINDS = ("rollout", "map")


def attention_maps(model: ViT, images: np.ndarray | tf.Tensor, kind: str = "rollout") -> np.ndarray:
    """Returns how much each patch counts for the pooled features of each image: float32 [B, rows, columns], sums of 1.

    Args:
      model: the network; computed in float32 whatever its policy.
      images: [B, H, W, C] in [-1, 1], of the model's size.
      kind: "rollout" multiplies the attention of all blocks, each averaged over the heads and mixed half and half
        with the identity for the residual (Abnar and Zuidema 2020), and then follows the pooling: the class token's
        row, the mean over the patches, or the MAP probe's attention. "map" is the attention of the MAP head alone,
        averaged over its heads.

    Raises:
      UserError: kind="map" without a MAP head, an unknown kind, or a model that does not pool.
    """
    if kind not in KINDS:
        raise UserError(f'kind is "{kind}": use {" or ".join(KINDS)}')
    if kind == "map" and model.pool != "map":
        raise UserError(f'this model pools by "{model.pool}", so it has no MAP attention: use rollout')
    if model.pool == "none":
        raise UserError("this model has an output for each token (pool=none), so no single place it looks at")
    copy = float32_copy(model)
    rollout, tokens = _rollout(copy, tf.cast(images, tf.float32))
    prefix = copy.positions.num_prefix
    if copy.map is not None:
        looks = tf.reduce_mean(copy.map.probabilities(copy.map.params, tokens[:, prefix:]), 1)  # [B, patches]
        found = looks if kind == "map" else tf.einsum("bn,bnm->bm", looks, rollout[:, prefix:])[:, prefix:]
    elif copy.pool == "tok":
        found = rollout[:, 0, prefix:]
    else:
        found = tf.reduce_mean(rollout[:, prefix:, prefix:], 1)
    found = found / tf.reduce_sum(found, -1, keepdims=True)
    return tf.reshape(found, [-1, *grid_of(copy.image_size, copy.variant.patch_size)]).numpy()


def _rollout(model: ViT, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns [B, N, N] (row: a token of the output, column: of the input; rows sum to 1) and the final tokens."""
    x = model.positions.forward(model.positions.params, model.embedding.forward(model.embedding.params, images))
    identity = tf.eye(x.shape[1])
    rollout = tf.broadcast_to(identity, [tf.shape(x)[0], *identity.shape])
    for block in model.blocks:
        normal = block.norm1.forward(base.below(block.params, "norm1"), x)
        weights = block.attention.weights_of(base.below(block.params, "attention"), normal)
        rollout = tf.matmul(0.5 * (tf.reduce_mean(weights, 1) + identity), rollout)
        x = block.forward(block.params, x)
    if model.settings["norm_position"] == "before":
        x = model.norm.forward(model.norm.params, x)
    return rollout, x


def overlay(image: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """Returns the uint8 [H, W, 3] picture with bright and coloured where the attention is, and dimmed elsewhere.

    Args:
      image: uint8 [H, W, 1 or 3].
      attention: float [rows, columns]; its own smallest and largest value are the ends of the colour scale.
    """
    import matplotlib

    height, width = image.shape[:2]
    spread = attention - attention.min()
    spread = spread / max(float(spread.max()), 1e-12)
    smooth = tf.image.resize(spread[..., None], (height, width), "bicubic").numpy()[..., 0].clip(0, 1)
    colours = matplotlib.colormaps["inferno"](smooth)[..., :3]
    grey = image.mean(-1, keepdims=True).repeat(3, -1) / 255
    return np.round(255 * (0.45 * grey + 0.55 * colours)).astype(np.uint8)


def attention_figure(
    images: Sequence[np.ndarray], attentions: np.ndarray, captions: Sequence[str], title: str = "", *,
    pairs: int = 4, font: int = 8,
) -> Any:  # fmt: skip
    """Returns a matplotlib figure with each image beside its overlay.

    Args:
      images: uint8 [H, W, C].
      attentions: [n, rows, columns].
      captions: one for each image.
      title: above all.
      pairs: in a row.
      font: size of the captions in points, where a picture is 2.2 inches wide.
    """
    from matplotlib.figure import Figure

    columns = min(pairs, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.5 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, (image, attention, caption) in enumerate(zip(images, attentions, captions)):
        left, right = axes[i // columns, 2 * (i % columns)], axes[i // columns, 2 * (i % columns) + 1]
        left.imshow(image.squeeze(), cmap="gray" if image.shape[-1] == 1 else None)
        right.imshow(overlay(image, attention))
        left.set_title(caption, fontsize=font, loc="left", parse_math=False)
    if title:
        figure.suptitle(title, fontsize=font + 2, parse_math=False)
    return figure
