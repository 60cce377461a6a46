"""The names of transformers' ViT, DINOv2 (with and without registers) and SigLIP vision tower, in .safetensors files.

Names as the files have them (transformers 5 renames inside, but reads and writes these).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_tpu.errors import UserError
from vit_tpu.weights.files import Archive
from vit_tpu.weights.layout import (
    Canonical,
    Format,
    Rule,
    allow_patterns,
    fused_rules,
    linear_rules,
    norm_rules,
    to_file,
)  # fmt: skip
from vit_tpu.weights.tensors import Tensor, made

_OURS = "blocks/{i}"
_GELUS = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
_NAMES = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}


def _attention(file: str, names: dict[str, str], out: str) -> list[Rule]:
    rules = linear_rules(f"{file}.{out}", f"{_OURS}/attention/out", "heads_out")
    for theirs, ours in names.items():
        rules += linear_rules(f"{file}.{theirs}", f"{_OURS}/attention/{ours}", "heads")
    return rules


_SELF = {"attention.attention.query": "query", "attention.attention.key": "key", "attention.attention.value": "value"}

VIT_RULES = (
    Rule("embeddings.cls_token", ("cls",)),
    Rule("embeddings.position_embeddings", ("posemb",)),
    Rule("embeddings.patch_embeddings.projection.weight", ("embedding/kernel",), "conv"),
    Rule("embeddings.patch_embeddings.projection.bias", ("embedding/bias",)),
    *norm_rules("encoder.layer.{i}.layernorm_before", f"{_OURS}/norm1"),
    *_attention("encoder.layer.{i}", _SELF, "attention.output.dense"),
    *norm_rules("encoder.layer.{i}.layernorm_after", f"{_OURS}/norm2"),
    *linear_rules("encoder.layer.{i}.intermediate.dense", f"{_OURS}/mlp/dense1"),
    *linear_rules("encoder.layer.{i}.output.dense", f"{_OURS}/mlp/dense2"),
    *norm_rules("layernorm", "norm"),
    *linear_rules("pooler.dense", "pre_logits"),
    *linear_rules("classifier", "head"),
)

DINOV2_RULES = (
    Rule("embeddings.cls_token", ("cls",)),
    Rule("embeddings.register_tokens", ("registers",)),
    Rule("embeddings.position_embeddings", ("posemb",)),
    Rule("embeddings.patch_embeddings.projection.weight", ("embedding/kernel",), "conv"),
    Rule("embeddings.patch_embeddings.projection.bias", ("embedding/bias",)),
    *norm_rules("encoder.layer.{i}.norm1", f"{_OURS}/norm1"),
    *_attention("encoder.layer.{i}", _SELF, "attention.output.dense"),
    Rule("encoder.layer.{i}.layer_scale1.lambda1", (f"{_OURS}/scale1",)),
    *norm_rules("encoder.layer.{i}.norm2", f"{_OURS}/norm2"),
    *linear_rules("encoder.layer.{i}.mlp.fc1", f"{_OURS}/mlp/dense1"),
    *linear_rules("encoder.layer.{i}.mlp.fc2", f"{_OURS}/mlp/dense2"),
    Rule("encoder.layer.{i}.layer_scale2.lambda1", (f"{_OURS}/scale2",)),
    *norm_rules("layernorm", "norm"),
    *linear_rules("classifier", "head"),
)

SIGLIP_RULES = (
    Rule("embeddings.position_embedding.weight", ("posemb",), "row"),
    Rule("embeddings.patch_embedding.weight", ("embedding/kernel",), "conv"),
    Rule("embeddings.patch_embedding.bias", ("embedding/bias",)),
    *norm_rules("encoder.layers.{i}.layer_norm1", f"{_OURS}/norm1"),
    *_attention("encoder.layers.{i}.self_attn", {"q_proj": "query", "k_proj": "key", "v_proj": "value"}, "out_proj"),
    *norm_rules("encoder.layers.{i}.layer_norm2", f"{_OURS}/norm2"),
    *linear_rules("encoder.layers.{i}.mlp.fc1", f"{_OURS}/mlp/dense1"),
    *linear_rules("encoder.layers.{i}.mlp.fc2", f"{_OURS}/mlp/dense2"),
    *norm_rules("post_layernorm", "norm"),
    Rule("head.probe", ("map/probe",)),
    *fused_rules("head.attention", "map/attention", ("query", "key", "value"), ".in_proj_"),
    *linear_rules("head.attention.out_proj", "map/attention/out", "heads_out"),
    *norm_rules("head.layernorm", "map/norm"),
    *linear_rules("head.mlp.fc1", "map/mlp/dense1"),
    *linear_rules("head.mlp.fc2", "map/mlp/dense2"),
    *linear_rules("classifier", "head"),
)


def facts(gelu: str, epsilon: float) -> Any:
    """Returns a reader of config.json; without one, GELU is the family's."""

    def read(archive: Archive, canonical: Canonical) -> dict[str, Any]:
        config = archive.config.get("vision_config") or archive.config
        if "hidden_size" not in config:
            return {"gelu": gelu}
        found: dict[str, Any] = {"epsilon": config.get("layer_norm_eps", epsilon)}
        act = config.get("hidden_act", _NAMES[gelu])
        if act not in _GELUS:
            raise UserError(f'{archive.path} has hidden_act "{act}"; only {", ".join(_GELUS)} exist here')
        found["gelu"] = _GELUS[act]
        if isinstance(config.get("num_attention_heads"), int):
            found["num_heads"] = config["num_attention_heads"]
        return found

    return read


