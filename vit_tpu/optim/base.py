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
from vit_tpu.optim import arguments, rules
from vit_tpu.optim.decay import Group

MOMENTUM_DTYPES = ("float32", "bfloat16")
Schedule = keras.optimizers.schedules.LearningRateSchedule


class GroupedOptimizer(keras.optimizers.Optimizer):
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
        if isinstance(learning_rate, (int, float)):
            arguments.check_not_negative(learning_rate=learning_rate)
        arguments.check_not_negative(weight_decay=weight_decay, head_weight_decay=head_weight_decay)
        arguments.check_above_zero(global_clipnorm=global_clipnorm)
        dtype = tf.as_dtype(momentum_dtype).name
        if dtype not in MOMENTUM_DTYPES:
            raise UserError(f'momentum_dtype is "{dtype}": give "float32" or "bfloat16".')
        super().__init__(
            name,
            weight_decay=float(weight_decay or 0.0),
            global_clipnorm=global_clipnorm,
            jit_compile=False,  # `Model.compile(jit_compile=True)` compiles the whole step
        )
        self.head_weight_decay = head_weight_decay
        self.momentum_dtype = dtype
        listed = arguments.patterns_list
        self._exclusions = self._no_dependency(
            {
                "weight_decay": listed(exclude_from_weight_decay, "exclude_from_weight_decay"),
                "layer_adaptation": listed(
                    exclude_from_layer_adaptation, "exclude_from_layer_adaptation"
                ),
            }
        )
        saved = [rules.Rule.from_dict(rule) for rule in groups or ()]
        self._saved_rules = self._no_dependency(saved)
        self._rules = self._no_dependency({})  # variable key -> Rule
        self._slots: dict[str, dict[str, tf.Variable]] = {}
        self._learning_rate = self._build_learning_rate(learning_rate)

    # Groups.

    def assign_groups(self, groups: Sequence[Group], keep_saved: bool = True) -> None:
        """Tells the optimizer which variable is updated how.

        Args:
          groups: from `decay.resolve(model.parameters(), ...)`.
          keep_saved: settings that came with `from_config` win over the groups' for the same path,
            so that a reloaded optimizer updates as the saved one did. Pass False when the user asks
            for other settings (freezing, layer decay).

        Raises:
          UserError: for an exclusion that matches nothing, or when slots exist already and the new
            groups would need others.
        """
        found = rules.from_groups(groups, self._exclusions)
        if keep_saved:
            saved = {rule.path: rule for rule in self._saved_rules}
            found = [(rules.same_path(rule, saved), variable) for rule, variable in found]
        assigned = {self._var_key(variable): rule for rule, variable in found}
        if getattr(self, "_built", False):
            self._check_same_slots(assigned)
        self._rules = self._no_dependency(assigned)

    def _check_same_slots(self, assigned: dict[str, rules.Rule]) -> None:
        for key, old in self._rules.items():
            new = assigned.get(key)
            if new is None or (new.frozen, new.stacked) != (old.frozen, old.stacked):
                raise UserError(
                    f"{self.name} already holds slots for other groups (see {old.path}): "
                    "make a new optimizer to change what is frozen or to train another model."
                )

    def rule(self, variable: tf.Variable) -> rules.Rule:
        """Returns how a variable is updated: path, decay class, trust ratio, rate scale."""
        try:
            return self._rules[self._var_key(variable)]
        except KeyError:
            raise UserError(
                f"{self.name} does not know the variable {variable.name}: build it with every "
                "trainable variable, or assign_groups with all parameters, before training."
            ) from None

    def _decay_of(self, rule: rules.Rule) -> float:
        head = self.weight_decay if self.head_weight_decay is None else self.head_weight_decay
        return float({"none": 0.0, "body": self.weight_decay, "head": head}[rule.decay])

    # Slots.

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the slots ("<slot>/<path>") of every variable that is not frozen."""
        if getattr(self, "_built", False):
            return
        variables = list(var_list)
        for variable in variables:
            dtype = tf.as_dtype(getattr(variable, "true_dtype", variable.dtype))
            if dtype != tf.float32:
                raise TypeError(
                    f"{self.name} cannot update {variable.name} of dtype {dtype.name}: keep "
                    "variables in float32 and compute in low precision with a mixed policy, "
                    'for example vit_tpu.precision("mixed_bfloat16").'
                )
        if not self._rules:
            found = rules.from_variables(variables, self._saved_rules, self._exclusions)
            keys = [self._var_key(variable) for variable in variables]
            self._rules = self._no_dependency(dict(zip(keys, found)))
        super().build(variables)
        slots: dict[str, dict[str, tf.Variable]] = {}
        with tf.init_scope():
            for variable in variables:
                rule = self.rule(variable)
                if rule.frozen:
                    continue
                for slot, (shape, dtype) in self._slot_specs(rule).items():
                    made = self._add_slot(variable, f"{slot}/{rule.path}", shape, dtype)
                    slots.setdefault(slot, {})[rule.path] = made
        self._slots = slots
        self._built = True

    def _add_slot(
        self, variable: tf.Variable, name: str, shape: Sequence[int], dtype: str
    ) -> tf.Variable:
        strategy = tf.distribute.get_strategy()
        with strategy.extended.colocate_vars_with(variable):
            # A callable, so that no zeros of the model's size outlive the creation.
            slot = tf.Variable(
                lambda: tf.zeros(shape, dtype), name=name, dtype=dtype, trainable=False
            )
        self._variables.append(slot)
        return slot

    def _slot_specs(self, rule: rules.Rule) -> dict[str, tuple[Sequence[int], str]]:
        """Returns slot name -> (shape, dtype) for one variable."""
        raise NotImplementedError

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict:
        # Slots are saved under their paths (self._slots). Keras' flat list would tie a checkpoint
        # to the order of variables, and its cache would miss slots made after a first save.
        children = tf.__internal__.tracking.AutoTrackable._trackable_children(
            self, save_type, **kwargs
        )
        return {key: child for key, child in children.items() if key != "_variables"}

    def save_own_variables(self, store: Any) -> None:
        """Puts the state into a Keras store, which has no bfloat16, as float32 (exact)."""
        for index, variable in enumerate(self.variables):
            low = variable.dtype == tf.bfloat16
            store[str(index)] = (tf.cast(variable, tf.float32) if low else variable).numpy()

    def load_own_variables(self, store: Any) -> None:
        """Takes the state from a Keras store; see `save_own_variables`."""
        if len(store.keys()) != len(self.variables):
            raise UserError(
                f"The saved {self.name} has {len(store.keys())} variables, this one "
                f"{len(self.variables)}: build it for the same model and options first."
            )
        for index, variable in enumerate(self.variables):
            variable.assign(tf.cast(store[str(index)][()], variable.dtype))

    # The update.

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
                (_dense_float32(grad), variable)
                for grad, variable in optimizer_utils.filter_empty_gradients(pairs)
            ]
            if aggregate and not skip_gradients_aggregation:
                pairs = self.aggregate_gradients(pairs)
            grads = self._clip_gradients([grad for grad, _ in pairs])
            variables = [variable for _, variable in pairs]
            scalars = self._scalars()
            if ok is not None:
                scalars["ok"] = tf.cast(ok, tf.bool)
            tf.__internal__.distribute.interim.maybe_merge_call(
                lambda strategy, grads, scalars: self._update_all(
                    strategy, variables, grads, scalars
                ),
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
                lambda target, grad, scalars, rule=rule: self._update_one(
                    target, grad, scalars, rule
                ),
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
            value = tf.convert_to_tensor(variable)
            change = self._change(rule, value, grad, scalars)
            rate = scalars["learning_rate"] * rule.lr_scale_tensor()
            new = value - rate * change
            if getattr(variable, "constraint", None) is not None:
                new = variable.constraint(new)
            variable.assign(masked(new, value, scalars))

    def _change(
        self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns what is multiplied by the learning rate: direction plus decoupled decay."""
        direction = self._direction(rule, value, grad, scalars)
        decay = self._decay_of(rule)
        return direction + decay * value if decay else direction

    def _direction(
        self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the float32 update direction and stores the slots (masked)."""
        raise NotImplementedError

    def _read(self, slot: str, rule: rules.Rule) -> tf.Tensor:
        return tf.cast(self._slots[slot][rule.path], tf.float32)

    def _write(
        self, slot: str, rule: rules.Rule, new: tf.Tensor, scalars: dict[str, tf.Tensor]
    ) -> None:
        variable = self._slots[slot][rule.path]
        stored = tf.cast(new, variable.dtype)
        variable.assign(masked(stored, variable, scalars))

    # Learning rate and configuration.

    def _build_learning_rate(self, learning_rate: Any) -> Any:
        if isinstance(learning_rate, Schedule):
            return learning_rate
        with tf.init_scope():
            return tf.Variable(
                learning_rate, name="learning_rate", dtype=tf.float32, trainable=False
            )

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


def _dense_float32(grad: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(grad), tf.float32)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _argument_names(kind: type) -> list[str]:
    names: list[str] = []
    for owner in (kind, GroupedOptimizer):
        names += inspect.signature(owner.__init__).parameters  # type: ignore[misc]
    return [name for name in names if name not in ("self", "kwargs", "groups")]
