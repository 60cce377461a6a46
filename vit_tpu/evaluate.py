"""Evaluates a trained model: with its head, or what its features are worth.

Examples:
  python -m vit_tpu.evaluate --workdir=runs/digits
      the run's own validation data; the average of the weights if the run kept one
  python -m vit_tpu.evaluate --workdir=runs/cifar --data=/data/other --json=result.json
      other data: a folder of class folders, an .npz file, or digits
  python -m vit_tpu.evaluate --weights=vit_b16.npz --data=/data/imagenet --set data.crop=inception --real=real.json
      a weight file; images cut as in training on natural images; also ReaL labels
  python -m vit_tpu.evaluate --workdir=runs/cifar --fewshot=1,5,10 --knn=10 --probe
      the features instead of the head: few-shot linear regression, nearest neighbours, a trained linear probe

Exit codes: 0 done, 1 failed, 2 wrong use.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from vit_tpu import model_flags
from vit_tpu.command import execute, write_json
from vit_tpu.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments)


def _define(flags: Any, values: Any) -> None:
    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    model_flags.define(flags, values)
    model_flags.define_where(flags, values)
    text(
        "data",
        None,
        "folder of class folders, .npz file, digits, or source:path (tfds:cifar10); default: the run's data",
    )
    text("split", "validation", "validation, train, or all images of data without a validation split")
    text("real", None, "ReaL labels of ImageNet: JSON list of label lists in the order of the files' names")
    text("labels_map", None, "JSON file {output of the head: class of the data}, names or numbers")
    text("plots", None, "folder for the pictures; default: plots/ of the run, none for --weights")
    text("fewshot", None, "shots, such as 1,5,10: the paper's linear regression on features, three seeds")
    text("knn", None, "numbers of neighbours, such as 10,20: cosine nearest neighbours on features")
    text("temperature", None, "with --knn: votes weigh exp(cosine / temperature); default: they weigh the same")
    text("features", "head", "head (what the classifier reads), cls (class token) or mean (of the patch tokens)")
    flags.DEFINE_boolean("probe", False, "a trained linear probe: logistic regression on features", flag_values=values)


def _run(values: Any) -> int:
    model_flags.check(values)
    shots, neighbours = _numbers(values.fewshot, "fewshot"), _numbers(values.knn, "knn")
    temperature = _positive(values.temperature, "temperature")
    if values.split not in ("train", "validation", "all"):
        raise UserError(f"--split={values.split} is none of validation, train, all")
    if values.plots and os.path.exists(values.plots) and not os.path.isdir(values.plots):
        raise UserError(f"--plots={values.plots} is a file: name a folder")
    if values.weights and values.data is None and not any(s.startswith("data.") for s in values.set):
        raise UserError("--weights needs --data: a folder of class folders, an .npz file, or digits")
    trained = model_flags.load(values, values.data)
    if shots or neighbours or values.probe:
        if values.real or values.labels_map:
            raise UserError("--real and --labels_map judge the head; --fewshot, --knn and --probe do not use it")
        from vit_tpu.evaluation.report import judge_features

        result: Any = judge_features(
            trained, shots=shots, neighbours=neighbours, temperature=temperature, probe=values.probe,
            features=values.features, batch_size=values.batch_size,
        )  # fmt: skip
        print(result)
    else:
        from vit_tpu.evaluation.evaluating import evaluate
        from vit_tpu.evaluation.report import draw

        result = evaluate(
            trained, split=values.split, batch_size=values.batch_size, real=values.real, labels_map=values.labels_map
        )
        print(result)
        folder = values.plots or (os.path.join(values.workdir, "plots") if values.workdir else None)
        for path in draw(result, folder) if folder else ():
            print(f"  wrote {path}")
    if values.json:
        write_json(values.json, result.to_dict())
    return 0


def _numbers(text: str | None, name: str) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise UserError(f"--{name}={text}: write numbers above 0 with commas, such as 1,5,10")
    return found


def _positive(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise UserError(f"--{name}={text}: write a number above 0, such as 0.07")
    return value


class _CallableModule(types.ModuleType):
    """`vit_tpu.evaluate(...)` in Python is the function behind this command."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from vit_tpu.evaluation.evaluating import evaluate

        return evaluate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