VIT = Format(
    name="huggingface/vit", rules=VIT_RULES, marks=(r"^encoder\.layer\.\d+\.layernorm_before\.",),
    prefixes=lambda cls, registers: (1,), resize="bicubic", facts=facts("erf", 1e-12),
    ignored=(r"^embeddings\.mask_token$",), strip=("vit.",),
)  # fmt: skip
DINOV2 = Format(
    name="huggingface/dinov2", rules=DINOV2_RULES, marks=(r"^encoder\.layer\.\d+\.norm1\.",),
    prefixes=lambda cls, registers: (1,), resize="bicubic", facts=facts("erf", 1e-6),
    ignored=(r"^embeddings\.mask_token$",), strip=("dinov2.", "dinov2_with_registers."),
)  # fmt: skip
SIGLIP = Format(
    name="huggingface/siglip", rules=SIGLIP_RULES, marks=(r"^encoder\.layers\.\d+\.layer_norm1\.",),
    prefixes=lambda cls, registers: (0,), resize="bicubic", facts=facts("tanh", 1e-6),
    ignored=(r"^embeddings\.position_ids$",), strip=("vision_model.",),
)  # fmt: skip
FORMATS = (VIT, DINOV2, SIGLIP)


def narrowed(canonical: Canonical) -> Canonical:
    """Takes the class token's half of a DINOv2 classifier if the other, for the mean of the patches, is 0."""
    kernel, norm = canonical.get("head/kernel"), canonical.get("norm/scale")
    if kernel is None or norm is None or kernel.shape[0] != 2 * norm.shape[0]:
        return canonical
    width = norm.shape[0]
    if np.any(kernel.part(width, 2 * width).read()):
        return canonical
    return {**canonical, "head/kernel": kernel.part(0, width)}


