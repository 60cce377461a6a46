"""Adafactor as the ViT-G paper changed it (arXiv 2106.04560, section 3.4 and appendix B).

For the update t = 1, 2, ... of a variable with gradient g::

    beta2 = min(beta2_cap, 1 - t ** -0.8)
    factored:  row = EMA of mean(g^2 + 1e-30) over the largest axis,
               col = the same over the second largest,
               u = g / sqrt(row / mean(row)) / sqrt(col)
    else:      v = EMA of g^2 + 1e-30,  u = g / sqrt(v)
    m <- b * m + (1 - beta_1) * u               (no bias correction, stored in bfloat16)
    w <- w - lr_t * (m + decay * w)             (m before rounding)

A variable is factored if its second largest axis has at least 32 elements. Attention kernels
[D, H, h] are therefore factored over D and h, for each head. There is no relative step size and no
scaling by the parameter's norm: the learning rate means what it says.

b is beta_1, rounded to the momentum's dtype: 0.9 is 0.8984375 in bfloat16. That is what the
paper's own code (big_vision's `scale_by_adafactor`, whose numbers this reproduces) computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.optim import arguments, rules
from vit_tpu.optim.base import GroupedOptimizer

_EPSILON = 1e-30  # added to squared gradients, so that a zero gradient divides by something
_DECAY_EXPONENT = 0.8


def factored_axes(shape: Sequence[int], min_size: int = 32) -> tuple[int, int] | None:
    """Returns the second largest and the largest axis, or None if the shape is not factored.

    Args:
      shape: of one variable (of one slice, for a stacked variable).
      min_size: the second largest axis must have this many elements.
    """
    if len(shape) < 2:
        return None
    order = sorted(range(len(shape)), key=lambda axis: shape[axis])  # stable, as in optax
    second, largest = order[-2], order[-1]
    return None if shape[second] < min_size else (second, largest)


@keras.utils.register_keras_serializable(package="vit_tpu")
class Adafactor(GroupedOptimizer):
    """The paper's optimizer: state of half the parameters' bytes; see the module for the formula.

    Args:
      learning_rate: float or schedule of the number of applied updates.
      weight_decay, head_weight_decay, exclude_from_weight_decay, global_clipnorm: see
        `GroupedOptimizer`. The paper's values are 0.03 and 3.0.
      beta_1: decay rate of the momentum; 0 = none, and no slot.
      beta2_cap: largest decay rate of the second moment; 0.95 is big_vision's advice when training
        is unstable.
      min_dim_size_to_factor: see `factored_axes`.
      clipping_threshold: largest root mean square of one variable's update, before the momentum;
        None = off, as in the paper.
      momentum_dtype: of the stored momentum.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        weight_decay: float = 0.0,
        head_weight_decay: float | None = None,
        beta_1: float = 0.9,
        beta2_cap: float = 0.999,
        min_dim_size_to_factor: int = 32,
        clipping_threshold: float | None = None,
        momentum_dtype: str = "bfloat16",
        name: str = "Adafactor",
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
        arguments.check_unit(beta_1=beta_1, beta2_cap=beta2_cap)
        arguments.check_above_zero(clipping_threshold=clipping_threshold)
        self.beta_1, self.beta2_cap = float(beta_1), float(beta2_cap)
        self.min_dim_size_to_factor = int(min_dim_size_to_factor)
        self.clipping_threshold = clipping_threshold
        self._history = float(tf.as_dtype(self.momentum_dtype).as_numpy_dtype(self.beta_1))

    def _axes(self, rule: rules.Rule) -> tuple[int, int] | None:
        """Returns the axes of the whole variable that are averaged away, if it is factored."""
        axes = factored_axes(rule.slice_shape, self.min_dim_size_to_factor)
        if axes is None or not rule.stacked:
            return axes
        return axes[0] + 1, axes[1] + 1

    def _slot_specs(self, rule: rules.Rule) -> dict[str, tuple[Sequence[int], str]]:
        specs: dict[str, tuple[Sequence[int], str]] = {}
        if self.beta_1:
            specs["momentum"] = (rule.shape, self.momentum_dtype)
        axes = self._axes(rule)
        if axes is None:
            specs["second_moment"] = (rule.shape, "float32")
        else:
            second, largest = axes
            specs["second_moment_row"] = (_without(rule.shape, largest), "float32")
            specs["second_moment_col"] = (_without(rule.shape, second), "float32")
        return specs

    def _scalars(self) -> dict[str, tf.Tensor]:
        step = tf.cast(tf.convert_to_tensor(self._iterations) + 1, tf.float32)
        beta2 = tf.minimum(self.beta2_cap, 1.0 - step**-_DECAY_EXPONENT)
        return {**super()._scalars(), "beta_2": beta2}

    def _direction(
        self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        update = self._precondition(rule, grad, scalars)
        if self.clipping_threshold is not None:
            count = 1
            for size in rule.slice_shape:
                count *= size
            rms = tf.sqrt(rule.sum(tf.square(update)) / count)
            update /= tf.maximum(1.0, rms / self.clipping_threshold)
        if self.beta_1:
            update = self._history * self._read("momentum", rule) + (1 - self.beta_1) * update
            self._write("momentum", rule, update, scalars)
        return update

    def _precondition(self, rule: rules.Rule, grad: tf.Tensor, scalars: dict[str, tf.Tensor]) -> tf.Tensor:
        squares = tf.square(grad) + _EPSILON
        axes = self._axes(rule)
        if axes is None:
            return grad * tf.math.rsqrt(self._averaged("second_moment", rule, squares, scalars))
        second, largest = axes
        row_mean = tf.reduce_mean(squares, largest)
        col_mean = tf.reduce_mean(squares, second)
        row = self._averaged("second_moment_row", rule, row_mean, scalars)
        col = self._averaged("second_moment_col", rule, col_mean, scalars)
        # The second largest axis, in `row`, from which the largest is gone.
        axis = second - 1 if second > largest else second
        row_factor = tf.math.rsqrt(row / tf.reduce_mean(row, axis, keepdims=True))
        return grad * tf.expand_dims(row_factor, largest) * tf.expand_dims(tf.math.rsqrt(col), second)

    def _slot_axes(self, slot: str, rule: rules.Rule) -> Sequence[int]:
        axes = self._axes(rule)
        every = range(len(rule.shape))
        if axes is None or slot == "momentum":
            return every
        gone = axes[1] if slot == "second_moment_row" else axes[0]
        return [axis for axis in every if axis != gone]

    def _averaged(self, slot: str, rule: rules.Rule, new: tf.Tensor, scalars: dict[str, tf.Tensor]) -> tf.Tensor:
        beta2 = scalars["beta_2"]
        average = beta2 * self._read(slot, rule) + (1.0 - beta2) * new
        self._write(slot, rule, average, scalars)
        return average

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta2_cap": self.beta2_cap,
            "min_dim_size_to_factor": self.min_dim_size_to_factor,
            "clipping_threshold": self.clipping_threshold,
        }


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(size for index, size in enumerate(shape) if index != axis)
