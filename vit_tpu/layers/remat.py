"""Rematerialisation: keep the input of a function, compute it again in the backward pass.

`tf.recompute_grad` saves nothing under XLA: the compiler sees the same computation twice and merges the copies. An
optimization barrier on what the second copy reads keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from vit_tpu.layers import base


def in_xla() -> bool:
    """Whether the graph being traced will be compiled by XLA as a whole (jit_compile or a TPU)."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())


def barrier(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors, such that nothing computed from them can be merged with a computation from the originals."""
    if in_xla():
        return list(gen_xla_ops.xla_optimization_barrier(tensors))
    with tf.control_dependencies(tensors):
        return [tf.identity(tensor) for tensor in tensors]


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
    names = list(params)

    @tf.custom_gradient
    def run(x, *weights):
        def grad(dy):
            again, dy_now, *weights_now = barrier([x, dy, *weights])
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([again, *weights_now])
                y = function(dict(zip(names, weights_now)), again, seed)
            return tape.gradient(y, [again, *weights_now], dy_now, unconnected_gradients="zero")

        return function(dict(zip(names, weights)), x, seed), grad

    return run(x, *[tf.convert_to_tensor(params[name]) for name in names])
