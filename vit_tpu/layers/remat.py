"""Rematerialisation: keep the input of a function, compute it again in the backward pass.

`tf.recompute_grad` saves nothing under XLA: the compiler sees the same computation twice and merges the copies. An
optimization barrier on what the second copy reads keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from vit_tpu.layers import base, target


def rematerialised(
    function: Callable[[base.Params, tf.Tensor, Any], tf.Tensor], params: base.Params, x: tf.Tensor, seed: Any = None
) -> tf.Tensor:
    """Returns `function(params, x, seed)`; its intermediates are computed again for the gradient instead of kept.

    Args:
      function: pure (randomness only from `seed`), so that the second run repeats the first.
      params: path -> variable or tensor.
      x: the differentiable input.
      seed: int32 [2] or None; not differentiated.
    """
    names, scope = list(params), base.gradient_scope()

    @tf.custom_gradient
    def run(x, *weights):
        def grad(dy):
            with scope():
                again, dy_now, *weights_now = target.barrier([x, dy, *weights])
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([again, *weights_now])
                    y = function(dict(zip(names, weights_now)), again, seed)
                return tape.gradient(y, [again, *weights_now], dy_now, unconnected_gradients="zero")

        return function(dict(zip(names, weights)), x, seed), grad

    return run(x, *[tf.convert_to_tensor(params[name]) for name in names])
