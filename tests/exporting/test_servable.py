"""What is exported: the same model in float32 with the evaluation's preprocessing around it."""

import numpy as np
import pytest
import tensorflow as tf
from export_helpers import NAMES, floats, images, tiny

from vit_tpu import optim
from vit_tpu.data import pipeline
from vit_tpu.data.arrays import from_arrays
from vit_tpu.errors import UserError
from vit_tpu.exporting.servable import Recipe, Servable
from vit_tpu.models.rebuild import float32_copy


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_copy_computes_in_float32_whatever_the_policy_was(policy):
    x = floats(images())
    copy, wanted = float32_copy(tiny(policy))(x), tiny("float32")(x)
    assert copy.dtype == tf.float32
    np.testing.assert_allclose(copy, wanted, atol=1e-6)
    assert np.abs(tiny(policy)(x) - wanted).max() > 1e-4  # the policy's own rounding would be seen


def test_copy_of_stacked_blocks_is_unrolled_and_equal():
    stacked = tiny(scan=True)
    copy = float32_copy(stacked)
    assert not copy.scan and len(copy.blocks) == 2
    np.testing.assert_allclose(copy(floats(images())), stacked(floats(images())), atol=1e-5)


def test_copy_drops_nothing():
    model = tiny(dropout=0.5, drop_path=0.5)
    copy = float32_copy(model)
    np.testing.assert_allclose(copy(floats(images()), training=True), model(floats(images())), atol=1e-6)


def test_averaged_copy_holds_the_average_and_the_model_its_weights():
    model = tiny()
    model.compile(optim.SGD(0.1), ema=0.5)
    before = model(floats(images())).numpy()
    for average in model.averages.averages:
        average.assign(average * 0.5)
    with model.averaged_weights():
        wanted = model(floats(images())).numpy()
    np.testing.assert_allclose(float32_copy(model, averaged=True)(floats(images())), wanted, atol=1e-6)
    np.testing.assert_allclose(float32_copy(model)(floats(images())), before, atol=1e-6)
    assert np.abs(before - wanted).max() > 1e-3


@pytest.mark.parametrize("crop", ["resize", "central"])
def test_pixels_are_prepared_as_in_the_evaluation(crop):
    model, pixels = tiny(), images(5, (23, 31))
    source = from_arrays(pixels, np.zeros(5, np.int32), num_classes=4)
    batch, _, _ = next(iter(pipeline.eval_pipeline(source, batch_size=5, image_size=12, crop=crop)))
    outputs = Servable(model, Recipe(NAMES, crop)).pixels(pixels)
    np.testing.assert_allclose(outputs["logits"], model(batch), atol=1e-5)


@pytest.mark.parametrize("encode", [tf.io.encode_png, lambda image: tf.io.encode_jpeg(image, quality=95)])
def test_files_are_prepared_as_in_the_evaluation(encode):
    model, files = tiny(), [encode(image) for image in images(3, (20, 17))]
    decoded = np.stack([tf.io.decode_image(file).numpy() for file in files])
    servable = Servable(model, Recipe(NAMES))
    np.testing.assert_allclose(servable.files(tf.stack(files))["logits"], servable.pixels(decoded)["logits"], atol=1e-5)


def test_grey_models_take_colour_files():
    model, image = tiny(channels=1), images(1, (12, 12), 3)
    outputs = Servable(model, Recipe(NAMES)).files(tf.stack([tf.io.encode_png(image[0])]))
    luma = np.rint(image @ [0.299, 0.587, 0.114])[..., None]
    np.testing.assert_allclose(outputs["logits"], model(floats(luma)), atol=1e-4)


def test_probabilities_follow_the_loss():
    x = tf.constant(floats(images()))
    soft, each = (Servable(tiny(), Recipe(NAMES, loss=loss)).floats(x) for loss in ("softmax", "sigmoid"))
    np.testing.assert_allclose(tf.reduce_sum(soft["probabilities"], -1), np.ones(6), atol=1e-6)
    np.testing.assert_allclose(each["probabilities"], 1 / (1 + np.exp(-each["logits"].numpy())), atol=1e-6)


@pytest.mark.parametrize(
    "recipe, words",
    [
        (Recipe(("a", "b")), "2 class names for a head of 4 classes"),
        (Recipe(NAMES, crop="inception"), 'crop is "inception"'),
        (Recipe(NAMES, loss="hinge"), 'loss is "hinge"'),
    ],
)
def test_recipes_that_do_not_fit_are_refused(recipe, words):
    with pytest.raises(UserError, match=words):
        Servable(tiny(), recipe)
