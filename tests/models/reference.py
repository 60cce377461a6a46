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
