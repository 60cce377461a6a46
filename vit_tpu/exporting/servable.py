"""What every format exports: the model again in float32, unrolled, with preprocessing and probabilities around it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from vit_tpu.data import decode, preprocess
from vit_tpu.errors import UserError
from vit_tpu.models.vit import ViT

CROPS = ("resize", "central")
SCORES = {"softmax": tf.nn.softmax, "sigmoid": tf.sigmoid}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a user of the artefact has to know besides the model.

    Attributes:
      class_names: one for each logit.
      crop: how an image of another size becomes the model's: "resize" as a whole, or "central": the smaller side to
        8/7 of it, then the middle.
      loss: "softmax" or "sigmoid", which decides how logits become probabilities.
    """

    class_names: tuple[str, ...]
    crop: str = "resize"
    loss: str = "softmax"

    def check(self, model: ViT) -> None:
        """Raises UserError for a recipe that does not fit the model."""
        if model.num_classes and len(self.class_names) != model.num_classes:
            raise UserError(
                f"{len(self.class_names)} class names for a head of {model.num_classes} classes: give one for each"
            )
        if self.crop not in CROPS:
            raise UserError(f'crop is "{self.crop}": use {" or ".join(CROPS)}')
        if self.loss not in SCORES:
            raise UserError(f'loss is "{self.loss}": use {" or ".join(SCORES)}')


class Servable(tf.Module):
    """The graph functions of an exported model; `model` is a `float32_copy`.

    floats: float32 images [B, H, W, C] in [-1, 1]; pixels: uint8 images [B, any, any, C]; files: encoded images [B].
    Each gives {"logits": float32 [B, K], "probabilities": float32 [B, K]}; with num_classes 0, {"features": [B, D]}.
    """

    def __init__(self, model: ViT, recipe: Recipe):
        super().__init__(name="servable")
        recipe.check(model)
        self.recipe, self.image_size, self.channels = recipe, model.image_size, model.channels
        # A function and a list of variables: the Keras model as an attribute would be written once more as itself.
        self.weights = list(model.trainable_variables)
        self.forward = lambda images: model(images, training=False)
        self.has_classes = bool(model.num_classes)
        size, channels = self.image_size, self.channels
        self.floats = tf.function(self._floats, [tf.TensorSpec([None, *size, channels], tf.float32, "images")])
        self.pixels = tf.function(self._pixels, [tf.TensorSpec([None, None, None, channels], tf.uint8, "pixels")])
        self.files = tf.function(self._files, [tf.TensorSpec([None], tf.string, "files")])

    def outputs(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        result = self.forward(images)
        if not self.has_classes:
            return {"features": result}
        return {"logits": result, "probabilities": SCORES[self.recipe.loss](result)}

    def prepare(self, image: tf.Tensor) -> tf.Tensor:
        """Returns uint8 [H, W, C] of the model's size from uint8 [h, w, C] of any, as the evaluation prepares it."""
        size = self.image_size
        if self.recipe.crop == "central":
            image = preprocess.central_crop(preprocess.resize_small(image, round(max(size) * 8 / 7)), size)
        return tf.ensure_shape(preprocess.resize(image, size), [*size, self.channels])

    def _floats(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        return self.outputs(images)

    def _pixels(self, pixels: tf.Tensor) -> dict[str, tf.Tensor]:
        return self.outputs(preprocess.to_float(self._each(self.prepare, pixels)))

    def _files(self, files: tf.Tensor) -> dict[str, tf.Tensor]:
        return self.outputs(preprocess.to_float(self._each(lambda file: self.prepare(self._decode(file)), files)))

    def _each(self, function: Any, values: tf.Tensor) -> tf.Tensor:
        spec = tf.TensorSpec([*self.image_size, self.channels], tf.uint8)
        return tf.map_fn(function, values, fn_output_signature=spec)

    def _decode(self, file: tf.Tensor) -> tf.Tensor:
        """JPEG, PNG, GIF (first frame), BMP and WebP by TensorFlow alone: an artefact has no Python to call."""
        return decode.decode_in_graph(file, self.channels)
