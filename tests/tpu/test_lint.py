"""The operations lint names what XLA cannot run, and the layer it is in."""

import pytest
import tensorflow as tf
import tf_keras as keras

from vit_tpu import ViT
from vit_tpu.errors import UserError
from vit_tpu.tpu import lint


class Odd(keras.layers.Layer):
    def call(self, x):
        return x + tf.strings.to_number(tf.strings.as_string(tf.nn.softmax(x)))


class Asking(keras.layers.Layer):
    def call(self, x):
        return tf.numpy_function(lambda value: value, [x], tf.float32)


def in_model(layer):
    class Model(keras.Model):
        def __init__(self):
            super().__init__(name="model")
            self.inner = layer

        def call(self, x):
            return self.inner(x)

    return Model()


SPEC = [tf.TensorSpec([2, 3])]


def test_operation_without_kernel_is_named_with_its_layer():
    found = lint.of_function(in_model(Odd(name="odd")), SPEC)
    assert {(f.operation, f.layer) for f in found} == {("AsString", "model/odd"), ("StringToNumber", "model/odd")}


def test_python_inside_the_step_is_named():
    (found,) = lint.of_function(in_model(Asking(name="asking")), SPEC)
    assert found.operation == "PyFunc" and found.layer == "model/asking" and "Python" in str(found)


def test_inside_a_loop_the_layer_is_found():
    model = in_model(Odd(name="odd"))
    found = lint.of_function(lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, model(y)), [0, x]), SPEC)
    assert {f.operation for f in found} == {"AsString", "StringToNumber"}
    assert all(f.layer == "model/odd" for f in found)


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_our_training_step_is_clean(optimizer):
    sizes = {"width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2}
    model = ViT("Ti/2", image_size=8, num_classes=10, pool="map", channels=1, dropout=0.1, drop_path=0.1, **sizes)
    model.compile(optimizer, accumulation_steps=2, ema=0.9, grad_clip_norm=1.0, seed=1)
    assert lint.of_model(model, 8, 1) == []
    lint.check(model, 8, 1)


def test_check_lists_operations_and_layers(monkeypatch):
    monkeypatch.setattr(lint, "of_model", lambda *a: [lint.Finding("AsString", "blocks/3/odd", 2)])
    with pytest.raises(UserError, match=r"AsString in blocks/3/odd \(2 times\) has no XLA kernel.*tf\.data"):
        lint.check(None, 8, 1)


def test_error_of_the_compiler_becomes_operation_and_layer():
    run = tf.function(in_model(Odd(name="odd")), jit_compile=True, autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(tf.ones([2, 3]))
    told = lint.explain(caught.value)
    assert "AsString in model/odd" in told and "XLA_CPU" in told and "\n" not in told
    assert lint.explain(ValueError("something else")) is None


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("gradient_tape/while/blocks/0/mlp/MatMul_1/MatMul", "blocks/0/mlp"),
        ("while/blocks/0/attention/softmax/MatMul", "blocks/0/attention/softmax"),
        ("while_1/body/head/MatMul", "head"),
        ("AddV2", "the step itself"),
    ],
)
def test_layer_of(name, layer):
    assert lint.layer_of(name) == layer
