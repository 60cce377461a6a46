"""Learning-rate schedules: reciprocal square root, cosine, linear, constant.

Each is a function of the number of applied updates (the optimizer's `iterations`). Differences of
steps are taken in int64 before anything becomes float32, so schedules are exact beyond 2^24 steps;
no value is ever negative, also after the last step. The formulas are big_vision's
(`utils.create_learning_rate_schedule`), which the ViT-G paper (arXiv 2106.04560) trained with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError, nearest
from vit_tpu.optim.arguments import whole


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Peak rate times a shape, a linear warm-up from 0 and a linear cool-down to 0.

    Args:
      learning_rate: the peak.
      total_steps: updates in the whole run.
      warmup_steps: updates over which the rate rises from 0; 0 = none. With a warm-up, the very
        first update has rate 0.
      cooldown_steps: updates at the end over which the rate is brought to 0; 0 = none.
    """

    def __init__(
        self,
        learning_rate: float,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        cooldown_steps: int = 0,
        name: str | None = None,
    ) -> None:
        self.learning_rate = float(learning_rate)
        self.total_steps = None if total_steps is None else whole(total_steps, "total_steps")
        self.warmup_steps = whole(warmup_steps, "warmup_steps")
        self.cooldown_steps = whole(cooldown_steps, "cooldown_steps")
        self.name = name
        kind = type(self).__name__
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise UserError(f"{kind}: learning_rate is {learning_rate}: give a number >= 0.")
        if self.total_steps is None and (self.cooldown_steps or self._needs_total):
            raise UserError(f"{kind}: give total_steps, the number of updates of the whole run.")
        if self.total_steps is not None and (
            self.total_steps < 1 or self.warmup_steps + self.cooldown_steps > self.total_steps
        ):
            raise UserError(
                f"{kind}: warm-up ({self.warmup_steps}) and cool-down ({self.cooldown_steps}) do "
                f"not fit into {self.total_steps} steps: shorten them or train longer."
            )

    _needs_total = False

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the float32 learning rate of update number `step` (0 is the first)."""
        with tf.name_scope(self.name or type(self).__name__):
            step = tf.cast(step, tf.int64)
            rate = self.learning_rate * self._shape(step)
            if self.warmup_steps:
                rate *= tf.clip_by_value(_ratio(step, self.warmup_steps), 0.0, 1.0)
            if self.cooldown_steps:
                left = self.total_steps - step
                rate *= tf.clip_by_value(_ratio(left, self.cooldown_steps), 0.0, 1.0)
            return rate

    def _shape(self, step: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def _left(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the share of the run after the warm-up that is still to come: 1 falling to 0."""
        assert self.total_steps is not None
        length = max(self.total_steps - self.warmup_steps, 1)
        return tf.clip_by_value(_ratio(self.total_steps - step, length), 0.0, 1.0)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "cooldown_steps": self.cooldown_steps,
            "name": self.name,
        }


@keras.utils.register_keras_serializable(package="vit_tpu")
class ReciprocalSqrt(_Schedule):
    """`1 / sqrt(1 + (step + shift - warmup_steps) / timescale)`, the paper's schedule.

    The paper's run: `ReciprocalSqrt(8e-4, 1_000_000, warmup_steps=10_000, cooldown_steps=50_000)`.
    Because the shape does not depend on `total_steps`, a run can be cooled down at any time.

    Args:
      learning_rate, total_steps, warmup_steps, cooldown_steps: peak and lengths; `total_steps` is
        needed only for a cool-down.
      timescale: steps after which the rate has fallen to 1/sqrt(2).
      shift: moves the curve to the left, in steps.
    """

    def __init__(
        self,
        learning_rate: float,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        cooldown_steps: int = 0,
        timescale: float = 10_000,
        shift: int = 0,
        name: str | None = None,
    ) -> None:
        self.timescale, self.shift = timescale, whole(shift, "shift")
        if not timescale > 0:
            raise UserError(f"ReciprocalSqrt: timescale is {timescale}: give a number > 0.")
        super().__init__(learning_rate, total_steps, warmup_steps, cooldown_steps, name)

    def _shape(self, step: tf.Tensor) -> tf.Tensor:
        after = tf.maximum(step - self.warmup_steps, 0) + self.shift
        return tf.math.rsqrt(1.0 + _ratio(after, self.timescale))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "timescale": self.timescale, "shift": self.shift}


