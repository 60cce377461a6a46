"""`load_weights` and `save_weights`: pretrained weights in and out."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from vit_tpu.errors import UserError
from vit_tpu.weights import big_vision, fit, huggingface, layout, timm, write
from vit_tpu.weights import source as sources
from vit_tpu.weights.files import opened
from vit_tpu.weights.layout import Canonical
from vit_tpu.weights.report import LoadReport, SaveReport
from vit_tpu.weights.tensors import Tensor, made, of_array, stacked


def load_weights(
    model: Any, path: str, source: str = "auto", allow: Sequence[str] = (), *, resize: str = "auto",
    source_grid: tuple[int, int] | None = None, verbose: bool = True,
) -> LoadReport:  # fmt: skip
    """Loads pretrained weights into a ViT, all of them or none.

    Position embeddings are resized to the model's grid and the patch embedding to its patch size. Everything else has
    to match: a tensor left over on either side, or of another shape, is an error.

    Args:
      model: a `vit_tpu.ViT`, of any pooling, unrolled or scan.
      path: .npz (big_vision, vision_transformer, ours), .safetensors (timm, transformers, ours), an .index.json of
        shards, or a folder with one of them; "file.npz:img" takes the sub-tree "img".
      source: "auto" recognises the family by its names; or big_vision, vision_transformer, timm, huggingface, keras.
      allow: globs of our paths or the file's names that may be left over ("head/*"), or a stated setting ("gelu"). A
        head that is not loaded starts afresh: kernel 0, bias `head_bias_init`.
      resize: kernel for position embeddings: "bilinear" (corners aligned, as big_vision), "bicubic_antialias" (timm),
        "bicubic" (DINOv2, transformers), "bilinear_antialias"; "auto" is the family's own.
      source_grid: (rows, columns) of the file's positions, where they are not a square.
      verbose: prints the report.

    Returns:
      What was loaded, resized, new, unused; the file's size and sha256.

    Raises:
      UserError: unreadable, a pickle, damaged, of no known family, or not fitting; the model is then unchanged.
    """
    allow = patterns(allow)
    with opened(path) as archive:
        found = sources.read(archive, source, model.variant.num_heads)
        plan = fit.plan(model, found, str(path), allow, resize, source_grid)
        archive.verify()
        fit.apply(plan)
        report = LoadReport(
            path=str(path),
            source=found.why,
            loaded=tuple(plan.loaded),
            resized=plan.resized,
            new=plan.new,
            unused=tuple(plan.unused),
            ignored=found.ignored,
            notes=tuple(plan.notes + _unstated(found, fit.settings_of(model))),
            bytes=archive.bytes(),
            sha256=archive.sha256(),
        )
    if verbose:
        print(report)
    return report


def save_weights(
    model: Any,
    path: str,
    format: str = "big_vision",
    allow: Sequence[str] = (),
    *,
    scan: bool = False,
    verbose: bool = False,
) -> SaveReport:
    """Writes a ViT's weights as another framework reads them.

    Args:
      model: a `vit_tpu.ViT`.
      path: a file, or a folder, which gets model.safetensors and, for timm and huggingface, the config.json they build
        the model from. big_vision writes .npz, keras (our own names) .npz or .safetensors, the others .safetensors.
      format: big_vision, timm, huggingface or keras.
      allow: globs of paths to leave out where the format has no place for them ("head/*").
      scan: big_vision: blocks stacked along axis 0.
      verbose: prints the report.

    Raises:
      UserError: unknown format, a file name that does not suit it, or a model that the format cannot hold.
    """
    report = save_canonical(canonical_of(model), fit.settings_of(model), path, format, patterns(allow), scan)
    if verbose:
        print(report)
    return report


def canonical_of(model: Any) -> Canonical:
    """Returns the model's weights by canonical path, read when needed; a fixed position table is "posemb" too."""
    canonical = {path: made(path, slot.shape, slot.read) for path, slot in fit.slots_of(model).items()}
    if model.positions.fixed is not None:
        canonical["posemb"] = of_array("posemb", model.positions.fixed)
    return canonical


