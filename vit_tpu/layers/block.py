"""The pre-norm encoder block, alone and stacked over depth."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.layers import base, drop, remat, sharding, target
from vit_tpu.layers.attention import Attention
from vit_tpu.layers.mlp import Mlp
from vit_tpu.layers.norm import LayerNorm

_LOOPS = 4  # XLA joins at most four arrays where they are read, without a copy of them all


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
        params, x = self.gathered(params), sharding.batch(x)
        seeds: list[Any] = [None] * 5 if seed is None else [drop.fold(seed, site) for site in range(5)]
        y = self.norm1.forward(base.below(params, "norm1"), x)
        sa = self.attention.forward(base.below(params, "attention"), y)
        added = x + self._branch(params, "scale1", sa, drop_path, seeds[0], seeds[1])
        y = self.norm2.forward(base.below(params, "norm2"), added)
        mlp = self.mlp.forward(base.below(params, "mlp"), y, dropout=self.dropout, seed=seeds[2])
        out = sharding.batch(added + self._branch(params, "scale2", mlp, drop_path, seeds[3], seeds[4]))
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
    half precision are collected in half precision, as the unrolled model has them. On a TPU there are four loops, so
    that no memory holds all inputs and all gradients at a time.

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
        if target.on_tpu() and x.dtype != tf.float16:
            pairs = [(stack[index], dtype) for stack, dtype in zip(stacks, dtypes)]
            return [target.rounded(one) if dtype == tf.bfloat16 else one for one, dtype in pairs]
        # Integers through the barrier: XLA would otherwise see that only half precision is needed of the slice, cast
        # the whole stack before the loop and keep that copy.
        bits = target.barrier([tf.bitcast(stack[index], tf.int32) for stack in stacks])
        return [tf.cast(tf.bitcast(b, tf.float32), dtype) for b, dtype in zip(bits, dtypes)]

    params = block.values()
    stacks = [tf.convert_to_tensor(params[name]) for name in names]
    pieces = [(0, depth)]
    if target.on_tpu():
        gradients = sum(dtype.size * stack.shape[1:].num_elements() for dtype, stack in zip(dtypes, stacks))
        pieces = loops(depth, x.dtype.size * (x.shape[0] or 1) * x.shape[1] * x.shape[2], gradients)

    @tf.custom_gradient
    def run(x, *stacks):
        kept = []
        for first, count in pieces:

            def forward(done, x, inputs, first=first):
                return done + 1, one(first + done, x, slices(first + done, stacks)), inputs.write(done, x)

            array = tf.TensorArray(x.dtype, count, element_shape=x.shape)
            _, x, array = tf.while_loop(lambda done, *_, count=count: done < count, forward, [0, x, array])
            kept.append(array.stack())

        def grad(dy):
            found = []
            for (first, count), inputs in zip(reversed(pieces), reversed(kept)):

                def backward(done, dy, gradients, first=first, count=count, inputs=inputs):
                    place = count - 1 - done
                    x, weights = inputs[place], slices(first + place, stacks)
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch([x, *weights])
                        y = one(first + place, x, weights)
                    dx, *dws = tape.gradient(y, [x, *weights], dy, unconnected_gradients="zero")
                    return done + 1, dx, [array.write(place, dw) for array, dw in zip(gradients, dws)]

                arrays = [tf.TensorArray(d, count, element_shape=s.shape[1:]) for d, s in zip(dtypes, stacks)]
                _, dy, arrays = tf.while_loop(lambda done, *_, count=count: done < count, backward, [0, dy, arrays])
                found.append([array.stack() for array in arrays])
            joined = [part[0] if len(part) == 1 else tf.concat(part[::-1], 0) for part in zip(*found)]
            return [dy, *[tf.cast(gradient, tf.float32) for gradient in joined]]

        return x, grad

    return run(x, *stacks)


def loops(depth: int, kept: int, gradients: int) -> list[tuple[int, int]]:
    """Returns (first block, number of blocks) of the loops a stack is run in, cut where memory is fullest the least.

    What a loop keeps goes when its backward loop has run; that one's gradients come when it begins.

    Args:
      depth: number of blocks.
      kept, gradients: bytes of one block's input, and of its gradients.
    """

    def fullest(starts: tuple[int, ...]) -> int:
        return max(kept * end + gradients * (depth - start) for start, end in zip(starts, [*starts[1:], depth]))

    # Not one block alone: the compiler unrolls a loop of one round, and keeps what it should compute again.
    count = min(_LOOPS, max(1, depth // 2))
    cuts = itertools.combinations(range(2, depth - 1), count - 1)
    several = [starts for starts in ((0, *cut) for cut in cuts) if all(b - a > 1 for a, b in zip(starts, starts[1:]))]
    starts = min(several, key=fullest)
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], depth])]
