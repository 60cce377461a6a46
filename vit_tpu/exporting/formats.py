"""Writes a servable as SavedModel, ONNX or TFLite, and reads each back as a function of float images."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.errors import UserError
from vit_tpu.exporting.servable import Servable

FORMATS = ("saved_model", "onnx", "tflite", "tflite_int8")
OPSET = 17  # the first with LayerNormalization, read by every onnxruntime since 1.12
Runner = Callable[[np.ndarray], np.ndarray]  # float32 images [B, H, W, C] -> logits (or features)


def write(servable: Servable, folder: pathlib.Path, format_: str, calibration: Iterable[np.ndarray] = ()) -> Runner:
    """Writes the model into `folder` and returns it as read back from there.

    Args:
      servable: what to write.
      folder: exists.
      format_: one of `FORMATS`.
      calibration: batches of float32 images [B, H, W, C], whose value ranges tflite_int8 takes over.

    Raises:
      UserError: the packages of the format are not installed.
    """
    if format_ == "saved_model":
        return _saved_model(servable, folder)
    if format_ == "onnx":
        return _onnx(servable, folder)
    return _tflite(servable, folder, list(calibration) if format_ == "tflite_int8" else None)


def read(folder: str | os.PathLike[str]) -> Runner:
    """Returns an exported model (a folder that `export` wrote) as a function of float images.

    Raises:
      UserError: there is no exported model.
    """
    path = pathlib.Path(folder)
    if (path / "1" / "saved_model.pb").exists():
        return _read_saved_model(path)
    if (path / "model.onnx").exists():
        return _read_onnx(path)
    if (path / "model.tflite").exists():
        return _read_tflite(path)
    raise UserError(f"{path} holds no exported model (1/saved_model.pb, model.onnx or model.tflite)")


def _saved_model(servable: Servable, folder: pathlib.Path) -> Runner:
    signatures = {"serving_default": servable.floats, "pixels": servable.pixels, "files": servable.files}
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)  # an artefact is not trained
    # TensorFlow Serving takes a folder of versions.
    tf.saved_model.save(servable, str(folder / "1"), signatures, options)
    return _read_saved_model(folder)


def _read_saved_model(folder: pathlib.Path) -> Runner:
    loaded = tf.saved_model.load(str(folder / "1"))
    run = loaded.signatures["serving_default"]

    def runner(images: np.ndarray) -> np.ndarray:
        return main_output(run(images=tf.constant(images))).numpy()

    runner.loaded = loaded  # type: ignore[attr-defined]  # the variables live as long as the function
    return runner


def main_output(outputs: dict[str, Any]) -> Any:
    """Returns the logits, or the features of a model without classes."""
    return outputs["logits"] if "logits" in outputs else outputs["features"]


def _onnx(servable: Servable, folder: pathlib.Path) -> Runner:
    try:
        import onnx
        import onnxruntime  # noqa: F401  (checked before the long part)
        import tf2onnx
    except ImportError as error:
        raise UserError(f"--format=onnx needs {error.name}: pip install 'vit_tpu[export]'") from None
    proto, _ = tf2onnx.convert.from_function(
        servable.floats, input_signature=servable.floats.input_signature, opset=OPSET
    )
    proto.producer_name = "vit_tpu"
    onnx.helper.set_model_props(
        proto, {"class_names": json.dumps(servable.recipe.class_names), "input": "float32 [B, H, W, C] in [-1, 1]"}
    )
    onnx.checker.check_model(proto)
    onnx.save(proto, str(folder / "model.onnx"))
    return _read_onnx(folder)


def _read_onnx(folder: pathlib.Path) -> Runner:
    try:
        import onnxruntime
    except ImportError:
        raise UserError("reading ONNX needs onnxruntime: pip install 'vit_tpu[export]'") from None
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = "logits" if "logits" in names else "features"
    return lambda images: session.run([wanted], {session.get_inputs()[0].name: images})[0]


def _tflite(servable: Servable, folder: pathlib.Path, calibration: list[np.ndarray] | None) -> Runner:
    # TFLite plans its memory once: one image a call, and no batch dimension to resolve at run time.
    spec = tf.TensorSpec([1, *servable.image_size, servable.channels], tf.float32, "images")
    one = tf.function(servable.outputs, [spec])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([one.get_concrete_function()], servable)
    if calibration is not None:
        if not calibration:
            raise UserError("int8 takes its value ranges from images: give calibration images (--calibration=100)")

        def ranges() -> Iterable[list[np.ndarray]]:
            for batch in calibration:
                for image in batch:
                    yield [image[None]]

        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = ranges
    (folder / "model.tflite").write_bytes(converter.convert())
    return _read_tflite(folder)


def _read_tflite(folder: pathlib.Path) -> Runner:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(folder / "model.tflite"))
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner()

    def run(images: np.ndarray) -> np.ndarray:
        return np.concatenate([main_output(runner(images=image[None])) for image in images])

    return run