class _Ending(_Schedule):
    _needs_total = True

    def __init__(
        self,
        learning_rate: float,
        total_steps: int,
        warmup_steps: int = 0,
        cooldown_steps: int = 0,
        end: float = 0.0,
        name: str | None = None,
    ) -> None:
        self.end = float(end)
        if not 0 <= self.end <= 1:
            raise UserError(
                f"{type(self).__name__}: end is {end}: give the last rate as a share of the peak, from 0 to 1."
            )
        super().__init__(learning_rate, total_steps, warmup_steps, cooldown_steps, name)

    def _shape(self, step: tf.Tensor) -> tf.Tensor:
        return self.end + (1.0 - self.end) * self._fall(self._left(step))

    def _fall(self, left: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "end": self.end}


@keras.utils.register_keras_serializable(package="vit_tpu")
class Cosine(_Ending):
    """Half a cosine from the peak, after the warm-up, down to `end` at `total_steps`.

    Args:
      learning_rate, total_steps, warmup_steps, cooldown_steps: peak and lengths.
      end: last rate as a share of the peak; kept after the last step.
    """

    def _fall(self, left: tf.Tensor) -> tf.Tensor:
        # sin^2 is (1 + cos) / 2 without its cancellation near the end.
        return tf.square(tf.sin(left * (math.pi / 2)))


@keras.utils.register_keras_serializable(package="vit_tpu")
class Linear(_Ending):
    """A straight line from the peak, after the warm-up, down to `end` at `total_steps`.

    Args:
      learning_rate, total_steps, warmup_steps, cooldown_steps: peak and lengths.
      end: last rate as a share of the peak; kept after the last step.
    """

    def _fall(self, left: tf.Tensor) -> tf.Tensor:
        return left


@keras.utils.register_keras_serializable(package="vit_tpu")
class Constant(_Schedule):
    """The peak, with a warm-up and a cool-down by choice (the latter needs `total_steps`)."""

    def _shape(self, step: tf.Tensor) -> tf.Tensor:
        return tf.constant(1.0)


def steps_from(
    duration: Any,
    *,
    total_steps: int | None = None,
    steps_per_epoch: float | None = None,
    examples_per_epoch: int | None = None,
    batch_size: int | None = None,
) -> int:
    """Returns a duration as a number of updates.

    Args:
      duration: a number of steps, or text such as "500 steps", "1.5 epochs", "1234 examples",
        "10%" (of `total_steps`), or a mapping with one of the keys steps, epochs, examples,
        percent; there, as in big_vision, percent is a fraction from 0 to 1.
      total_steps: updates in the run, for percentages.
      steps_per_epoch: updates in an epoch, for epochs; or else
      examples_per_epoch: examples in an epoch, with
      batch_size: examples in an update, for epochs and examples.

    Returns:
      The nearest whole number, at least 1 unless the duration is 0 (big_vision's `u.steps`).

    Raises:
      UserError: for a duration that cannot be read, or that needs an argument not given.
    """
    amount, unit = _parse(duration)
    if steps_per_epoch is None and examples_per_epoch and batch_size:
        steps_per_epoch = examples_per_epoch / batch_size
    factors = {
        "steps": (1.0, ""),
        "examples": (1 / batch_size if batch_size else None, "batch_size"),
        "epochs": (steps_per_epoch, "steps_per_epoch, or examples_per_epoch and batch_size"),
        "percent": (total_steps, "total_steps"),
    }
    factor, needed = factors[unit]
    if factor is None:
        raise UserError(f"The duration {duration!r} needs {needed} to become a number of steps.")
    steps = amount / batch_size if unit == "examples" and batch_size else amount * factor
    return max(1, round(steps)) if steps else 0


def _parse(duration: Any) -> tuple[float, str]:
    units = ("steps", "epochs", "examples", "percent")
    amount: Any
    if isinstance(duration, Mapping) and len(duration) == 1:
        ((unit, amount),) = duration.items()
    elif isinstance(duration, str) and (
        found := re.fullmatch(r"\s*([\d.]+(?:[eE][-+]?\d+)?)\s*(%|[a-z]*)\s*", duration)
    ):
        amount, unit = float(found[1]), found[2] or "steps"
        if unit in ("%", "percent"):
            amount, unit = amount / 100, "percent"
    else:
        amount, unit = duration, "steps"
    if unit not in units and f"{unit}s" in units:
        unit = f"{unit}s"
    if unit not in units:
        raise UserError(f'Unknown unit "{unit}" in {duration!r}{nearest(str(unit), units)}.')
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not amount >= 0:
        raise UserError(f'Cannot read the duration {duration!r}: give steps, "3 epochs", "10%" or "5000 examples".')
    if unit == "percent" and amount > 1:
        raise UserError(f"The duration {duration!r} is more than the whole run (100%).")
    return float(amount), unit


def _ratio(steps: tf.Tensor, length: float) -> tf.Tensor:
    return tf.cast(steps, tf.float32) / tf.constant(length, tf.float32)
