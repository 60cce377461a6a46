"""The parameter names of big_vision's ViT (`models/vit.py` there), looped or stacked over blocks."""

from __future__ import annotations

from vit_tpu.errors import UserError
from vit_tpu.weights.layout import Canonical, Format, Rule, depth_of, pairs, to_file
from vit_tpu.weights.tensors import Tensor, stacked

_NORM = {"/scale": "/scale", "/bias": "/bias"}
_DENSE = {"/kernel": "/kernel", "/bias": "/bias"}
BLOCK = "Transformer/encoderblock_{i}"
STACK = "Transformer/encoderblock"


def block_rules(file: str, norm2: str = "LayerNorm_1", attention: str = "MultiHeadDotProductAttention_0",
                mlp: str = "MlpBlock_0") -> list[Rule]:  # fmt: skip
    """The rules of one encoder block; old files number its parts otherwise."""
    rules = pairs(f"{file}/LayerNorm_0", "blocks/{i}/norm1", _NORM)
    rules += pairs(f"{file}/{norm2}", "blocks/{i}/norm2", _NORM)
    for name in ("query", "key", "value", "out"):
        rules += pairs(f"{file}/{attention}/{name}", f"blocks/{{i}}/attention/{name}", _DENSE)
    for k in (0, 1):
        rules += pairs(f"{file}/{mlp}/Dense_{k}", f"blocks/{{i}}/mlp/dense{k + 1}", _DENSE)
    return rules


def map_rules(prefix: str) -> list[Rule]:
    """The rules of a MAP head; during its development its parts lay at the top, without "MAPHead_0/"."""
    rules = [Rule(f"{prefix}probe", ("map/probe",)), *pairs(f"{prefix}LayerNorm_0", "map/norm", _NORM)]
    for name in ("query", "key", "value", "out"):
        rules += pairs(f"{prefix}MultiHeadDotProductAttention_0/{name}", f"map/attention/{name}", _DENSE)
    for k in (0, 1):
        rules += pairs(f"{prefix}MlpBlock_0/Dense_{k}", f"map/mlp/dense{k + 1}", _DENSE)
    return rules


OUTER = (
    *pairs("embedding", "embedding", _DENSE),
    Rule("cls", ("cls",)),
    *pairs("Transformer/encoder_norm", "norm", _NORM),
    *pairs("pre_logits", "pre_logits", _DENSE),
    *pairs("head", "head", _DENSE),
)

FORMAT = Format(
    name="big_vision",
    rules=(*OUTER, Rule("pos_embedding", ("posemb",)), *block_rules(BLOCK), *map_rules("MAPHead_0/"), *map_rules("")),
    marks=(r"^Transformer/encoderblock(_\d+)?/LayerNorm_0/",),
    prefixes=lambda cls, registers: (0,),
    resize="bilinear",
)


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the file's tensors with "Transformer/encoderblock/..." [depth, ...] cut into one tensor per block."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(STACK + "/"):
            if not tensor.shape:
                raise UserError(f"{name} has no axis for the blocks")
            rest = name[len(STACK) :]
            out |= {f"{STACK}_{i}{rest}": tensor.row(i) for i in range(tensor.shape[0])}
        else:
            out[name] = tensor
    return out


def export(canonical: Canonical, scan: bool = False) -> dict[str, Tensor]:
    """Returns the file's tensors, blocks stacked along axis 0 if `scan`."""
    out = to_file(canonical, FORMAT.rules, "big_vision")
    if not scan:
        return out
    depth, first = depth_of(canonical), BLOCK.replace("{i}", "0")
    rests = [name[len(first) :] for name in out if name.startswith(first + "/")]
    stacks = {f"{STACK}{r}": stacked(f"{STACK}{r}", [out[f"{STACK}_{i}{r}"] for i in range(depth)]) for r in rests}
    return {name: tensor for name, tensor in out.items() if not name.startswith(STACK + "_")} | stacks
