"""Averages of the weights, in float32, that never overwrite the weights being trained."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tf_keras.src.mixed_precision import autocast_variable

from vit_tpu.errors import UserError
from vit_tpu.layers import sharding


class Ema(tf.__internal__.tracking.AutoTrackable):
    """Exponential moving average, or uniform (Polyak) average, of a list of variables.

    With t = 0, 1, ... the number of updates before this one::

        decay d:     average <- average + (1 - d_t) * (w - average),
                     d_t = min(d, (1 + t) / (10 + t)) with warm-up, else d
        decay None:  average = mean of the weights after each update from `start_step` on
                     (before that: the weights)

    Averages start as the weights, so no bias has to be removed: a constant weight has itself as
    average at every step. Skipped updates (`ok` false) do not count.

    Args:
      decay: in [0, 1), or None for the uniform average (the paper fine-tunes ViT-G with it).
      warmup: follow the weights more closely at first; without it 0.9999 remembers the random
        initial weights for tens of thousands of updates.
      start_step: updates before the uniform average begins.

    Raises:
      UserError: for a decay outside [0, 1) or a negative start.
    """

    def __init__(self, decay: float | None = 0.9999, warmup: bool = True, start_step: int = 0) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise UserError(f"EMA decay is {decay}: give a number in [0, 1), or None for the mean.")
        if start_step < 0:
            raise UserError(f"EMA start_step is {start_step}: give 0 or more.")
        self.decay, self.warmup, self.start_step = decay, bool(warmup), int(start_step)
        self.updates: tf.Variable | None = None
        self.averages: list[tf.Variable] = []
        self._weights: Any = self._no_dependency([])
        self.layouts: Sequence[sharding.Layout] = self._no_dependency([])  # of the weights, on a mesh
        self._swapped = False

    def build(self, variables: Sequence[tf.Variable]) -> None:
        """Creates float32 averages equal to the variables; call it in the strategy's scope."""
        if self.averages:
            return
        weights = list(variables)
        made = []
        with tf.init_scope(), autocast_variable.enable_auto_cast_variables(None):
            self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="ema/updates")
            places: Sequence[Any] = [layout.state for layout in self.layouts] or [None] * len(weights)
            for weight, place in zip(weights, places):
                with sharding.placed(place), tf.distribute.get_strategy().extended.colocate_vars_with(weight):
                    made.append(
                        tf.Variable(
                            lambda weight=weight: tf.cast(weight, tf.float32),
                            trainable=False,
                            name=f"ema/{weight.name.split(':')[0]}",
                        )
                    )
        self._weights = self._no_dependency(weights)  # the model's, not ours to save
        self.averages = made

    def update(self, ok: Any = None) -> None:
        """Moves the averages towards the weights; in a replica context or without a strategy.

        Args:
          ok: scalar bool tensor, the same on every replica; False changes nothing. None = update.
        """
        if not self.averages:
            raise UserError("Ema.update() before Ema.build(variables): build it first.")
        count = tf.convert_to_tensor(self.updates)
        scalars = {"rate": self._rate(count)}
        if ok is not None:
            scalars["ok"] = tf.cast(ok, tf.bool)
        tf.__internal__.distribute.interim.maybe_merge_call(self._update_all, tf.distribute.get_strategy(), scalars)

    def _rate(self, count: tf.Tensor) -> tf.Tensor:
        """Returns 1 - d_t, float32, so that nothing is lost by rounding d_t near 1."""
        updates = tf.cast(count, tf.float32)
        if self.decay is None:
            averaged = tf.cast(tf.maximum(count - self.start_step, 0), tf.float32)
            return 1.0 / (1.0 + averaged)
        rate = tf.constant(1.0 - self.decay, tf.float32)
        return tf.maximum(rate, 9.0 / (10.0 + updates)) if self.warmup else rate

    def _update_all(self, strategy: tf.distribute.Strategy, scalars: dict[str, tf.Tensor]) -> None:
        def move(average: tf.Variable, weight: Any, scalars: dict[str, tf.Tensor], layout: Any) -> None:
            with autocast_variable.enable_auto_cast_variables(None):
                old = sharding.as_state(tf.convert_to_tensor(average), layout)
                value = sharding.as_state(sharding.as_stored(tf.cast(weight, tf.float32), layout), layout)
                new = old + scalars["rate"] * (value - old)
                new = tf.where(scalars["ok"], new, old) if "ok" in scalars else new
                average.assign(sharding.as_state(new, layout))

        def count(updates: tf.Variable, scalars: dict[str, tf.Tensor]) -> None:
            updates.assign_add(tf.cast(scalars.get("ok", True), tf.int64))

        places: Sequence[Any] = self.layouts or [None] * len(self.averages)
        for average, weight, layout in zip(self.averages, self._weights, places):
            strategy.extended.update(
                average, functools.partial(move, layout=layout), args=(weight, scalars), group=False
            )
        strategy.extended.update(self.updates, count, args=(scalars,), group=False)

    @contextlib.contextmanager
    def averaged(self, variables: Sequence[tf.Variable] | None = None) -> Iterator[None]:
        """Within this context the variables hold the averages; afterwards their own values again.

        Both swaps are bit-exact and need memory for one variable at a time. Values are restored
        also when the block raises. Do not train or save inside.

        Args:
          variables: those given to `build` (the default), in the same order.
        """
        weights = list(self._weights if variables is None else variables)
        if not self.averages or len(weights) != len(self.averages):
            raise UserError(
                f"Ema averages {len(self.averages)} variables, but {len(weights)} were given: pass those of build()."
            )
        if self._swapped:
            raise UserError("The averages are in use already: leave the first averaged() block.")
        self._swapped = True
        swapped: list[tuple[tf.Variable, tf.Variable]] = []
        try:
            for pair in zip(weights, self.averages):
                _swap(*pair)
                swapped.append(pair)
            yield
        finally:
            for pair in swapped:
                _swap(*pair)
            self._swapped = False


def _swap(first: tf.Variable, second: tf.Variable) -> None:
    one, two = tf.convert_to_tensor(first), tf.convert_to_tensor(second)
    first.assign(two)
    second.assign(one)
