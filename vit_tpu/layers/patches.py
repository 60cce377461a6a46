"""Images to patch tokens."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import base, target


def grid_of(image_size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Returns how many patches fit down and across.

    Raises:
      UserError: a side does not divide by the patch size; names the nearest sizes that do. (A VALID convolution would
        silently drop the last pixels.)
    """
    for side in image_size:
        if side < 1 or side % patch_size:
            below = side // patch_size * patch_size
            near = " or ".join(str(size) for size in (below, below + patch_size) if size > 0)
            raise UserError(
                f"image size {image_size[0]}x{image_size[1]} does not divide by patch size "
                f"{patch_size}: use {near} for {side}"
            )
    return image_size[0] // patch_size, image_size[1] // patch_size


class PatchEmbedding(base.ParamLayer):
    """Linear embedding of non-overlapping patches: a convolution whose stride is its kernel, as one matrix product.

    Args:
      width: D of the tokens.
      patch_size: p, side of a patch in pixels.
      channels: C of the images.
    """

    def __init__(self, width: int, patch_size: int, channels: int = 3, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.patch_size, self.channels = width, patch_size, channels

    def own_specs(self) -> dict[str, base.Spec]:
        p = self.patch_size
        return {
            "kernel": base.Spec((p, p, self.channels, self.width), base.lecun_normal, "kernel"),
            "bias": base.Spec((self.width,), base.zeros, "bias"),
        }

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns tokens [B, N, D] in the compute dtype, row by row, of images [B, H, W, C]."""
        dtype = tf.as_dtype(self.compute_dtype)
        p, (height, width) = self.patch_size, (x.shape[1], x.shape[2])
        rows, columns = grid_of((height, width), p)
        with tf.name_scope("embedding"):
            x = tf.reshape(tf.cast(x, dtype), [-1, rows, p, columns, p, self.channels])
            if target.on_tpu():
                # Contracted where it lies: neither patches nor a transposed image are written to memory.
                y = tf.einsum("bipjqc,pqcd->bijd", x, tf.cast(params["kernel"], dtype))
                return tf.reshape(y + tf.cast(params["bias"], dtype), [-1, rows * columns, self.width])
            x = tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, rows * columns, p * p * self.channels])
            return base.dense(x, tf.reshape(params["kernel"], [-1, self.width]), params["bias"], dtype)

    def get_config(self) -> dict[str, Any]:
        config = {"width": self.width, "patch_size": self.patch_size, "channels": self.channels}
        return {**super().get_config(), **config}