def save_canonical(
    canonical: Canonical,
    settings: dict[str, Any],
    path: str,
    format_: str,
    allow: Sequence[str],
    scan: bool,
    notes: tuple[str, ...] = (),
) -> SaveReport:
    file = write.destination(path, format_)
    canonical = {path: tensor for path, tensor in canonical.items() if not fit.allowed([path], allow)}
    settings = _settings_after(settings, canonical)
    config: dict[str, Any] = {}
    fixed = settings["posemb"] == "sincos2d"
    if format_ in ("big_vision", "keras") and fixed:
        canonical.pop("posemb", None)
    if format_ == "big_vision":
        if settings.get("norm_position") == "after":
            raise UserError("big_vision has no norm after the pooling: save as timm or keras")
        tensors = big_vision.export(canonical, scan)
    elif format_ == "timm":
        tensors, config = timm.export(canonical, settings)
    elif format_ == "huggingface":
        tensors, config = huggingface.export(canonical, settings)
    else:
        tensors = dict(sorted((_stacked(canonical) if scan else canonical).items()))
    metadata = {"format": "pt", "vit_tpu": json.dumps({"settings": _plain_settings(settings), "config": config})}
    write.arrays(file, tensors, metadata)
    if config and pathlib.Path(path) != file:
        write.text(file.parent / "config.json", json.dumps(config, indent=1) + "\n")
    size, digest = write.facts(file)
    return SaveReport(
        path=str(file),
        format=format_,
        tensors=len(tensors),
        parameters=sum(t.size for t in tensors.values()),
        bytes=size,
        sha256=digest,
        config=config,
        notes=_notes(format_, settings) + notes,
    )


def _settings_after(settings: dict[str, Any], canonical: Canonical) -> dict[str, Any]:
    """The settings of what is left after `allow` took something out."""
    out = dict(settings)
    out["num_classes"] = canonical["head/kernel"].shape[-1] if "head/kernel" in canonical else 0
    out["registers"] = canonical["registers"].shape[1] if "registers" in canonical else 0
    out["layer_scale"] = 1.0 if "blocks/0/scale1" in canonical else None
    out["representation_size"] = canonical["pre_logits/kernel"].shape[1] if "pre_logits/kernel" in canonical else None
    if out["pool"] == "map" and "map/probe" not in canonical:
        out["pool"] = "gap"
    if out["pool"] == "tok" and "cls" not in canonical:
        out["pool"] = "gap"
    missing = [
        name
        for name in ("width", "depth", "mlp_dim", "num_heads", "patch_size", "channels", "image_size")
        if not out.get(name)
    ]
    if missing:
        raise UserError(f"the file does not say {', '.join(missing)}: give it (--set {missing[0]}=...)")
    return out


def _stacked(canonical: Canonical) -> dict[str, Tensor]:
    """Our own names with one entry for all blocks, as a scan model has them."""
    depth = layout.depth_of(canonical)
    out = {path: tensor for path, tensor in canonical.items() if not path.startswith("blocks/")}
    for path in [p.removeprefix("blocks/0/") for p in canonical if p.startswith("blocks/0/")]:
        out[f"blocks/{path}"] = stacked(f"blocks/{path}", [canonical[f"blocks/{i}/{path}"] for i in range(depth)])
    return out


def _unstated(found: sources.Source, settings: dict[str, Any]) -> list[str]:
    unknown = [f"{name} ({settings[name]})" for name in ("num_heads", "gelu", "epsilon") if name not in found.facts]
    return [f"the file does not say {', '.join(unknown)}: the model's own"] if unknown else []


def _notes(format_: str, settings: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    if format_ in ("timm", "huggingface"):
        notes.append("its config says images in [-1, 1] (mean 0.5, std 0.5), as vit_tpu trains")
    if format_ == "timm" and settings["epsilon"] != 1e-6:
        notes.append(f"timm's LayerNorm epsilon is 1e-6; this model has {settings['epsilon']:g}")
    if format_ == "big_vision" and (settings["gelu"], settings["epsilon"]) != ("tanh", 1e-6):
        notes.append(
            f"big_vision computes gelu=tanh, epsilon=1e-6; this model has {settings['gelu']}, {settings['epsilon']:g}"
        )
    return tuple(notes)


def _plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    names = (
        "width", "depth", "mlp_dim", "num_heads", "patch_size", "image_size", "channels", "num_classes", "pool",
        "posemb", "registers", "layer_scale", "representation_size", "gelu", "epsilon", "norm_position",
    )  # fmt: skip
    return {name: settings[name] for name in names if name in settings}


def patterns(allow: Sequence[str]) -> tuple[str, ...]:
    if isinstance(allow, str):
        raise UserError(f'allow is a list of globs such as ["{allow}"], not a text')
    return tuple(allow)
