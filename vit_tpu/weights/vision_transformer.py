"""Older names of the same weights: vision_transformer (linen and before) and Scenic.

Their position table, below "Transformer/posembed_input", has the class token's row in front.
"""

from __future__ import annotations

from vit_tpu.weights import big_vision
from vit_tpu.weights.layout import Format, Rule

FORMAT = Format(
    name="vision_transformer",
    rules=(
        *big_vision.OUTER,
        Rule("Transformer/posembed_input/pos_embedding", ("posemb",)),
        *big_vision.block_rules(big_vision.BLOCK),
        *big_vision.block_rules(big_vision.BLOCK, "LayerNorm_2", "MultiHeadDotProductAttention_1", "MlpBlock_3"),
        Rule("output_projection/kernel", ("head/kernel",)),  # Scenic
        Rule("output_projection/bias", ("head/bias",)),
    ),
    marks=(
        r"^Transformer/posembed_input/",
        r"^Transformer/encoderblock_0/(LayerNorm_2|MultiHeadDotProductAttention_1|MlpBlock_3)/",
    ),
    prefixes=lambda cls, registers: (1,) if cls else (0,),
    resize="bilinear",
)
