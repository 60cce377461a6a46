"""The same model built anew, for what comes after training."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from vit_tpu import precision
from vit_tpu.models.vit import ViT


def float32_copy(model: ViT, averaged: bool = False) -> ViT:
    """Returns the same model built anew under float32, without drop-out, loops or rematerialisation.

    Exporting the training model itself would export its policy: a mixed_float16 model returns half-precision numbers.

    Args:
      model: a ViT with its weights; stays as it is.
      averaged: take the moving average of the weights, which the model must keep.
    """
    settings = dict(model.settings) | {"scan": False, "remat": "none", "dropout": 0.0, "drop_path": 0.0}
    with precision.scope("float32"):
        copy = ViT(settings.pop("variant"), **settings)
    targets = {parameter.path: parameter.variable for parameter in copy.parameters()}
    with model.averaged_weights() if averaged else contextlib.nullcontext():
        for parameter in model.parameters():
            value = tf.convert_to_tensor(parameter.variable)
            if not parameter.stacked:
                targets.pop(parameter.path).assign(value)
                continue
            name = parameter.path.removeprefix("blocks/")
            for block in range(value.shape[0]):
                targets.pop(f"blocks/{block}/{name}").assign(value[block])
    if targets:  # would leave random weights in the artefact
        raise RuntimeError(f"parameters without a source: {', '.join(sorted(targets))}")
    return copy
