"""Writes a trained model as a folder that runs elsewhere: SavedModel, ONNX or TFLite, in float32, checked.

Examples:
  python -m vit_tpu.export exported/ --workdir=runs/digits
      a SavedModel with signatures for floats, pixels of any size and encoded files, labels.txt, a model card
  python -m vit_tpu.export exported/ --workdir=runs/digits --format=onnx
      model.onnx, run through onnxruntime and compared
  python -m vit_tpu.export exported/ --workdir=runs/digits --format=tflite_int8 --calibration=200
      8-bit weights and activations, value ranges from 200 training images
  python -m vit_tpu.export exported/ --weights=vit_s16.npz --model=S/16 --class_names=names.txt
      any weight file that vit_tpu.convert reads

Exit codes: 0 done, 1 the artefact differs from the model (nothing is kept), 2 wrong use.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from vit_tpu import model_flags
from vit_tpu.command import execute
from vit_tpu.errors import UserError, nearest

FORMATS = ("saved_model", "onnx", "tflite", "tflite_int8")


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments, files="FOLDER")


def _define(flags: Any, values: Any) -> None:
    model_flags.define(flags, values)
    flags.DEFINE_string("format", "saved_model", f"{', '.join(FORMATS)}; default: saved_model", flag_values=values)
    flags.DEFINE_integer(
        "calibration", 100, "training images that give tflite_int8 its ranges; 100", flag_values=values
    )
    flags.DEFINE_integer("examples", 64, "validation images to compare on; 64. 0: noise", flag_values=values)


def _run(values: Any, files: list[str]) -> int:
    if len(files) != 1 or not files[0]:
        raise UserError("give the folder to write: python -m vit_tpu.export FOLDER --workdir=RUN")
    if values.format not in FORMATS:
        raise UserError(f"--format={values.format}{nearest(values.format, FORMATS)}: use {', '.join(FORMATS)}")
    model_flags.check(values)
    if values.calibration < 1:
        raise UserError(f"--calibration={values.calibration}: ask for 1 image or more, such as 100")
    if values.examples < 0:
        raise UserError(f"--examples={values.examples}: ask for 0 (noise) or more")
    if os.path.lexists(files[0]):
        raise UserError(f"{files[0]} exists: choose a new folder, or remove it first")
    trained = model_flags.load(values)
    from vit_tpu.exporting.command import export_trained

    print(export_trained(trained, files[0], values.format, values.workdir, values.calibration, values.examples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
