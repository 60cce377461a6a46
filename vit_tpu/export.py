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

from vit_tpu.command import execute
from vit_tpu.errors import UserError, nearest

FORMATS = ("saved_model", "onnx", "tflite", "tflite_int8")


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments, files="FOLDER")


def _define(flags: Any, values: Any) -> None:
    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    text("workdir", None, "folder of the run whose model is exported")
    text("checkpoint", "newest", "with --workdir: newest, best (of the highest validation accuracy) or a step")
    text("weights", None, "weight file instead of a run")
    text("model", None, "with --weights: variant such as B/16, if the file does not tell")
    text("normalize", "half", "with --weights: images it was trained on: half (in [-1, 1]) or imagenet (mean and std)")
    text("class_names", None, "text file, one name a line, or a JSON list; default: the run's own, else numbers")
    text("format", "saved_model", f"{', '.join(FORMATS)}; default: saved_model")
    flags.DEFINE_boolean(
        "ema", None, "the moving average of the weights; default: if the run kept one", flag_values=values
    )
    flags.DEFINE_integer(
        "calibration", 100, "training images that give tflite_int8 its ranges; 100", flag_values=values
    )
    flags.DEFINE_integer("examples", 64, "validation images to compare on; 64. 0: noise", flag_values=values)
    flags.DEFINE_multi_string("set", [], "key=value for any key of the config; may be repeated", flag_values=values)


def _run(values: Any, files: list[str]) -> int:
    if len(files) != 1 or not files[0]:
        raise UserError("give the folder to write: python -m vit_tpu.export FOLDER --workdir=RUN")
    if values.format not in FORMATS:
        raise UserError(f"--format={values.format}{nearest(values.format, FORMATS)}: use {', '.join(FORMATS)}")
    if bool(values.workdir) == bool(values.weights):
        raise UserError("give --workdir of a run or --weights of a file, one of them")
    if values.workdir is not None and values.model is not None:
        raise UserError("--model belongs to --weights: a run knows its own")
    if values.workdir and values["normalize"].present:
        raise UserError("--normalize goes with --weights; a run knows its own")
    if values.weights and values["checkpoint"].present:
        raise UserError("--checkpoint goes with --workdir")
    if values.calibration < 1:
        raise UserError(f"--calibration={values.calibration}: ask for 1 image or more, such as 100")
    if values.examples < 0:
        raise UserError(f"--examples={values.examples}: ask for 0 (noise) or more")
    if os.path.lexists(files[0]):
        raise UserError(f"{files[0]} exists: choose a new folder, or remove it first")
    from vit_tpu.exporting.command import export_trained  # TensorFlow loads here, after the cheap checks

    print(
        export_trained(
            files[0],
            values.format,
            workdir=values.workdir or None,
            checkpoint=values.checkpoint,
            weights=values.weights,
            normalize=values.normalize,
            variant=values.model,
            class_names=values.class_names,
            ema=values.ema,
            calibration=values.calibration,
            examples=values.examples,
            overrides=values.set,
        )  # fmt: skip
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
