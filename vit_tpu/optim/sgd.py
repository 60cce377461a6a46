"""SGD with momentum, as ViT fine-tuning uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.optim import arguments, rules
from vit_tpu.optim.base import GroupedOptimizer


@keras.utils.register_keras_serializable(package="vit_tpu")
class SGD(GroupedOptimizer):
    """Stochastic gradient descent with a trace of the gradients.

    `t <- momentum * t + g`, `w <- w - lr_t * (t + decay * w)`; with `nesterov`,
    `w <- w - lr_t * (g + momentum * t + decay * w)` (`optax.trace`). big_vision fine-tunes with
    momentum 0.9 and a bfloat16 trace: `SGD(0.03, momentum=0.9, momentum_dtype="bfloat16")`.

    Args:
      learning_rate: float or schedule of the number of applied updates.
      weight_decay, head_weight_decay, exclude_from_weight_decay, global_clipnorm: see
        `GroupedOptimizer`.
      momentum: in [0, 1); 0 keeps no slots.
      nesterov: look ahead by one step.
      momentum_dtype: dtype of the stored trace; the update applied is the float32 one.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-2,
        weight_decay: float = 0.0,
        head_weight_decay: float | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        momentum_dtype: str = "float32",
        name: str = "SGD",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay,
            head_weight_decay,
            momentum_dtype=momentum_dtype,
            name=name,
            **kwargs,
        )
        arguments.check_unit(momentum=momentum)
        self.momentum, self.nesterov = float(momentum), bool(nesterov)

    def _slot_specs(self, rule: rules.Rule) -> dict[str, tuple[Sequence[int], str]]:
        return {"momentum": (rule.shape, self.momentum_dtype)} if self.momentum else {}

    def _direction(
        self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        if not self.momentum:
            return grad
        trace = self.momentum * self._read("momentum", rule) + grad
        self._write("momentum", rule, trace, scalars)
        return grad + self.momentum * trace if self.nesterov else trace

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "momentum": self.momentum, "nesterov": self.nesterov}
