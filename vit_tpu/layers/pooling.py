"""Multihead attention pooling (MAP): one learnt query looks at all tokens. float32 under every policy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from vit_tpu.layers import attention, base
from vit_tpu.layers.mlp import Mlp
from vit_tpu.layers.norm import LayerNorm


class MapPool(base.ParamLayer):
    """MAP head (Lee et al., arXiv 1810.00825; section 3.2 of arXiv 2106.04560): attention from a learnt probe, then
    x + MLP(LN(x)).

    There is no residual around the attention and no LayerNorm before it, as in big_vision. With a single query the
    key and
    value projections fold into the probe and the output: (x K) q = x (K q) and p (x V) = (p x) V. The result is the
    same and no [B, N, D] key or value array exists.

    Args:
      width: D of the tokens.
      num_heads: heads of the attention.
      mlp_dim: hidden size of the MLP.
      gelu, epsilon: as in the encoder.
    """

    def __init__(
        self, width: int, num_heads: int, mlp_dim: int, gelu: str = "tanh", epsilon: float = 1e-6, **kwargs: Any
    ):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        attention.check_heads(width, num_heads)
        self.width, self.num_heads = width, num_heads
        self.norm = LayerNorm(width, epsilon)
        self.mlp = Mlp(width, mlp_dim, gelu, dtype="float32")

    def own_specs(self) -> dict[str, base.Spec]:
        specs = {"probe": base.Spec((1, 1, self.width), base.xavier_of(1, self.width), "token")}
        projections = attention.attention_specs(self.width, self.num_heads)
        return specs | {f"attention/{path}": spec for path, spec in projections.items()}

    def children(self) -> dict[str, base.ParamLayer]:
        return {"norm": self.norm, "mlp": self.mlp}

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns the pooled features, float32 [B, D], of tokens `x` [B, N, D]."""
        with tf.name_scope("map"):
            x = tf.cast(x, tf.float32)
            p = self.probabilities(params, x)
            with tf.name_scope("attention"):
                seen = tf.einsum("bhn,bnd->bhd", p, x)
                w = base.below(params, "attention")
                value = tf.einsum("bhd,dhk->bhk", seen, w["value/kernel"]) + w["value/bias"]
                y = tf.einsum("bhk,hkd->bd", value, w["out/kernel"]) + w["out/bias"]
            normal = self.norm.forward(base.below(params, "norm"), y)
            return y + self.mlp.forward(base.below(params, "mlp"), normal)

    def probabilities(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns how much each head looks at each token: float32 [B, H, N]."""
        return tf.nn.softmax(self.logits_of(params, x))

    def logits_of(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        """Returns the float32 logits [B, H, N] that go into the softmax."""
        w = base.below(params, "attention")
        probe = tf.reshape(params["probe"], [self.width])
        query = tf.einsum("d,dhk->hk", probe, w["query/kernel"]) + w["query/bias"]
        query = query * (self.width // self.num_heads) ** -0.5
        look = tf.einsum("dhk,hk->hd", w["key/kernel"], query)
        # The key bias adds the same number to every token's logit, so the softmax does not depend on it; it stays in
        # the sum so that the logits are the reference's.
        key_bias = base.unseen(tf.convert_to_tensor(w["key/bias"]))
        return tf.einsum("bnd,hd->bhn", x, look) + tf.reduce_sum(key_bias * query, -1)[None, :, None]

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "width": self.width,
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp.mlp_dim,
            "gelu": self.mlp.gelu,
            "epsilon": self.norm.epsilon,
        }
