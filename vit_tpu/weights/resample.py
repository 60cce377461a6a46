"""Position embeddings for another grid and patch embeddings for another patch size.

Every kernel is a matrix [new, old] per axis, computed in float64, so that each can be checked by eye and none depends
on an image library's idea of a default.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from vit_tpu.errors import UserError, nearest


def corners_matrix(old: int, new: int) -> np.ndarray:
    """Linear interpolation that keeps the corners in place: `scipy.ndimage.zoom(order=1)`, as big_vision resizes."""
    at = np.zeros(1) if new == 1 else np.arange(new) * ((old - 1) / (new - 1))
    low = np.clip(np.floor(at).astype(int), 0, max(old - 2, 0))
    matrix = np.zeros((new, old))
    rows = np.arange(new)
    matrix[rows, low] += 1 - (at - low)
    matrix[rows, np.minimum(low + 1, old - 1)] += at - low
    return matrix


def half_pixel_matrix(
    old: int,
    new: int,
    kernel: Callable[[np.ndarray], np.ndarray],
    support: float,
    antialias: bool,
    clamp: bool = False,
) -> np.ndarray:
    """Interpolation of pixels seen as little squares (align_corners=False).

    Args:
      old, new: lengths.
      kernel: weight at a distance in old pixels; zero beyond `support`.
      antialias: widens the kernel when shrinking, so that every old pixel counts.
      clamp: pixels beyond the edge repeat the edge's; otherwise they are left out and the rest rescaled.
    """
    scale = old / new
    width = max(scale, 1.0) if antialias else 1.0
    matrix = np.zeros((new, old))
    for row in range(new):
        centre = (row + 0.5) * scale - 0.5
        reach = support * width
        taps = np.arange(math.ceil(centre - reach), math.floor(centre + reach) + 1)
        weights = kernel(np.abs(taps - centre) / width)
        if clamp:
            np.add.at(matrix[row], np.clip(taps, 0, old - 1), weights)
        else:
            inside = (taps >= 0) & (taps < old)
            matrix[row, taps[inside]] = weights[inside]
        matrix[row] /= matrix[row].sum()
    return matrix


def triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    """Keys' cubic convolution: a = -0.5 (PIL, antialiased PyTorch) or -0.75 (OpenCV, PyTorch's plain bicubic)."""

    def kernel(x: np.ndarray) -> np.ndarray:
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0.0))

    return kernel


# Who uses which: "bilinear" big_vision and vision_transformer; "bicubic_antialias" timm; "bicubic" DINOv2 and
# transformers; "bilinear_antialias" jax.image.resize("linear").
KERNELS: dict[str, Callable[[int, int], np.ndarray]] = {
    "bilinear": corners_matrix,
    "bilinear_antialias": lambda old, new: half_pixel_matrix(old, new, triangle, 1, antialias=True),
    "bicubic": lambda old, new: half_pixel_matrix(old, new, cubic(-0.75), 2, antialias=False, clamp=True),
    "bicubic_antialias": lambda old, new: half_pixel_matrix(old, new, cubic(-0.5), 2, antialias=True),
}


def check_kernel(kernel: str) -> None:
    if kernel not in KERNELS:
        raise UserError(f'resize kernel "{kernel}"{nearest(kernel, KERNELS)} is not one of {", ".join(KERNELS)}')


def posemb(table: np.ndarray, old: tuple[int, int], new: tuple[int, int], kernel: str = "bilinear") -> np.ndarray:
    """Returns position embeddings of another grid.

    Args:
      table: float [1, old rows * old columns, D], patches only (no class token).
      old, new: (rows, columns).
      kernel: one of `KERNELS`. "bilinear" keeps the corners in place, as the ViT papers' code does.

    Returns:
      float32 [1, new rows * new columns, D]; the table itself if the grids are equal.

    Raises:
      UserError: unknown kernel, or a table that does not hold the old grid.
    """
    check_kernel(kernel)
    if table.shape[1] != old[0] * old[1]:
        raise UserError(f"{table.shape[1]} position embeddings do not make a grid of {old[0]}x{old[1]}")
    if tuple(old) == tuple(new):
        return table
    make = KERNELS[kernel]
    grid = table.astype(np.float64).reshape(*old, table.shape[2])
    grid = np.einsum("ir,rcd->icd", make(old[0], new[0]), grid)
    grid = np.einsum("jc,icd->ijd", make(old[1], new[1]), grid)
    return grid.reshape(1, new[0] * new[1], -1).astype(np.float32)


def patch_kernel(kernel: np.ndarray, size: int) -> np.ndarray:
    """Returns a patch embedding for another patch size by pseudo-inverse resize (FlexiViT, arXiv 2212.08013, 3.4).

    Chosen so that the tokens of an enlarged image equal those of the image: with B the bilinear resize of a patch,
    the new kernel is pinv(B^T) w. For squares B is a Kronecker product, and so is its pseudo-inverse.

    Args:
      kernel: float [p, p, C, D].
      size: the new p.

    Returns:
      float32 [size, size, C, D].
    """
    if kernel.shape[0] == size:
        return kernel
    resize = half_pixel_matrix(kernel.shape[0], size, triangle, 1, antialias=False, clamp=True)
    inverse = np.linalg.pinv(resize.T)
    return np.einsum("ir,js,rscd->ijcd", inverse, inverse, kernel.astype(np.float64)).astype(np.float32)


def prefix_rows(rows: int, candidates: tuple[int, ...], patches: int | None = None) -> int:
    """Returns how many rows at the front of a position table belong to tokens and not to patches.

    Decided by exact squares, never by remainders (196 = 14 x 14 has none, 197 has one), and only among what the file's
    tokens allow.

    Args:
      rows: length of the table.
      candidates: numbers of prefix rows the file's layout allows.
      patches: number of patches if it is known.

    Raises:
      UserError: none or several fit.
    """
    fits = [n for n in candidates if rows - n > 0 and _fits(rows - n, patches)]
    if len(set(fits)) == 1:
        return fits[0]
    why = "fit a square grid" if patches is None else f"leave {patches} patches"
    options = " or ".join(map(str, sorted(set(candidates))))
    raise UserError(
        f"a position table of {rows} rows with {options} of them for tokens: {'several' if fits else 'none'} {why}; "
        "give source_grid=(rows, columns)"
    )


def _fits(patches: int, known: int | None) -> bool:
    return patches == known if known is not None else math.isqrt(patches) ** 2 == patches
