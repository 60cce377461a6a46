"""The names of timm's VisionTransformer, in a .safetensors file.

Limits of what is the same function here: no pre-norm (CLIP), no q/k-norm, no SwiGLU, no distillation token; their
tensors stay unmatched, which is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_tpu.errors import UserError
from vit_tpu.weights.files import Archive
from vit_tpu.weights.layout import Canonical, Format, Rule, fused_rules, linear_rules, norm_rules, to_file
from vit_tpu.weights.tensors import Tensor, made

_BLOCK, _OURS = "blocks.{i}", "blocks/{i}"

RULES = (
    Rule("cls_token", ("cls",)),
    Rule("reg_token", ("registers",)),
    Rule("pos_embed", ("posemb",)),
    Rule("patch_embed.proj.weight", ("embedding/kernel",), "conv"),
    Rule("patch_embed.proj.bias", ("embedding/bias",)),
    *norm_rules(f"{_BLOCK}.norm1", f"{_OURS}/norm1"),
    *fused_rules(f"{_BLOCK}.attn.qkv", f"{_OURS}/attention", ("query", "key", "value")),
    *linear_rules(f"{_BLOCK}.attn.proj", f"{_OURS}/attention/out", "heads_out"),
    Rule(f"{_BLOCK}.ls1.gamma", (f"{_OURS}/scale1",)),
    *norm_rules(f"{_BLOCK}.norm2", f"{_OURS}/norm2"),
    *linear_rules(f"{_BLOCK}.mlp.fc1", f"{_OURS}/mlp/dense1"),
    *linear_rules(f"{_BLOCK}.mlp.fc2", f"{_OURS}/mlp/dense2"),
    Rule(f"{_BLOCK}.ls2.gamma", (f"{_OURS}/scale2",)),
    Rule("attn_pool.latent", ("map/probe",)),
    *linear_rules("attn_pool.q", "map/attention/query", "heads"),
    *fused_rules("attn_pool.kv", "map/attention", ("key", "value")),
    *linear_rules("attn_pool.proj", "map/attention/out", "heads_out"),
    *norm_rules("attn_pool.norm", "map/norm"),
    *linear_rules("attn_pool.mlp.fc1", "map/mlp/dense1"),
    *linear_rules("attn_pool.mlp.fc2", "map/mlp/dense2"),
    *linear_rules("pre_logits.fc", "pre_logits"),  # before timm 0.5
    *linear_rules("head", "head"),
)
# The same two tensors, named for where they act: before the pooling or after it.
BEFORE, AFTER = tuple(norm_rules("norm", "norm")), tuple(norm_rules("fc_norm", "norm"))
_GELUS = {"gelu": "erf", "gelu_tanh": "tanh", "gelu_pytorch_tanh": "tanh"}
_POOLS = {"token": "tok", "avg": "gap", "map": "map", "": "none"}


def facts(archive: Archive, canonical: Canonical) -> dict[str, Any]:
    """What the names and a config.json say: where the final norm acts, GELU, heads, pooling."""
    args = archive.config.get("model_args") or {}
    pooling = args.get("global_pool", archive.config.get("global_pool"))
    found: dict[str, Any] = {}
    if "norm/scale" in canonical:
        found["norm_position"] = "after" if canonical["norm/scale"].name.endswith("fc_norm.weight") else "before"
    if pooling in _POOLS:
        found["pool"] = _POOLS[pooling]
    elif found.get("norm_position") == "after" and "map/probe" not in canonical:
        found["pool"] = "gap"
    if isinstance(args.get("num_heads"), int):
        found["num_heads"] = args["num_heads"]
    if str(args.get("act_layer", "")) in _GELUS:
        found["gelu"] = _GELUS[str(args["act_layer"])]
    elif "siglip" not in str(archive.config.get("architecture", "")) and ("map/probe" not in canonical or args):
        found["gelu"] = "erf"  # timm's default; the SigLIP models, which pool by attention, come with either
    if found.get("pool") in ("gap", "map") and "cls" in canonical:
        # A class token that no pooling reads is one more register.
        found["registers"] = 1 + (canonical["registers"].shape[1] if "registers" in canonical else 0)
    return found


FORMAT = Format(
    name="timm",
    rules=(*RULES, *BEFORE, *AFTER),
    marks=(r"^blocks\.\d+\.attn\.qkv\.weight$",),
    # no_embed_class: 0; all tokens; DINOv2's own files: the class token only.
    prefixes=lambda cls, registers: (0, cls + registers, int(cls)),
    resize="bicubic_antialias",
    facts=facts,
    ignored=(r"^mask_token$",),
)


def export(canonical: Canonical, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the file's tensors, and the config.json that `timm.create_model("local-dir:...")` reads.

    A class token alone gets a row (0) in the position table, as timm's ViTs have it by default; with registers the
    table is for patches only (no_embed_class=True).
    """
    settings = dict(settings)
    if settings.get("representation_size"):
        raise UserError("timm has no layer before the classifier any more: save as big_vision, huggingface or keras")
    canonical = dict(canonical)
    no_embed_class = not (settings["pool"] == "tok" and not settings["registers"])
    if not no_embed_class and "posemb" in canonical:
        table = canonical["posemb"]
        shape = (1, table.shape[1] + 1, table.shape[2])
        canonical["posemb"] = made(
            "pos_embed", shape, lambda: np.concatenate([np.zeros((1, 1, shape[2]), np.float32), table.read()], 1)
        )
    after = settings.get("norm_position") == "after"
    tensors = to_file(canonical, (*RULES, *(AFTER if after else BEFORE)), "timm")
    return tensors, _config(settings, no_embed_class, after)


def _config(settings: dict[str, Any], no_embed_class: bool, after: bool) -> dict[str, Any]:
    pool = {ours: theirs for theirs, ours in _POOLS.items()}[settings["pool"]]
    height, width = settings["image_size"]
    args = {
        "img_size": height if height == width else [height, width], "patch_size": settings["patch_size"],
        "in_chans": settings["channels"], "embed_dim": settings["width"], "depth": settings["depth"],
        "num_heads": settings["num_heads"], "mlp_ratio": settings["mlp_dim"] / settings["width"],
        "init_values": settings["layer_scale"], "class_token": settings["pool"] == "tok",
        "reg_tokens": settings["registers"], "no_embed_class": no_embed_class, "fc_norm": after, "global_pool": pool,
        "act_layer": "gelu_tanh" if settings["gelu"] == "tanh" else "gelu",
    }  # fmt: skip
    return {
        "architecture": "vit_base_patch16_224", "num_classes": settings["num_classes"], "global_pool": pool,
        "num_features": settings["width"], "model_args": args,
        "pretrained_cfg": {
            "num_classes": settings["num_classes"], "input_size": [settings["channels"], height, width],
            "fixed_input_size": True, "mean": [0.5] * settings["channels"], "std": [0.5] * settings["channels"],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }  # fmt: skip
