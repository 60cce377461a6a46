"""Reads the reference files of big_vision's ViT into a vit_tpu model by hand, independent of vit_tpu.weights."""

import re

_RULES = [
    (r"^pos_embedding$", "posemb"),
    (r"^Transformer/encoder_norm/", "norm/"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks/\1/"),
    (r"^Transformer/encoderblock/", "blocks/"),
    (r"^MAPHead_0/LayerNorm_0/", "map/norm/"),
    (r"^MAPHead_0/", "map/"),
    (r"LayerNorm_0/", "norm1/"),
    (r"LayerNorm_1/", "norm2/"),
    (r"MultiHeadDotProductAttention_0/", "attention/"),
    (r"MlpBlock_0/Dense_0/", "mlp/dense1/"),
    (r"MlpBlock_0/Dense_1/", "mlp/dense2/"),
]


def our_path(name):
    for pattern, replacement in _RULES:
        name = re.sub(pattern, replacement, name)
    return name


def tensors(file, prefix="params/"):
    return {our_path(key[len(prefix) :]): file[key] for key in file.files if key.startswith(prefix)}


def assign(model, values):
    parameters = {p.path: p.variable for p in model.parameters()}
    assert parameters.keys() == values.keys()
    for path, variable in parameters.items():
        variable.assign(values[path])


# The five reference models: how each is built here.
SETTINGS = {
    "vit_map": {"pool": "map"},
    "vit_gap": {"pool": "gap"},
    "vit_tok_rep": {"pool": "tok", "representation_size": 32},
    "vit_gap_sincos_rep": {"pool": "gap", "posemb": "sincos2d", "representation_size": 32},
    "vit_map_scan": {"pool": "map", "scan": True},
}


def build(**settings):
    """Returns a ViT of the reference size: 64x64 images, patch 16, width 32, 2 blocks."""
    from vit_tpu.models.vit import ViT

    size = {"width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 2}
    return ViT("B/16", **{"image_size": 64, "num_classes": 10, **size, **settings})


def stack(values):
    """Returns unrolled weights ("blocks/0/...") as scan=True has them ("blocks/..." [depth, ...])."""
    import numpy as np

    depth = 1 + max(int(p.split("/")[1]) for p in values if p.startswith("blocks/"))
    stacked = {p: v for p, v in values.items() if not p.startswith("blocks/")}
    for path in values:
        if path.startswith("blocks/0/"):
            rest = path[len("blocks/0/") :]
            stacked[f"blocks/{rest}"] = np.stack([values[f"blocks/{i}/{rest}"] for i in range(depth)])
    return stacked


def unstack(values):
    """Returns the weights of scan=True as the unrolled model has them."""
    unrolled = {p: v for p, v in values.items() if not p.startswith("blocks/")}
    for path, value in values.items():
        if path.startswith("blocks/"):
            for i, part in enumerate(value):
                unrolled[f"blocks/{i}/{path[len('blocks/') :]}"] = part
    return unrolled


def weights(model):
    """Returns path -> value of every parameter of a model."""
    return {p.path: p.variable.numpy() for p in model.parameters()}
