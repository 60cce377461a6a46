"""Position embeddings and the extra tokens in front of the patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.layers import base

POSEMBS = ("learn", "sincos2d")


def sincos2d(grid: tuple[int, int], width: int, temperature: float = 10_000.0) -> np.ndarray:
    """Fixed sine-cosine position embedding of a grid (MoCo v3, arXiv 2104.02057; as in big_vision).

    Args:
      grid: rows and columns of patches.
      width: D, a multiple of 4: sines and cosines of x, then of y.
      temperature: the longest wavelength over 2 pi.

    Returns:
      float32 [1, rows * columns, D].

    Raises:
      UserError: width is not a multiple of 4.
    """
    if width % 4:
        raise UserError(f"sincos2d positions need a width that divides by 4, not {width}")
    y, x = np.mgrid[: grid[0], : grid[1]]
    omega = 1.0 / temperature ** (np.arange(width // 4) / (width // 4 - 1))
    angles_y, angles_x = np.outer(y.ravel(), omega), np.outer(x.ravel(), omega)
    parts = [np.sin(angles_x), np.cos(angles_x), np.sin(angles_y), np.cos(angles_y)]
    return np.concatenate(parts, axis=1).astype(np.float32)[None]


class PositionsAndTokens(base.ParamLayer):
    """Adds position embeddings to patch tokens, then puts a class token and registers in front of them.

    Args:
      grid: rows and columns of patches.
      width: D.
      posemb: "learn" (start N(0, 1/sqrt(D))) or "sincos2d" (fixed, no weights).
      class_token: whether a learnt token (start 0) comes first.
      registers: number of register tokens (Darcet et al., arXiv 2309.16588) after it.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        width: int,
        posemb: str = "learn",
        class_token: bool = False,
        registers: int = 0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if posemb not in POSEMBS:
            raise UserError(f'posemb="{posemb}" is not one of {", ".join(POSEMBS)}')
        self.grid, self.width, self.posemb = (grid[0], grid[1]), width, posemb
        self.class_token, self.registers = class_token, registers
        self.fixed = sincos2d(self.grid, width) if posemb == "sincos2d" else None

    @property
    def num_prefix(self) -> int:
        return int(self.class_token) + self.registers

    def own_specs(self) -> dict[str, base.Spec]:
        specs = {}
        if self.fixed is None:
            shape = (1, self.grid[0] * self.grid[1], self.width)
            specs["posemb"] = base.Spec(shape, base.normal(self.width**-0.5), "posemb")
        if self.class_token:
            specs["cls"] = base.Spec((1, 1, self.width), base.zeros, "token")
        if self.registers:
            specs["registers"] = base.Spec((1, self.registers, self.width), base.normal(1e-6), "token")
        return specs

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns [B, prefix + N, D] of patch tokens `x` [B, N, D], in the dtype of `x`."""
        with tf.name_scope("positions"):
            x = x + tf.cast(params["posemb"] if self.fixed is None else self.fixed, x.dtype)
            front = [tf.cast(params[name], x.dtype) for name in ("cls", "registers") if name in params]
            if not front:
                return x
            copies = [tf.broadcast_to(token, [tf.shape(x)[0], *token.shape[1:]]) for token in front]
            return tf.concat([*copies, x], axis=1)

    def get_config(self) -> dict[str, Any]:
        names = ("grid", "width", "posemb", "class_token", "registers")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
