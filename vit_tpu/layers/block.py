"""The pre-norm encoder block, alone and stacked over depth."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.layers import base, drop, remat, target
from vit_tpu.layers.attention import Attention
from vit_tpu.layers.mlp import Mlp
from vit_tpu.layers.norm import LayerNorm


class Block(base.ParamLayer):
    """x + attention(LN(x)), then x + MLP(LN(x)) (section 3 of arXiv 2010.11929).

    Args:
      width, num_heads, mlp_dim: D, H and the hidden size.
      dropout: rate after the attention, inside the MLP and after it.
      drop_path: rate at which an example skips each of the two branches.
      layer_scale: initial value of a learnt factor per channel on each branch (arXiv 2103.17239), or None for no
        factor.
      gelu: "tanh" or "erf".
      epsilon: of the LayerNorms.
      remat: whether the block's intermediates are computed again for the gradient instead of kept.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int,
        *,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        gelu: str = "tanh",
        epsilon: float = 1e-6,
        remat: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.width, self.dropout, self.drop_path = width, dropout, drop_path
        self.layer_scale, self.remat = layer_scale, remat
        policy = self.dtype_policy
        # In the order of `children`, which makes Keras list the weights in the order of `ViT.parameters`.
        self.norm1 = LayerNorm(width, epsilon, name="norm1")
        self.attention = Attention(width, num_heads, dtype=policy, name="attention")
        self.norm2 = LayerNorm(width, epsilon, name="norm2")
        self.mlp = Mlp(width, mlp_dim, gelu, dtype=policy, name="mlp")

    def children(self) -> dict[str, base.ParamLayer]:
        return {"norm1": self.norm1, "attention": self.attention, "norm2": self.norm2, "mlp": self.mlp}

    def own_specs(self) -> dict[str, base.Spec]:
        if self.layer_scale is None:
            return {}
        start = keras.initializers.Constant(self.layer_scale)
        return {name: base.Spec((self.width,), start, "scale") for name in ("scale1", "scale2")}

    def call(self, x: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        return self.run(self.params, x, seed=seed, drop_path=self.drop_path)

    def run(self, params: base.Params, x: tf.Tensor, seed: tf.Tensor | None, drop_path: Any) -> tf.Tensor:
        """`forward`, rematerialised if the block is made so."""
        if not self.remat:
            return self.forward(params, x, seed=seed, drop_path=drop_path)

        def function(params, x, seed):
            return self.forward(params, x, seed=seed, drop_path=drop_path)

        return remat.rematerialised(function, params, x, seed)

    def forward(
        self,
        params: base.Params,
        x: tf.Tensor,
        *,
        seed: tf.Tensor | None = None,
        drop_path: Any = 0.0,
        record: dict[str, tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns [B, N, D] in the dtype of `x`.

        Args:
          params: the block's weights by path.
          x: [B, N, D] in the compute dtype.
          seed: int32 [2] switches dropout and stochastic depth on.
          drop_path: rate of stochastic depth, a number or a scalar tensor.
          record: if given, filled with the intermediates "sa", "+sa", "mlp", "+mlp" (the names of big_vision).
        """
        seeds: list[Any] = [None] * 5 if seed is None else [drop.fold(seed, site) for site in range(5)]
        y = self.norm1.forward(base.below(params, "norm1"), x)
        sa = self.attention.forward(base.below(params, "attention"), y)
        added = x + self._branch(params, "scale1", sa, drop_path, seeds[0], seeds[1])
        y = self.norm2.forward(base.below(params, "norm2"), added)
        mlp = self.mlp.forward(base.below(params, "mlp"), y, dropout=self.dropout, seed=seeds[2])
        out = added + self._branch(params, "scale2", mlp, drop_path, seeds[3], seeds[4])
        if record is not None:
            record.update({"sa": sa, "+sa": added, "mlp": mlp, "+mlp": out})
        return out

    def _branch(self, params: base.Params, scale: str, y: tf.Tensor, rate: Any, seed: Any, path_seed: Any) -> tf.Tensor:
        y = drop.dropout(y, self.dropout, seed)
        if self.layer_scale is not None:
            y = y * tf.cast(params[scale], y.dtype)
        return drop.drop_path(y, rate, path_seed)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "width": self.width,
            "num_heads": self.attention.num_heads,
            "mlp_dim": self.mlp.mlp_dim,
            "dropout": self.dropout,
            "drop_path": self.drop_path,
            "layer_scale": self.layer_scale,
            "gelu": self.mlp.gelu,
            "epsilon": self.norm1.epsilon,
            "remat": self.remat,
        }


def stacked_blocks(block: Block, depth: int, x: tf.Tensor, seed: tf.Tensor | None, rates: list[float]) -> tf.Tensor:
    """Runs `depth` blocks whose weights are stacked along axis 0, in one loop: the block is traced and compiled once.

    Only each block's input is kept; the backward loop computes the rest again. Gradients of weights that are read in
    half precision are collected in half precision, as the unrolled model has them.

    Args:
      block: a Block made with `create_weights(stack=depth)`.
      depth: number of blocks.
      x: [B, N, D] in the compute dtype.
      seed: int32 [2] or None.
      rates: stochastic depth of each block.
    """
    names = list(block.params)
    rate_of = tf.constant(rates, tf.float32) if any(rates) else None

    def one(index: tf.Tensor, x: tf.Tensor, weights: list[tf.Tensor]) -> tf.Tensor:
        block_seed = None if seed is None else drop.fold(seed, index)
        rate = 0.0 if rate_of is None else rate_of[index]
        with tf.name_scope("blocks"):
            return block.forward(dict(zip(names, weights)), x, seed=block_seed, drop_path=rate)

    # LayerNorm computes in float32. Everything else casts its weights first thing, so what the loop has to collect is
    # the gradient of the cast weight: half the bytes and the same numbers as the gradient of the float32 weight.
    dtypes = [tf.float32 if name.startswith("norm") else x.dtype for name in names]

    def slices(index: tf.Tensor, stacks: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
        # Integers through the barrier: XLA would otherwise see that only bfloat16 is needed of the slice, cast the
        # whole stack before the loop and keep that copy.
        bits = target.barrier([tf.bitcast(stack[index], tf.int32) for stack in stacks])
        return [tf.cast(tf.bitcast(b, tf.float32), dtype) for b, dtype in zip(bits, dtypes)]

    @tf.custom_gradient
    def run(x, *stacks):
        def forward(index, x, inputs):
            return index + 1, one(index, x, slices(index, stacks)), inputs.write(index, x)

        array = tf.TensorArray(x.dtype, depth, element_shape=x.shape)
        _, y, inputs = tf.while_loop(lambda index, *_: index < depth, forward, [0, x, array])
        inputs = inputs.stack()

        def grad(dy):
            def backward(done, dy, gradients):
                index = depth - 1 - done
                x, weights = inputs[index], slices(index, stacks)
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([x, *weights])
                    y = one(index, x, weights)
                dx, *dws = tape.gradient(y, [x, *weights], dy, unconnected_gradients="zero")
                return done + 1, dx, [array.write(index, dw) for array, dw in zip(gradients, dws)]

            arrays = [tf.TensorArray(d, depth, element_shape=s.shape[1:]) for d, s in zip(dtypes, stacks)]
            _, dx, arrays = tf.while_loop(lambda done, *_: done < depth, backward, [0, dy, arrays])
            return [dx, *[tf.cast(array.stack(), tf.float32) for array in arrays]]

        return y, grad

    return run(x, *[tf.convert_to_tensor(block.params[name]) for name in names])
