"""Very small models that train by the rules of StepModel, so that a compiled step takes a second."""

import numpy as np
import tensorflow as tf
import tf_keras as keras

from vit_tpu.layers import drop
from vit_tpu.losses import LogitsLoss
from vit_tpu.models.step import StepModel
from vit_tpu.optim.decay import Parameter


class Scalar(StepModel):
    """logit = x * w for images [B, 1]; with the loss `Given` the gradient of w is the mean of x * label."""

    def __init__(self, start=0.0):
        super().__init__(name="scalar")
        self.w = self.add_weight(name="w", shape=[1], initializer=keras.initializers.Constant(start), dtype="float32")
        self.built = True

    def parameters(self):
        return [Parameter("w", self.w)]

    def call(self, images, training=False, seed=None):
        return images * self.w

    def compute_output_shape(self, input_shape):
        return tf.TensorShape([input_shape[0], 1])


class Given(LogitsLoss):
    """label * logit: the gradient is what the labels say."""

    def call(self, y_true, y_pred):
        return tf.cast(y_true, tf.float32) * y_pred[:, 0]


class Perceptron(StepModel):
    """Two layers over images [B, 6], with dropout between them if asked for."""

    def __init__(self, classes=5, hidden=40, dropout=0.0):
        super().__init__(name="perceptron")
        self.rate, self.classes = dropout, classes
        rng = np.random.default_rng(3)

        def weight(name, *shape):
            value = rng.normal(0, 0.5, shape).astype(np.float32)
            start = keras.initializers.Constant(value)
            return self.add_weight(name=name, shape=shape, initializer=start, dtype="float32")

        self.first, self.shift = weight("first", 6, hidden), weight("shift", hidden)
        self.middle = weight("middle", hidden, hidden)
        self.last, self.bias = weight("last", hidden, classes), weight("bias", classes)
        self.built = True

    def parameters(self):
        return [
            Parameter("first/kernel", self.first, depth=0),
            Parameter("first/bias", self.shift, kind="bias", depth=0),
            Parameter("middle/kernel", self.middle),
            Parameter("head/kernel", self.last, part="head", depth=2),
            Parameter("head/bias", self.bias, kind="bias", part="head", depth=2),
        ]

    def call(self, images, training=False, seed=None):
        x = tf.tanh(tf.matmul(images, self.first) + self.shift)
        x = drop.dropout(x, self.rate, seed if training else None)
        x = tf.tanh(tf.matmul(x, self.middle))
        return tf.matmul(x, self.last) + self.bias

    def compute_output_shape(self, input_shape):
        return tf.TensorShape([input_shape[0], self.classes])


def batches(*arrays, batch):
    """Returns a dataset of whole batches in order."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch, drop_remainder=True)


def scalar_data(gradients, batch=None, images=None, weights=None):
    """Returns batches for `Scalar` and `Given` whose examples have these gradients."""
    labels = np.asarray(gradients, np.float32)
    images = np.ones((len(labels), 1), np.float32) if images is None else images
    arrays = (images, labels) if weights is None else (images, labels, np.asarray(weights, np.float32))
    return batches(*arrays, batch=batch or len(labels))


def examples(count, classes=5, seed=0):
    """Returns images [count, 6] and labels [count]."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(count, 6)).astype(np.float32)
    return images, rng.integers(0, classes, count).astype(np.int32)


def values(model):
    return {p.path: p.variable.numpy() for p in model.parameters()}


def one_step(model):
    """Returns a function that runs the training step on one batch and returns its logs as floats."""

    @tf.function
    def run(*batch):
        if model.distribute_strategy.num_replicas_in_sync == 1:
            return model.train_step(batch)
        logs = model.distribute_strategy.run(model.train_step, args=(batch,))
        return {name: model.distribute_strategy.experimental_local_results(v)[0] for name, v in logs.items()}

    return lambda *batch: {n: float(v) for n, v in run(*map(tf.convert_to_tensor, batch)).items()}