def export(canonical: Canonical, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and config.json of the transformers model that computes the same.

    Class token: ViT, or DINOv2 when there are registers or layer scale. MAP or mean pooling: the SigLIP vision tower,
    whose image classifier reads the mean.

    Raises:
      UserError: no transformers model computes this.
    """
    pool, classes = settings["pool"], settings["num_classes"]
    if settings.get("norm_position") == "after":
        raise UserError("no transformers ViT normalises after the pooling: save as timm or keras")
    height, width = settings["image_size"]
    if height != width:
        raise UserError(
            f"transformers' models need square images, not {height}x{width}: save as timm, big_vision or keras"
        )
    config: dict[str, Any] = {
        "hidden_size": settings["width"], "num_hidden_layers": settings["depth"],
        "num_attention_heads": settings["num_heads"], "hidden_act": _NAMES[settings["gelu"]],
        "layer_norm_eps": settings["epsilon"], "image_size": height, "patch_size": settings["patch_size"],
        "num_channels": settings["channels"], "dtype": "float32",
    }  # fmt: skip
    if classes:
        config |= {
            "id2label": {str(i): f"LABEL_{i}" for i in range(classes)},
            "label2id": {f"LABEL_{i}": i for i in range(classes)},
        }
    if pool == "tok" and not settings["registers"] and settings["layer_scale"] is None:
        return _vit(canonical, settings, config)
    if pool == "tok":
        return _dinov2(canonical, settings, config)
    if settings["registers"] or settings["layer_scale"] is not None or settings["representation_size"]:
        raise UserError(
            f'no transformers model has pool="{pool}" with registers, layer scale or a representation layer: '
            "save as timm or keras"
        )
    return _siglip(canonical, settings, config)


def _vit(
    canonical: Canonical, settings: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    classes = settings["num_classes"]
    if classes and settings["representation_size"]:
        raise UserError(
            "transformers' ViT has a classifier or a representation layer (its pooler), not both: leave one out with "
            'allow=["head/*"], or save as big_vision or keras'
        )
    if size := settings["representation_size"]:
        config |= {"pooler_output_size": size, "pooler_act": "tanh"}
    config |= {"model_type": "vit", "architectures": ["ViTForImageClassification" if classes else "ViTModel"],
               "intermediate_size": settings["mlp_dim"], "qkv_bias": True}  # fmt: skip
    tensors = to_file(_with_token_row(canonical), VIT_RULES, "huggingface")
    return _below("vit.", tensors) if classes else tensors, config


def _dinov2(
    canonical: Canonical, settings: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    ratio, rest = divmod(settings["mlp_dim"], settings["width"])
    if rest or settings["representation_size"]:
        raise UserError(
            "transformers' DINOv2 needs an mlp_dim that is a multiple of the width, and no representation layer"
        )
    registers, classes = settings["registers"], settings["num_classes"]
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    config |= {"model_type": "dinov2_with_registers" if registers else "dinov2", "mlp_ratio": ratio, "qkv_bias": True,
               "architectures": [f"{name}ForImageClassification" if classes else f"{name}Model"]}  # fmt: skip
    if registers:
        config["num_register_tokens"] = registers
    canonical = _with_token_row(canonical)
    width = settings["width"]
    for index in range(settings["depth"]):
        for name in ("scale1", "scale2"):
            canonical.setdefault(f"blocks/{index}/{name}", made(name, (width,), lambda: np.ones(width, np.float32)))
    if "head/kernel" in canonical:
        kernel = canonical["head/kernel"]
        wide = (2 * kernel.shape[0], kernel.shape[1])
        canonical["head/kernel"] = kernel.mapped(wide, lambda x: np.concatenate([x, np.zeros_like(x)]))
    tensors = to_file(canonical, DINOV2_RULES, "huggingface")
    tensors["embeddings.mask_token"] = made(
        "embeddings.mask_token", (1, width), lambda: np.zeros((1, width), np.float32)
    )
    prefix = "dinov2_with_registers." if registers else "dinov2."
    return _below(prefix, tensors) if classes else tensors, config


def _siglip(
    canonical: Canonical, settings: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    pool, classes = settings["pool"], settings["num_classes"]
    if pool == "map" and classes:
        heads = allow_patterns(["head/kernel"])
        raise UserError(
            f"transformers' SigLIP has no classifier on its MAP head: leave it out with allow={heads}, or save as timm"
        )
    tower = {
        "intermediate_size": settings["mlp_dim"],
        "vision_use_head": pool == "map",
        "model_type": "siglip_vision_model",
    }
    tensors = _below("vision_model.", to_file(canonical, SIGLIP_RULES, "huggingface"))
    if not classes:
        return tensors, {**config, **tower, "architectures": ["SiglipVisionModel"]}
    labels = {key: config.pop(key) for key in ("id2label", "label2id")}
    wrapped = {
        "model_type": "siglip",
        "architectures": ["SiglipForImageClassification"],
        "vision_config": {**config, **tower},
    }
    return tensors, {**wrapped, **labels}


def _with_token_row(canonical: Canonical) -> Canonical:
    """Puts the class token's row, 0 here, in front of the position table."""
    table = canonical.get("posemb")
    if table is None:
        return dict(canonical)
    shape = (1, table.shape[1] + 1, table.shape[2])
    read = table.read
    row = made("posemb", shape, lambda: np.concatenate([np.zeros((1, 1, shape[2]), np.float32), read()], 1))
    return {**canonical, "posemb": row}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name if name.startswith("classifier.") else prefix + name: tensor for name, tensor in tensors.items()}
