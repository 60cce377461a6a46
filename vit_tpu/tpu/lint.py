"""Which operations of a traced step a TPU cannot run, and in which layer they are.

A TPU runs what TensorFlow can lower to XLA. The list is TensorFlow's own: the kernels that its XLA bridge registers. It
is the CPU's bridge, which this machine has; a TPU's runtime may know fewer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from vit_tpu.errors import UserError

# Of a graph's own bookkeeping, lowered without a kernel.
_STRUCTURE = frozenset({"Placeholder", "PlaceholderWithDefault", "Const", "_Arg", "_Retval", "NoOp"})
# Known to the bridge, but they leave the device for Python or the host's memory.
_HOST = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "Print", "PrintV2"})
_SCOPES = ("gradient_tape", "gradients", "while", "cond", "body", "true", "false")


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation that a TPU cannot run.

    Attributes:
      operation: its type, such as "AsString". layer: name scopes around it. count: how many of them there.
      why: what is wrong with it.
    """

    operation: str
    layer: str
    count: int
    why: str = "has no XLA kernel"

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.operation} in {self.layer}{times} {self.why}"


@functools.cache
def lowered() -> frozenset[str]:
    """Returns the types of operations that TensorFlow's bridge to XLA has a kernel for."""
    from tensorflow.python.framework import kernels

    @tf.function(jit_compile=True, autograph=False)
    def anything(x: tf.Tensor) -> tf.Tensor:
        return x + 1.0

    with tf.device("CPU:0"):
        anything(tf.zeros([]))  # the first compilation registers them
    return frozenset(k.op for k in kernels.get_all_registered_kernels().kernel if k.device_type == "XLA_CPU_JIT")


def of_function(function: Callable[..., Any], specs: Sequence[Any]) -> list[Finding]:
    """Traces a function and returns what a TPU could not run of it.

    Args:
      function: of tensors; nothing is computed.
      specs: `tf.TensorSpec` of its arguments.
    """
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return of_nodes(nodes)


def of_nodes(nodes: Iterable[Any]) -> list[Finding]:
    """Returns what a TPU could not run of the nodes of a graph, an operation of a layer once."""
    known, found = lowered() | _STRUCTURE, collections.Counter[tuple[str, str, str]]()
    for node in nodes:
        if node.op in _HOST:
            found[node.op, layer_of(node.name), "runs Python or prints on the host"] += 1
        elif node.op not in known:
            found[node.op, layer_of(node.name), "has no XLA kernel"] += 1
    return [Finding(op, layer, count, why) for (op, layer, why), count in found.items()]


def of_model(model: Any, batch: int, channels: int, labels: tf.TensorSpec | None = None) -> list[Finding]:
    """Returns what a TPU could not run of a compiled model's training step on a batch of images [B, H, W, C]."""
    images = tf.TensorSpec([batch, *model.image_size, channels], tf.float32)
    return of_function(lambda *data: model.train_step(data), [images, labels or tf.TensorSpec([batch], tf.int32)])


def check(model: Any, batch: int, channels: int) -> None:
    """Raises UserError if a TPU could not run the training step: lists operations and layers."""
    found = of_model(model, batch, channels)
    if found:
        raise UserError(f"a TPU cannot run this training step: {'; '.join(map(str, found))}. Compute it in tf.data, "
                        "or out of operations that XLA knows")  # fmt: skip


def layer_of(name: str) -> str:
    """Returns the layer in a node's name: "gradient_tape/while/blocks/0/mlp/MatMul_1/MatMul" -> "blocks/0/mlp"."""
    parts = name.split("/")[:-1]
    while parts and re.sub(r"_\d+$", "", parts[0]) in _SCOPES:
        parts = parts[1:]
    if name.split("/")[0] in ("gradient_tape", "gradients") and len(parts) > 1:
        parts = parts[:-1]  # the operation that the gradient is of
    return "/".join(parts) or "the step itself"


def explain(error: BaseException) -> str | None:
    """Returns in one sentence what TensorFlow says when XLA cannot compile a step for an operation; None for others."""
    text = str(error)
    if "unsupported operations" not in text:
        return None
    pairs = re.findall(r"(\w+) \(No registered '\w+' OpKernel for (\w+) devices[^{]*\{\{node ([^}]+)\}\}", text)
    if not pairs:
        return None
    found = list(dict.fromkeys(f"{operation} in {layer_of(name)}" for operation, _, name in pairs))
    return (
        f"XLA cannot compile the step for {pairs[0][1].removesuffix('_JIT')}: it has no kernel for {'; '.join(found)}. "
        "Compute it in tf.data, or out of operations that XLA knows; on CPU and GPU --nojit leaves XLA out"
    )
