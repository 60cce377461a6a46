"""The published ViT shapes, their parameter counts and their FLOPs."""

from __future__ import annotations

import dataclasses

from vit_tpu.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Variant:
    """The shape of a ViT: what `"G/14"` stands for."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int


# Table 2 of arXiv 2106.04560 and big_vision's `decode_variant`; "s" is in the paper only.
SHAPES: dict[str, tuple[int, int, int, int]] = {
    # name      width depth mlp_dim heads
    "mu": (32, 1, 128, 2),
    "s": (256, 6, 1024, 8),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}

# The eleven of the paper, and what else has been published or trained under these names.
VARIANTS: tuple[str, ...] = (
    "s/28", "s/16", "S/32", "Ti/16", "B/32", "S/16", "B/28", "B/16", "L/16", "g/14", "G/14",
    "mu/16", "S/14", "M/16", "B/14", "B/8", "L/14", "L/32", "So400m/14", "So400m/16", "H/14", "g/16", "g-opt/14",
    "G-opt/14", "G/16", "e/14",
)  # fmt: skip


def variant(name: str) -> Variant:
    """Returns the shape that a name such as "G/14" or "So400m/14" stands for; any patch size may follow the slash.

    Args:
      name: shape and patch size, "B/16". Case tells "s", "S", "g" and "G" apart.

    Raises:
      UserError: unknown shape, or no patch size after the slash; names the nearest variant.
    """
    shape, slash, patch = name.partition("/")
    if shape in SHAPES and patch.isascii() and patch.isdigit() and int(patch) > 0:
        return Variant(*SHAPES[shape], patch_size=int(patch))
    if shape in SHAPES:
        raise UserError(f'model "{name}" names no patch size: write "{shape}/16" or another number after the slash')
    raise UserError(
        f'unknown model "{name}"{nearest(name, VARIANTS)}; shapes are {", ".join(SHAPES)}, each followed by /patch_size'
    )


def flops(
    shape: Variant,
    *,
    image_size: int | tuple[int, int],
    num_classes: int = 0,
    pool: str = "map",
    channels: int = 3,
    registers: int = 0,
    representation_size: int | None = None,
) -> int:
    """Returns the FLOPs of one image's forward pass, counted as the paper does: two per multiply-accumulate of the
    matrix products.

    A training step costs three times that. Sides that do not divide by the patch size count whole patches only, as the
    paper's figures do.

    Args:
      shape: width, depth and so on.
      image_size: side, or height and width, in pixels.
      num_classes: 0 for no classifier.
      pool: "tok", "gap", "map" or "none".
      channels, registers, representation_size: as in `ViT`.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    patches = (height // shape.patch_size) * (width // shape.patch_size)
    tokens, d, m = patches + registers + (pool == "tok"), shape.width, shape.mlp_dim
    stem = patches * shape.patch_size**2 * channels * d
    block = 4 * tokens * d * d + 2 * tokens * tokens * d + 2 * tokens * d * m
    head = 0
    if pool == "map":
        head += 2 * patches * d * d + 2 * d * d + 2 * patches * d + 2 * d * m
    features = d
    if representation_size:
        head, features = head + d * representation_size, representation_size
    return 2 * (stem + shape.depth * block + head + features * num_classes)


def parameter_count(
    shape: Variant,
    *,
    image_size: int | tuple[int, int],
    num_classes: int = 0,
    pool: str = "map",
    posemb: str = "learn",
    channels: int = 3,
    registers: int = 0,
    layer_scale: bool = False,
    representation_size: int | None = None,
) -> int:
    """Returns the number of parameters of a `ViT` without building it; arguments as for `flops`."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    patches = (height // shape.patch_size) * (width // shape.patch_size)
    d, m = shape.width, shape.mlp_dim
    norm, attention, mlp = 2 * d, 4 * (d * d + d), d * m + m + m * d + d
    total = shape.patch_size**2 * channels * d + d
    total += d * ((posemb == "learn") * patches + (pool == "tok") + registers)
    total += shape.depth * (2 * norm + attention + mlp + 2 * d * layer_scale) + norm
    if pool == "map":
        total += d + attention + norm + mlp
    features = d
    if representation_size:
        total, features = total + (d + 1) * representation_size, representation_size
    return total + (features + 1) * num_classes if num_classes else total
