"""What a traced step will run on. The one place where the layers ask, and the list of what they do differently.

On a TPU arrays lie in tiles of 8 x 128 and memory traffic bounds everything but the matrix products; on CPUs and GPUs
copies are cheap and few, large operations win. So on a TPU, and only there:

- products contract arrays where they lie instead of reshaping them to matrices (`base.dense`, `patches`);
- attention runs on [B, N, H, h] and computes its logits twice (`tpu_attention`);
- the variance of a half-precision array takes one pass (`norm`);
- a stack of blocks runs in a few loops, which take their weights rounded from it (`block.stacked_blocks`);
- what a gradient reads is put behind a barrier (`keep`), so that the compiler keeps the array that was asked for.

Both ways give the same numbers up to rounding, which the tests of each layer check.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

_STATED: contextvars.ContextVar[bool] = contextvars.ContextVar("vit_tpu_traces_for_tpu", default=False)


def on_tpu() -> bool:
    """Whether what is being traced will run on a TPU: under a TPUStrategy, or inside `tpu`."""
    return _STATED.get() or isinstance(tf.distribute.get_strategy(), _TPU_STRATEGIES)


@contextlib.contextmanager
def tpu() -> Iterator[None]:
    """Inside, layers are traced as for a TPU: for the planner, which has none, and for tests."""
    token = _STATED.set(True)
    try:
        yield
    finally:
        _STATED.reset(token)


def keep(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors for a gradient to read; on a TPU behind a barrier.

    Without it XLA may keep what a tensor was rounded from, in float32: twice the bytes.
    """
    return barrier(tensors) if on_tpu() else tensors


def settled(x: tf.Tensor) -> tf.Tensor:
    """Returns `x`; on a TPU as one array in memory that is computed once.

    For what would otherwise be computed by each of its readers again, or read in a layout that suits its producer only.
    """
    if not on_tpu():
        return x

    @tf.custom_gradient
    def run(x):
        return barrier([x])[0], lambda dy: dy

    return run(x)


def rounded(x: tf.Tensor) -> tf.Tensor:
    """Returns a float32 array rounded to bfloat16 by integer arithmetic: what `tf.cast` gives, NaN and infinity too.

    XLA moves casts: where a loop reads weights slice by slice, it would cast all of them before it and keep the copy.
    """
    one, sixteen, half = (tf.constant(number, tf.uint32) for number in (1, 16, 0x7FFF))
    bits = tf.bitcast(x, tf.uint32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, sixteen), one)  # ties go to the even neighbour
    return tf.bitcast(tf.cast(tf.bitwise.right_shift(bits + half + odd, sixteen), tf.uint16), tf.bfloat16)


def in_xla() -> bool:
    """Whether the graph being traced will be compiled by XLA as a whole (jit_compile or a TPU)."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())


def barrier(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors, such that nothing computed from them can be merged with a computation from the originals."""
    if in_xla():
        return list(gen_xla_ops.xla_optimization_barrier(tensors))
    with tf.control_dependencies(tensors):
        return [tf.identity(tensor) for tensor in tensors]


_TPU_STRATEGIES = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
