"""LAMB (arXiv 1904.00962) in two conventions of weight decay, chosen by name.

With u the bias-corrected Adam direction m_hat / (sqrt(v_hat) + epsilon), d the decay, w one
variable (one slice, if the model stacks its blocks) and r(x) = |w| / |x|::

    decay_style="decoupled"   w <- w - lr_t * (r(u) * u + d * w)
    decay_style="paper"       x = u + d * w;  w <- w - lr_t * r(x) * x

"paper" is the LAMB paper's, TensorFlow Addons' and tf-models-official's convention: decay passes
through the trust ratio, so its size does not depend on d alone. "decoupled" is what ViT recipes
mean by a decay of 0.03 or 3.0. Worked example, w = [3, 4], gradient 0, lr_t = 1: decoupled with
d = 0.5 gives [1.5, 2] (half of w is gone); paper with d = 0.1 gives [0, 0], because x = 0.1 * w
is rescaled to the length of w: one step wipes the weight.

r is 1 where |w| or |x| is 0, so a classifier that starts at zero moves (by a plain Adam step).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.errors import UserError, nearest
from vit_tpu.optim import arguments, rules
from vit_tpu.optim.adamw import Adam
from vit_tpu.optim.base import masked

DECAY_STYLES = ("decoupled", "paper")


@keras.utils.register_keras_serializable(package="vit_tpu")
class LAMB(Adam):
    """Adam with a trust ratio for each variable; see the module for the two formulas.

    With a vit_tpu model, kernels are decayed and, except the classifier's, trust-scaled; biases,
    normalisation and layer scales, position embeddings and tokens are neither. Without groups
    every variable is both. The two exclusion lists are independent: leaving a
    variable out of the decay keeps its trust ratio.

    Args:
      learning_rate: float or schedule of the number of applied updates.
      weight_decay: decay of all decayed parameters except the classifier's kernel.
      head_weight_decay: decay of the classifier's kernel; None = `weight_decay`.
      beta_1, beta_2: decay rates of the moments, in [0, 1).
      epsilon: added to the root of the second moment.
      decay_style: "decoupled" or "paper".
      trust_clip: largest trust ratio; None = unbounded, as in the paper.
      momentum_dtype: "bfloat16" halves the first moment, which saves a quarter of the optimizer's
        state, not more: the second moment and the weights stay float32.
      record_trust_ratios: keep each variable's ratio of the last applied update for
        `trust_ratios()`.
      **kwargs: exclude_from_weight_decay, exclude_from_layer_adaptation, global_clipnorm: see
        `GroupedOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        weight_decay: float = 0.0,
        head_weight_decay: float | None = None,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        decay_style: str = "decoupled",
        trust_clip: float | None = None,
        momentum_dtype: str = "float32",
        record_trust_ratios: bool = False,
        name: str = "LAMB",
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
        if decay_style not in DECAY_STYLES:
            hint = nearest(str(decay_style), DECAY_STYLES)
            raise UserError(f'decay_style is "{decay_style}"{hint}: give "decoupled" or "paper".')
        arguments.check_above_zero(trust_clip=trust_clip)
        self.decay_style, self.trust_clip = decay_style, trust_clip
        self.record_trust_ratios = bool(record_trust_ratios)
        self._ratios: dict[str, tf.Variable] = self._no_dependency({})

    def build(self, var_list: Any) -> None:
        """Creates the slots and, if asked for, a variable for each trust ratio."""
        built = getattr(self, "_built", False)
        super().build(var_list)
        if built or not self.record_trust_ratios:
            return
        ratios = {}
        with tf.init_scope():
            for variable in var_list:
                rule = self.rule(variable)
                if rule.trust and not rule.frozen:
                    shape = rule.shape[:1] if rule.stacked else ()
                    with tf.distribute.get_strategy().extended.colocate_vars_with(variable):
                        ratios[rule.path] = tf.Variable(
                            tf.ones(shape), trainable=False, name=f"trust_ratio/{rule.path}"
                        )
        # Not tracked: a diagnosis, not state, so checkpoints do not depend on asking for it.
        self._ratios = self._no_dependency(ratios)

    def _change(self, rule: rules.Rule, value: tf.Tensor, grad: tf.Tensor, scalars: dict[str, tf.Tensor]) -> tf.Tensor:
        change = self._direction(rule, value, grad, scalars)
        decay = self._decay_of(rule)
        if decay and self.decay_style == "paper":
            change += decay * value
        if rule.trust:
            ratio = self._trust_ratio(rule, value, change)
            change *= ratio
            if rule.path in self._ratios:
                kept = self._ratios[rule.path]
                kept.assign(masked(tf.reshape(ratio, kept.shape), kept, scalars))
        if decay and self.decay_style == "decoupled":
            change += decay * value
        return change

    def _trust_ratio(self, rule: rules.Rule, value: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
        weight, update = tf.sqrt(rule.sum(value * value)), tf.sqrt(rule.sum(change * change))
        defined = tf.logical_and(weight > 0, update > 0)
        ratio = tf.where(defined, weight / tf.where(defined, update, 1.0), 1.0)
        return ratio if self.trust_clip is None else tf.minimum(ratio, self.trust_clip)

    def trust_ratios(self) -> dict[str, tf.Tensor]:
        """Returns path -> trust ratio of the last applied update (a scalar, or one per slice).

        Raises:
          UserError: unless the optimizer was made with `record_trust_ratios=True`.
        """
        if not self.record_trust_ratios:
            raise UserError("Trust ratios were not kept: make LAMB(record_trust_ratios=True).")
        return {path: tf.convert_to_tensor(ratio) for path, ratio in self._ratios.items()}

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "decay_style": self.decay_style,
            "trust_clip": self.trust_clip,
            "record_trust_ratios": self.record_trust_ratios,
        }
