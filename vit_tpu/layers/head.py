"""What follows the pooling, in float32 under every policy: the classifier, and the tanh layer some put before it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

from vit_tpu.layers import base


class Head(base.ParamLayer):
    """Linear classifier in float32; the kernel starts at zero, so that training starts from the bias alone.

    Args:
      features: size of the last axis of the input.
      num_classes: C.
      bias_init: start of every bias: -10 suits sigmoid loss over tens of thousands of classes, -log(C) over fewer.
    """

    def __init__(self, features: int, num_classes: int, bias_init: float = 0.0, **kwargs: Any):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.features, self.num_classes, self.bias_init = features, num_classes, bias_init

    def own_specs(self) -> dict[str, base.Spec]:
        return {
            "kernel": base.Spec((self.features, self.num_classes), base.zeros, "kernel"),
            "bias": base.Spec((self.num_classes,), keras.initializers.Constant(self.bias_init), "bias"),
        }

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("head"):
            return base.dense(x, params["kernel"], params["bias"], tf.float32)


class Representation(base.ParamLayer):
    """tanh(Dense(x)) in float32 before the classifier, as the first ViTs had it."""

    def __init__(self, features: int, size: int, **kwargs: Any):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.features, self.size = features, size

    def own_specs(self) -> dict[str, base.Spec]:
        return {
            "kernel": base.Spec((self.features, self.size), base.lecun_normal, "kernel"),
            "bias": base.Spec((self.size,), base.zeros, "bias"),
        }

    def forward(self, params: base.Params, x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("pre_logits"):
            return tf.tanh(base.dense(x, params["kernel"], params["bias"], tf.float32))
