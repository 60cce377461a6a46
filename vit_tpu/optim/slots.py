"""What an optimizer knows about each variable: its rule, its slots, and how they are saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError
from vit_tpu.layers import sharding
from vit_tpu.optim import rules
from vit_tpu.optim.decay import Group


class SlottedOptimizer(keras.optimizers.Optimizer):
    """Groups and slots of `GroupedOptimizer`, its only subclass.

    Args:
      exclusions: "weight_decay" and "layer_adaptation" -> patterns, or None = the groups decide.
      saved_rules: of a reloaded optimizer.
      **kwargs: of the Keras base class.
    """

    def __init__(
        self,
        exclusions: dict[str, list[str] | None],
        saved_rules: Sequence[rules.Rule],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._exclusions = self._no_dependency(exclusions)
        self._saved_rules = self._no_dependency(list(saved_rules))
        self._rules = self._no_dependency({})  # variable key -> Rule
        self._slots: dict[str, dict[str, tf.Variable]] = {}
        self.layouts: dict[str, sharding.Layout] = self._no_dependency({})  # by path; empty without a mesh

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
                    name = f"{slot}/{rule.path}"
                    variable_slots = slots.setdefault(slot, {})
                    with sharding.placed(self.place(slot, rule)):
                        variable_slots[rule.path] = self._add_slot(variable, name, shape, dtype)
            # Into the tracked dictionary, which a checkpoint read earlier may be waiting for.
            for slot, made in slots.items():
                self._slots[slot] = made
        self._built = True

    def _add_slot(self, variable: tf.Variable, name: str, shape: Sequence[int], dtype: str) -> tf.Variable:
        strategy = tf.distribute.get_strategy()
        with strategy.extended.colocate_vars_with(variable):
            # A callable, so that no zeros of the model's size outlive the creation.
            slot = tf.Variable(lambda: tf.zeros(shape, dtype), name=name, dtype=dtype, trainable=False)
        self._variables.append(slot)
        return slot

    def place(self, slot: str, rule: rules.Rule) -> sharding.Spec | None:
        """How a slot lies on a mesh; None without one."""
        layout = self.layouts.get(rule.path)
        return None if layout is None else tuple(layout.state[axis] for axis in self._slot_axes(slot, rule))

    def _slot_axes(self, slot: str, rule: rules.Rule) -> Sequence[int]:
        """Returns the axes of the variable that a slot has."""
        return range(len(rule.shape))

    @property
    def slots(self) -> dict[str, dict[str, tf.Variable]]:
        """The state once built: slot name -> parameter path -> variable."""
        return self._slots

    def _slot_specs(self, rule: rules.Rule) -> dict[str, tuple[Sequence[int], str]]:
        """Returns slot name -> (shape, dtype) for one variable."""
        raise NotImplementedError

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict:
        # Slots are saved under their paths (self._slots). Keras' flat list would tie a checkpoint
        # to the order of variables, and its cache would miss slots made after a first save.
        children = tf.__internal__.tracking.AutoTrackable._trackable_children(self, save_type, **kwargs)
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
