"""Counters of what the step did, and the callback that stops a run gone wrong."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError


class NonFiniteError(FloatingPointError):
    """The loss, or every gradient for a long time, was not finite; the weights are those before it began."""


# AutoGraph traces the body of a loop (several steps per execution), and tells its error in one of its own.
_QUOTED = re.compile(r"ran into a UserError: (.+)", re.DOTALL)
COUNTED = ("steps", "skipped", "in_a_row", "bad_step", "bad_gradient")


class Counters(tf.Module):
    """Steps taken, updates skipped, and the first bad step, as int64 variables that the compiled step updates.

    Attributes:
      steps: training steps taken, applied or not.
      skipped: steps whose gradient was not finite.
      in_a_row: how many of the last steps were skipped without an applied one between.
      bad_step: 1-based number of the first step whose loss (strictly: or gradient) was not finite, or 0. While it is
        set nothing is updated.
      bad_gradient: index of the first parameter whose gradient was not finite in the last skipped step, or -1.
    """

    def __init__(self) -> None:
        super().__init__(name="counters")
        self.steps = _counter("steps")
        self.skipped = _counter("skipped")
        self.in_a_row = _counter("in_a_row")
        self.bad_step = _counter("bad_step")
        self.bad_gradient = _counter("bad_gradient", -1)

    def latched(self) -> tf.Tensor:
        return self.bad_step.read_value() > 0

    def update(self, loss: tf.Tensor, ok: tf.Tensor, squares: tf.Tensor, strict: bool = False) -> None:
        """Counts one step.

        Args:
          loss: float32 scalar, the global mean loss.
          ok: whether the update was applied.
          squares: float32 [V], the squared norm of each parameter's gradient (not finite if the gradient is not).
          strict: whether a gradient that is not finite latches, too.
        """
        latched = self.latched()
        step = self.steps.read_value() + 1
        broken = tf.logical_not(tf.math.is_finite(squares))
        bad = tf.logical_not(tf.math.is_finite(loss))
        if strict:
            bad = tf.logical_or(bad, tf.reduce_any(broken))
        bad = tf.logical_and(bad, tf.logical_not(latched))
        skipped = tf.logical_and(tf.logical_not(ok), tf.logical_not(latched))
        first = tf.where(tf.reduce_any(broken), tf.argmax(tf.cast(broken, tf.int32)), tf.constant(-1, tf.int64))
        latching = self.bad_step.assign(tf.where(bad, step, self.bad_step.read_value()), read_value=False)
        self.bad_gradient.assign(tf.where(skipped, first, self.bad_gradient.read_value()))
        self.skipped.assign_add(tf.cast(skipped, tf.int64))
        self.in_a_row.assign(
            tf.where(ok, tf.zeros([], tf.int64), self.in_a_row.read_value() + tf.cast(skipped, tf.int64))
        )
        with tf.control_dependencies([latching] if latching is not None else []):
            self.steps.assign(step)  # last: who finds a step counted also finds whether it was bad

    def values(self) -> dict[str, int]:
        return {name: int(getattr(self, name).numpy()) for name in COUNTED}


def _counter(name: str, start: int = 0) -> tf.Variable:
    return tf.Variable(
        start, dtype=tf.int64, trainable=False, name=name, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


class StepGuard(keras.callbacks.Callback):
    """Raises NonFiniteError when the step has latched on a non-finite loss or skipped too many steps in a row.

    Args:
      every: executions between two looks; a look waits for the device. Nothing is lost by looking late, since the
        latched step changes no weight.
    """

    def __init__(self, every: int = 20):
        super().__init__()
        self._supports_tf_logs = True
        self.every, self.executions = every, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.executions += 1
        if self.executions % self.every == 0:
            check(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        check(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        check(self.model)


def check(model: Any) -> None:
    """Raises NonFiniteError if the model's counters say that training has gone wrong."""
    judge(model, model.counters.values())


def judge(model: Any, values: Mapping[str, int]) -> None:
    """Raises NonFiniteError if `values`, read from the model's counters, say that training has gone wrong."""
    if values["bad_step"]:
        what = "loss or gradient" if model.compiled["check_numerics"] else "loss"
        raise NonFiniteError(
            f"the {what} of step {values['bad_step']} is not finite; the weights are those after step "
            f"{values['bad_step'] - 1}. Look at that step's batch (a label outside the head's classes "
            "gives NaN), lower the learning rate or lengthen the warm-up"
        )
    limit = model.compiled["max_skipped"]
    if values["in_a_row"] >= limit:
        index = values["bad_gradient"]
        where = model.trained[index].path if 0 <= index < len(model.trained) else "unknown"
        scale = getattr(model.optimizer, "loss_scale", None)
        at = f" at loss scale {float(scale):g}" if scale is not None else ""
        raise NonFiniteError(
            f"{values['in_a_row']} steps in a row{at} had a gradient that is not finite, first in "
            f"{where}; no weight has "
            "changed since. Lower the learning rate, or train in mixed_bfloat16, whose range is float32's"
        )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raises a UserError of code that Keras or AutoGraph called as it was written: they would change its type or add
    lines."""
    handled = sys.exc_info()[1]  # what the caller is dealing with is not the cause of what fails in here
    try:
        yield
    except Exception as error:
        found: UserError | None = None
        inner: BaseException | None = error
        while inner is not None and inner is not handled:
            found = inner if isinstance(inner, UserError) else found
            quoted = _QUOTED.search(str(inner)) if found is None else None
            found = UserError(quoted.group(1).strip()) if quoted else found
            inner = inner.__cause__ or inner.__context__
        if found is None or found is error:
            raise
        raise UserError(*found.args) from None


def refuse_useless(callbacks: list[Any]) -> None:
    """Raises UserError for Keras callbacks that would silently do nothing, or for callbacks of Keras 3."""
    for callback in callbacks:
        name, package = type(callback).__name__, type(callback).__module__.split(".")[0]
        if package == "keras":
            raise UserError(f"callback {name} belongs to the package keras (Keras 3); pass its tf_keras counterpart")
        if isinstance(callback, keras.callbacks.ReduceLROnPlateau | keras.callbacks.LearningRateScheduler):
            raise UserError(
                f"{name} has no effect on a scheduled learning rate: give the optimizer a schedule of vit_tpu.optim"
            )
