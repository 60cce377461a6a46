"""Turns weight files into others, and says what they are, without building a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_tpu.errors import UserError
from vit_tpu.weights import fit, layout, resample, write
from vit_tpu.weights import source as sources
from vit_tpu.weights.files import opened
from vit_tpu.weights.io import patterns, save_canonical
from vit_tpu.weights.layout import Canonical
from vit_tpu.weights.report import SaveReport
from vit_tpu.weights.tensors import made


def convert(
    path: str,
    to: str,
    format: str,
    source: str = "auto",
    allow: Sequence[str] = (),
    *,
    settings: dict[str, Any] | None = None,
    resize: str = "auto",
    source_grid: tuple[int, int] | None = None,
    scan: bool = False,
) -> SaveReport:
    """Turns one weight file into another, tensor by tensor, without building a model.

    Args:
      path, source, resize, source_grid: as in `load_weights`.
      to, format, scan: as in `save_weights`.
      allow: globs of paths or the file's names to leave out.
      settings: what the file does not say or should become: num_heads, gelu, epsilon, pool, image_size (resizes the
        position embeddings), patch_size (resizes the patch embedding).

    Raises:
      UserError: as in `load_weights` and `save_weights`.
    """
    allow, wanted = patterns(allow), dict(settings or {})
    write.destination(to, format)
    with opened(path) as archive:
        found = sources.read(archive, source, wanted.get("num_heads"))
        unknown = [name for name in found.unknown if not fit.allowed([name], allow)]
        if unknown:
            raise UserError(
                f"{path} ({found.format.name}) holds what vit_tpu has no place for: {layout.shown(unknown)}; "
                f"leave it out with allow={layout.allow_patterns(unknown)}"
            )
        canonical, grid = sources.settle(found, source_grid)
        _check_whole(canonical)
        stated = found.facts.get("num_heads")
        if stated is not None and wanted.get("num_heads", stated) != stated:
            raise UserError(f"{path} has num_heads={stated}; num_heads={wanted['num_heads']} would be another function")
        settings = {"gelu": "tanh", "epsilon": 1e-6, "norm_position": "before", **found.facts, **wanted}
        if settings["pool"] in ("gap", "map") and "cls" in canonical and not fit.allowed(["cls"], allow):
            canonical = _token_to_register(canonical)
        kernel = found.format.resize if resize == "auto" else resize
        resample.check_kernel(kernel)
        canonical, settings = _reshaped(canonical, settings, grid, wanted, kernel)
        assumed = [f"{n}={settings[n]}" for n in ("gelu", "epsilon") if n not in found.facts and n not in wanted]
        archive.verify()
        notes = (f"the file does not say {', '.join(assumed)}: assumed",) if assumed else ()
        return save_canonical(canonical, settings, to, format, allow, scan, notes)


def describe(path: str, source: str = "auto") -> dict[str, Any]:
    """Returns the arguments that build a ViT for a weight file, as far as the file states them.

    Args:
      path, source: as in `load_weights`.
    """
    with opened(path) as archive:
        found = sources.read(archive, source, heads=1)  # what is described here does not depend on it
        _, grid = sources.settle(found, None)
        facts = dict(found.facts)
        if grid and "patch_size" in facts:
            facts.setdefault("image_size", [grid[0] * facts["patch_size"], grid[1] * facts["patch_size"]])
        return facts


def _check_whole(canonical: Canonical) -> None:
    """A file with holes would become another file with holes."""
    layers = [
        "norm1",
        "norm2",
        *(f"attention/{name}" for name in ("query", "key", "value", "out")),
        "mlp/dense1",
        "mlp/dense2",
    ]
    expected = ["embedding/kernel", "embedding/bias", "norm/scale", "norm/bias"]
    for index in range(layout.depth_of(canonical)):
        for layer in layers:
            first = "scale" if layer.startswith("norm") else "kernel"
            expected += [f"blocks/{index}/{layer}/{first}", f"blocks/{index}/{layer}/bias"]
    missing = [path for path in expected if path not in canonical]
    if missing:
        raise UserError(f"the file lacks {layout.shown(missing)}")


def _reshaped(
    canonical: Canonical,
    settings: dict[str, Any],
    grid: tuple[int, int] | None,
    wanted: dict[str, Any],
    kernel: str,
) -> tuple[Canonical, dict[str, Any]]:
    """Resizes to the wanted image_size and patch_size."""
    canonical, out = dict(canonical), {**settings, **wanted}
    patch = out.get("patch_size")
    embedding, table = canonical.get("embedding/kernel"), canonical.get("posemb")
    if embedding is not None and patch and embedding.shape[0] != patch:
        shape = (patch, patch, *embedding.shape[2:])
        canonical["embedding/kernel"] = embedding.mapped(shape, lambda x: resample.patch_kernel(x, patch))
    size = wanted.get("image_size")
    if size is None and grid is not None and patch:
        size = [grid[0] * patch, grid[1] * patch]
    size = size if size is not None else settings.get("image_size")
    if size is not None:
        size = [size, size] if isinstance(size, int) else list(size)
        out["image_size"] = size
        if patch and (size[0] % patch or size[1] % patch):
            raise UserError(f"image_size {size[0]}x{size[1]} does not divide by patch_size {patch}")
        if table is not None and grid is not None and patch:
            old, new = grid, (size[0] // patch, size[1] // patch)
            shape = (1, new[0] * new[1], table.shape[2])
            canonical["posemb"] = table.mapped(shape, lambda x: resample.posemb(x, old, new, kernel))
    return canonical, out


def _token_to_register(canonical: Canonical) -> Canonical:
    parts = [canonical[name] for name in ("cls", "registers") if name in canonical]
    shape = (1, sum(part.shape[1] for part in parts), parts[0].shape[2])
    token = made("registers", shape, lambda: np.concatenate([part.read() for part in parts], 1))
    return {**{path: t for path, t in canonical.items() if path != "cls"}, "registers": token}
