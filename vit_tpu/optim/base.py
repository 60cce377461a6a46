"""What the four optimizers share: groups, masked updates, slots and their configuration.

One update of a variable w with learning rate lr_t (the schedule at the number of applied updates)::

    w <- w - lr_t * lr_scale * (direction + decay * w)

`direction` is the optimizer's own; `decay` is `weight_decay` or, for the classifier's kernel,
`head_weight_decay` (0 for excluded parameters). Decay therefore follows the schedule, as the
paper's 0.03 and 3.0 do. All arithmetic is float32 whatever the policy and the slots' dtype.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras
from tf_keras.src.mixed_precision import autocast_variable
from tf_keras.src.optimizers import utils as optimizer_utils

from vit_tpu.errors import UserError
from vit_tpu.layers import sharding
from vit_tpu.optim import arguments, rules
from vit_tpu.optim.gradients import dense_float32
from vit_tpu.optim.slots import SlottedOptimizer

MOMENTUM_DTYPES = ("float32", "bfloat16")
Schedule = keras.optimizers.schedules.LearningRateSchedule


class GroupedOptimizer(SlottedOptimizer):
    """Base of the optimizers: subclasses give `_slot_specs`, `_scalars` and `_direction`.

    Args:
      learning_rate: float or `LearningRateSchedule` of the number of applied updates.
      weight_decay: decay of everything that decays, except the classifier's kernel.
      head_weight_decay: decay of the classifier's kernel; None = `weight_decay`.
      exclude_from_weight_decay, exclude_from_layer_adaptation: globs over parameter paths (over
        variable names when no groups were assigned). None = the groups decide; [] = none.
      momentum_dtype: "float32" or "bfloat16", of the first moment alone.
      global_clipnorm: clips the gradients' global norm here, for use outside `vit_tpu.ViT`.
      groups: from `get_config`; users leave it alone and let the model assign its groups.
      name: of the optimizer.

    Raises:
      UserError: for a negative rate or decay, per-tensor clipping, `use_ema`, unknown arguments.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float = 0.0,
        head_weight_decay: float | None = None,
        *,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        momentum_dtype: str = "float32",
        global_clipnorm: float | None = None,
        groups: Sequence[dict] | None = None,
        name: str,
        **kwargs: Any,
    ) -> None:
        arguments.refuse(type(self).__name__, kwargs, _argument_names(type(self)))
        if not isinstance(learning_rate, (Schedule, tf.Variable, tf.Tensor)):
            arguments.check_number(learning_rate=learning_rate)
            arguments.check_not_negative(learning_rate=learning_rate)
        arguments.check_not_negative(weight_decay=weight_decay, head_weight_decay=head_weight_decay)
        arguments.check_above_zero(global_clipnorm=global_clipnorm)
        dtype = getattr(momentum_dtype, "name", momentum_dtype)
        if dtype not in MOMENTUM_DTYPES:
            raise UserError(f'momentum_dtype is "{dtype}": give "float32" or "bfloat16".')
        listed = arguments.patterns_list
        super().__init__(
            {
                "weight_decay": listed(exclude_from_weight_decay, "exclude_from_weight_decay"),
                "layer_adaptation": listed(exclude_from_layer_adaptation, "exclude_from_layer_adaptation"),
            },
            [rules.Rule.from_dict(rule) for rule in groups or ()],
            name=name,
            weight_decay=float(weight_decay or 0.0),
            global_clipnorm=global_clipnorm,
            jit_compile=False,  # `Model.compile(jit_compile=True)` compiles the whole step
        )
        self.head_weight_decay = head_weight_decay
        self.momentum_dtype = dtype
        self._learning_rate = self._build_learning_rate(learning_rate)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        ok: Any = None,
        **kwargs: Any,
    ) -> tf.Variable:
        """Updates the variables, or, where `ok` is false, nothing at all.

        Args:
          grads_and_vars: (gradient, variable) pairs; unscaled gradients.
          name: of the name scope.
          skip_gradients_aggregation: the gradients are already summed over the replicas.
          ok: scalar bool tensor, the same on every replica. False leaves every weight, slot and
            `iterations` as they are (by masked assignment: no branch, so it fuses and is legal in
            every strategy). None = apply.
          **kwargs: `experimental_aggregate_gradients`, the older opposite of
            `skip_gradients_aggregation`.

        Returns:
          `iterations`, the number of applied updates.
        """
        aggregate = kwargs.pop("experimental_aggregate_gradients", True)
        if kwargs:
            raise TypeError(f"apply_gradients() got unexpected arguments: {', '.join(kwargs)}.")
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError("apply_gradients() must be called in a replica context.")
        pairs = list(grads_and_vars)
        if not pairs:
            return self._iterations
        with tf.name_scope(name or self.name):
            with tf.init_scope():
                self.build([variable for _, variable in pairs])
            pairs = [(grad, variable) for grad, variable in pairs if not self.rule(variable).frozen]
            pairs = [
                (dense_float32(grad), variable) for grad, variable in optimizer_utils.filter_empty_gradients(pairs)
            ]
            if aggregate and not skip_gradients_aggregation:
                pairs = self.aggregate_gradients(pairs)
            grads = self._clip_gradients([grad for grad, _ in pairs])
            variables = [variable for _, variable in pairs]
            scalars = self._scalars()
            if ok is not None:
                scalars["ok"] = tf.cast(ok, tf.bool)
            tf.__internal__.distribute.interim.maybe_merge_call(
                lambda strategy, grads, scalars: self._update_all(strategy, variables, grads, scalars),
                tf.distribute.get_strategy(),
                list(grads),
                scalars,
            )
        return self._iterations

    def _scalars(self) -> dict[str, tf.Tensor]:
        """Returns what every variable's update needs, computed once for each replica."""
        return {"learning_rate": tf.cast(self.learning_rate, tf.float32)}

    def _update_all(
        self,
        strategy: tf.distribute.Strategy,
        variables: Sequence[tf.Variable],
        grads: Sequence[tf.Tensor],
        scalars: dict[str, tf.Tensor],
    ) -> None:
        for variable, grad in zip(variables, grads):
            rule = self.rule(variable)
            strategy.extended.update(
                variable,
                lambda target, grad, scalars, rule=rule: self._update_one(target, grad, scalars, rule),
                args=(grad, scalars),
                group=False,
            )

        def count(iterations: tf.Variable, scalars: dict[str, tf.Tensor]) -> Any:
            return iterations.assign_add(tf.cast(scalars.get("ok", True), tf.int64))

        strategy.extended.update(self._iterations, count, args=(scalars,), group=False)

    def _update_one(
        self,
        variable: tf.Variable,
        grad: tf.Tensor,
        scalars: dict[str, tf.Tensor],
        rule: rules.Rule,
    ) -> None:
        # The variable's own float32 value, not what an enclosing layer would compute with.
        with autocast_variable.enable_auto_cast_variables(None):
            layout = self.layouts.get(rule.path)
            stored = sharding.as_stored(tf.convert_to_tensor(variable), layout)
            value = sharding.as_state(stored, layout)
            change = self._change(rule, value, grad, scalars)
            rate = scalars["learning_rate"] * rule.lr_scale_tensor()
            new = value - rate * change
            if getattr(variable, "constraint", None) is not None:
                new = variable.constraint(new)
            # Where shares are brought together, a TPU's compiler cannot write them into the variable: the mask can.
            new = masked(sharding.as_stored(new, layout), stored, scalars)
            variable.assign(sharding.as_stored(new, layout))

    def _change(self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns what is multiplied by the learning rate: direction plus decoupled decay."""
        direction = self._direction(rule, value, grad, scalars)
        decay = self._decay_of(rule)
        return direction + decay * value if decay else direction

    def _direction(
        self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the float32 update direction and stores the slots (masked)."""
        raise NotImplementedError

    def _decay_of(self, rule: rules.Rule) -> float:
        head = self.weight_decay if self.head_weight_decay is None else self.head_weight_decay
        return float({"none": 0.0, "body": self.weight_decay, "head": head}[rule.decay])

    def _read(self, slot: str, rule: rules.Rule) -> tf.Tensor:
        return tf.cast(self._placed(slot, rule, self._slots[slot][rule.path]), tf.float32)

    def _write(self, slot: str, rule: rules.Rule, new: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        variable = self._slots[slot][rule.path]
        stored = tf.cast(new, variable.dtype)
        old = self._placed(slot, rule, variable) if "ok" in scalars else None
        variable.assign(self._placed(slot, rule, masked(stored, old, scalars)))

    def _placed(self, slot: str, rule: rules.Rule, x: Any) -> Any:
        """On a mesh: a slot's value where the slot lies."""
        return sharding.as_state(x, self.layouts.get(rule.path), self._slot_axes(slot, rule))

    # Learning rate and configuration.

    def _build_learning_rate(self, learning_rate: Any) -> Any:
        if isinstance(learning_rate, Schedule):
            return learning_rate
        with tf.init_scope():
            return tf.Variable(learning_rate, name="learning_rate", dtype=tf.float32, trainable=False)

    @property
    def learning_rate(self) -> Any:
        """The rate of the next update: a variable, or the schedule at `iterations`."""
        if isinstance(self._learning_rate, Schedule):
            return self._learning_rate(self._iterations)
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        if isinstance(learning_rate, Schedule):
            self._learning_rate = learning_rate
        elif isinstance(self._learning_rate, Schedule):
            raise UserError(
                f"{self.name} follows a schedule, so setting its learning rate would be lost: "
                "assign another schedule, or build the optimizer with a number."
            )
        else:
            self._learning_rate.assign(learning_rate)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Refused: exclusions are arguments, so that they survive `get_config`."""
        raise UserError(
            f"Pass exclude_from_weight_decay=[patterns] to {type(self).__name__}(...) instead of "
            "calling exclude_from_weight_decay(): exclusions then survive get_config."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns everything `from_config` needs to give identical updates, groups included."""
        saved = list(self._rules.values()) or self._saved_rules
        return {
            "name": self.name,
            "learning_rate": _plain(self._serialize_hyperparameter(self._learning_rate)),
            "weight_decay": self.weight_decay,
            "head_weight_decay": self.head_weight_decay,
            "exclude_from_weight_decay": self._exclusions["weight_decay"],
            "exclude_from_layer_adaptation": self._exclusions["layer_adaptation"],
            "momentum_dtype": self.momentum_dtype,
            "global_clipnorm": self.global_clipnorm,
            "groups": [rule.to_dict() for rule in saved] or None,
            "is_legacy_optimizer": False,
        }

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> GroupedOptimizer:
        """Builds the optimizer that `get_config` described."""
        return super().from_config(dict(config), custom_objects)


def masked(new: tf.Tensor, old: Any, scalars: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns `new`, or `old` where the step is not ok."""
    return tf.where(scalars["ok"], new, old) if "ok" in scalars else new


def bias_correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """Returns 1 - beta ** step in float32 without cancellation, 1 for large steps.

    Args:
      beta: decay rate in [0, 1).
      step: int64 scalar, 1 at the first update.
    """
    if beta == 0:
        return tf.constant(1.0)
    return -tf.math.expm1(tf.cast(step, tf.float32) * math.log(beta))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _argument_names(kind: type) -> list[str]:
    names: list[str] = []
    for owner in (kind, GroupedOptimizer):
        names += inspect.signature(owner.__init__).parameters  # type: ignore[misc]
    return [name for name in names if name not in ("self", "kwargs", "groups")]
