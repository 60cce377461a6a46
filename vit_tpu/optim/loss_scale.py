"""Loss scaling that counts only applied updates and can fall below 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as keras_lso
from tf_keras.src.optimizers import utils as optimizer_utils

from vit_tpu.errors import UserError
from vit_tpu.optim.base import GroupedOptimizer
from vit_tpu.optim.gradients import all_finite, apply_if, times

_no_tracking = tf.__internal__.tracking.no_automatic_dependency_tracking


class _State(keras_lso._DynamicLossScaleState):
    """Keras' scale and good-step counter (same checkpoint keys), and counts of skipped steps."""

    def __init__(self, initial_scale: float, growth_steps: int) -> None:
        super().__init__(initial_scale, growth_steps, multiplier=2)
        self.skipped = self._add_weight(name="skipped", dtype=tf.int64, initial_value=0)
        self.skipped_in_a_row = self._add_weight(name="skipped_in_a_row", dtype=tf.int64, initial_value=0)


@keras.utils.register_keras_serializable(package="vit_tpu")
class LossScale(keras_lso.LossScaleOptimizerV3):
    """Multiplies the loss, divides the gradients, and skips updates that are not finite.

    A true `keras.mixed_precision.LossScaleOptimizer`, so Keras wraps it no further. By hand::

        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(loss)
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
        optimizer.apply_gradients(zip(grads, variables))

    Gradients that are still scaled never reach the inner optimizer: calling `apply_gradients`
    after `get_scaled_loss` without `get_unscaled_gradients` is an error. Clipping in the inner
    optimizer sees unscaled gradients. A skipped update moves neither `iterations`, so neither the
    schedule nor a bias correction, nor any weight or slot.

    Args:
      inner: a tf_keras optimizer that does not scale by itself.
      initial_scale: first (or, if not `dynamic`, only) scale.
      dynamic: double the scale after `growth_steps` good steps in a row, halve it after a bad one.
      growth_steps: see `dynamic`.
      min_scale: floor of the scale; below 1, so that a run whose gradients overflow recovers.
      max_scale: ceiling for growth; beyond it 1 / scale would lose bits.

    Raises:
      UserError: for an inner optimizer that scales itself, or scales out of order.
      TypeError: for an optimizer of another package or of Keras' legacy family.
    """

    @_no_tracking
    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        initial_scale: float = 4096,
        dynamic: bool = True,
        growth_steps: int = 2000,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
    ) -> None:
        _check_inner(inner)
        if not 0 < min_scale <= initial_scale:
            raise UserError(
                f"Loss scale: initial_scale {initial_scale} must be at least min_scale {min_scale}, and both above 0."
            )
        if growth_steps < 1:
            raise UserError(f"Loss scale: growth_steps is {growth_steps}: give 1 or more.")
        super().__init__(inner, dynamic=False, initial_scale=initial_scale)
        self._dynamic = bool(dynamic)
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)
        self._loss_scale = _State(initial_scale, growth_steps)
        self._track_trackable(self._loss_scale, "loss_scale")
        self._still_scaled = False
        inner._vit_tpu_loss_scale = inner._no_dependency(self)

    @property
    def dynamic(self) -> bool:
        return self._dynamic

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """Good steps in a row since the scale last changed; None for a fixed scale."""
        return self._loss_scale.counter if self._dynamic else None

    @property
    def dynamic_growth_steps(self) -> int | None:
        return self._loss_scale.growth_steps if self._dynamic else None

    @property
    def skipped(self) -> tf.Variable:
        """int64: updates skipped because something was not finite (or `ok` was false)."""
        return self._loss_scale.skipped

    @property
    def skipped_in_a_row(self) -> tf.Variable:
        """int64: updates skipped since the last applied one."""
        return self._loss_scale.skipped_in_a_row

    @property
    def at_floor(self) -> tf.Tensor:
        """Scalar bool: the scale cannot fall further (always true for a fixed scale)."""
        return tf.constant(True) if not self._dynamic else self.loss_scale <= self.min_scale

    def state_variables(self) -> dict[str, tf.Variable]:
        """Returns what a checkpoint of the scale has to hold, by name."""
        state = self._loss_scale
        return {
            "scale": state.current_loss_scale,
            "good_steps": state.counter,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
        }

    def get_scaled_loss(self, loss: Any) -> Any:
        """Returns the loss (a tensor, or a function of no arguments) times the scale, float32."""
        self._still_scaled = True
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return tf.cast(loss, tf.float32) * self.loss_scale

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns the gradients divided by the scale, float32; None stays None."""
        self._still_scaled = False
        factor = 1.0 / self.loss_scale
        return [None if grad is None else times(grad, factor) for grad in grads]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        skip_gradients_aggregation: bool = False,
        name: str | None = None,
        ok: Any = None,
        frozen: Any = None,
        **kwargs: Any,
    ) -> tf.Variable:
        """Applies unscaled gradients if they are finite, and moves the scale.

        Args:
          grads_and_vars: (unscaled gradient, variable) pairs.
          skip_gradients_aggregation: the gradients are already summed over the replicas.
          name: of the name scope.
          ok: scalar bool, the same on every replica: whether the gradients are finite. Passing it says
            that the caller has checked and unscaled them itself.
          frozen: scalar bool, the same on every replica; True changes nothing at all: no weight,
            no slot, no scale, no counter.
          **kwargs: `experimental_aggregate_gradients`, the older opposite of
            `skip_gradients_aggregation`.

        Returns:
          `iterations`, the number of applied updates.

        Raises:
          UserError: for gradients that were scaled and not unscaled.
        """
        if ok is None and frozen is None and self._still_scaled:
            self._still_scaled = False
            raise UserError(
                "These gradients are still multiplied by the loss scale: pass them through "
                "get_unscaled_gradients() before apply_gradients()."
            )
        aggregate = kwargs.pop("experimental_aggregate_gradients", True)
        if kwargs:
            raise TypeError(f"apply_gradients() got unexpected arguments: {', '.join(kwargs)}.")
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError("apply_gradients() must be called in a replica context.")
        pairs = list(grads_and_vars)
        if not pairs:
            return self.iterations
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
        pairs = list(optimizer_utils.filter_empty_gradients(pairs))
        if aggregate and not skip_gradients_aggregation:
            # Here, not in the inner optimizer: one replica's NaN must reach all of them.
            pairs = list(self._optimizer.aggregate_gradients(pairs))
        # A caller who passes `ok` has looked at every gradient already: no second pass over them.
        good = all_finite([grad for grad, _ in pairs]) if ok is None else tf.cast(ok, tf.bool)
        self._move_scale(good, None if frozen is None else tf.cast(frozen, tf.bool))
        if frozen is not None:
            good = tf.logical_and(good, tf.logical_not(tf.cast(frozen, tf.bool)))
        if isinstance(self._optimizer, GroupedOptimizer):
            self._optimizer.apply_gradients(pairs, name=name, skip_gradients_aggregation=True, ok=good)
        else:
            apply_if(good, self._optimizer, pairs)
        return self.iterations

    def _move_scale(self, good: tf.Tensor, frozen: tf.Tensor | None) -> None:
        state = self._loss_scale
        variables = [state.current_loss_scale, state.counter, state.skipped, state.skipped_in_a_row]
        scale, counter, skipped, in_a_row = (tf.convert_to_tensor(v) for v in variables)
        one = tf.constant(1, tf.int64)
        new = [scale, counter, tf.where(good, skipped, skipped + one)]
        if self._dynamic:
            grow = counter + one >= state.growth_steps
            larger = tf.where(scale * 2.0 <= self.max_scale, scale * 2.0, scale)
            smaller = tf.maximum(scale / 2.0, self.min_scale)
            new[0] = tf.where(good, tf.where(grow, larger, scale), smaller)
            new[1] = tf.where(tf.logical_and(good, tf.logical_not(grow)), counter + one, 0)
        new.append(tf.where(good, tf.zeros_like(in_a_row), in_a_row + one))
        if frozen is not None:
            old = (scale, counter, skipped, in_a_row)
            new = [tf.where(frozen, before, after) for before, after in zip(old, new)]

        def assign_all(strategy: tf.distribute.Strategy, values: Sequence[tf.Tensor]) -> None:
            for variable, value in zip(variables, values):
                strategy.extended.update(variable, lambda target, x: target.assign(x), args=(value,), group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(assign_all, tf.distribute.get_strategy(), new)

    def get_config(self) -> dict[str, Any]:
        return {
            "inner": keras.optimizers.serialize(self._optimizer),
            "initial_scale": self.initial_scale,
            "dynamic": self._dynamic,
            "growth_steps": self._loss_scale.growth_steps,
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "is_legacy_optimizer": False,
        }

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> LossScale:
        config = {key: value for key, value in config.items() if key != "is_legacy_optimizer"}
        inner = config.pop("inner")
        if not isinstance(inner, keras.optimizers.Optimizer):
            inner = keras.optimizers.deserialize(inner, custom_objects=custom_objects)
        return cls(inner, **config)


def wrap(optimizer: keras.optimizers.Optimizer, **options: Any) -> LossScale:
    """Returns the optimizer with a loss scale; one that has it already is returned as it is.

    Args:
      optimizer: a tf_keras optimizer, a `LossScale`, or the inner optimizer of a `LossScale`
        (whose existing wrapper is returned): `wrap(wrap(o)) is wrap(o)`.
      **options: of `LossScale`, for a new wrapper.
    """
    if isinstance(optimizer, LossScale):
        return optimizer
    existing = getattr(optimizer, "_vit_tpu_loss_scale", None)
    return existing if existing is not None else LossScale(optimizer, **options)


def _check_inner(inner: Any) -> None:
    scaled = isinstance(inner, keras.mixed_precision.LossScaleOptimizer) or getattr(inner, "loss_scale_factor", None)
    if scaled or getattr(inner, "_is_wrapped_by_loss_scale_optimizer", False):
        raise UserError(
            f"{type(inner).__name__} already scales the loss: give LossScale the plain optimizer, "
            "or use vit_tpu.optim.loss_scale.wrap, which wraps once."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"LossScale needs a tf_keras optimizer, got {type(inner).__module__}."
            f"{type(inner).__name__}: optimizers of Keras 3 (package keras) and of "
            "tf_keras.optimizers.legacy do not fit."
        )
