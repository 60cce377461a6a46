"""AdamW: Adam with decoupled weight decay, and a bfloat16 first moment by choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.optim import arguments, rules
from vit_tpu.optim.base import GroupedOptimizer, bias_correction


class Adam(GroupedOptimizer):
    """The moments of Adam, for `AdamW` and `LAMB`: float32 maths, bias-corrected."""

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float,
        head_weight_decay: float | None,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, head_weight_decay, **kwargs)
        arguments.check_unit(beta_1=beta_1, beta_2=beta_2)
        arguments.check_not_negative(epsilon=epsilon)
        self.beta_1, self.beta_2, self.epsilon = float(beta_1), float(beta_2), float(epsilon)

    def _slot_specs(self, rule: rules.Rule) -> dict[str, tuple[Sequence[int], str]]:
        return {
            "momentum": (rule.shape, self.momentum_dtype),
            "second_moment": (rule.shape, "float32"),
        }

    def _scalars(self) -> dict[str, tf.Tensor]:
        step = tf.convert_to_tensor(self._iterations) + 1
        return {
            **super()._scalars(),
            "correction_1": bias_correction(self.beta_1, step),
            "correction_2": bias_correction(self.beta_2, step),
        }

    def _direction(
        self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        old_m, old_v = self._read("momentum", rule), self._read("second_moment", rule)
        m = self.beta_1 * old_m + (1 - self.beta_1) * grad
        v = self.beta_2 * old_v + (1 - self.beta_2) * tf.square(grad)
        self._write("momentum", rule, m, scalars)
        self._write("second_moment", rule, v, scalars)
        root = tf.sqrt(v / scalars["correction_2"])
        return m / scalars["correction_1"] / (root + self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }


@keras.utils.register_keras_serializable(package="vit_tpu")
class AdamW(Adam):
    """Adam (arXiv 1412.6980) with decoupled decay (arXiv 1711.05101).

    `w <- w - lr_t * (m_hat / (sqrt(v_hat) + epsilon) + decay * w)`, with bias-corrected moments:
    `optax.scale_by_adam` followed by decay, as big_vision has it.

    Args:
      learning_rate: float or schedule of the number of applied updates.
      weight_decay, head_weight_decay, exclude_from_weight_decay, global_clipnorm: see
        `GroupedOptimizer`.
      beta_1, beta_2: decay rates of the moments, in [0, 1).
      epsilon: added to the root of the second moment.
      momentum_dtype: "bfloat16" halves the first moment (the paper: no loss of quality). The
        update applied is the float32 one; only what is stored is rounded.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        weight_decay: float = 0.0,
        head_weight_decay: float | None = None,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        momentum_dtype: str = "float32",
        name: str = "AdamW",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay,
            head_weight_decay,
            beta_1,
            beta_2,
            epsilon,
            momentum_dtype=momentum_dtype,
            name=name,
            **kwargs,
        )
