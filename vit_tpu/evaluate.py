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

from vit_tpu.command import execute
from vit_tpu.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments)


def define_model(flags: Any, values: Any) -> None:
    """Defines the flags that say which model; `predict` has them too."""

    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    text("workdir", None, "folder of the run whose model it is")
    text("checkpoint", "newest", "with --workdir: newest, best (of the highest validation accuracy) or a step")
    text("weights", None, "weight file instead of a run (.npz, .safetensors, as for --init_from)")
    text("model", None, "with --weights: shape and patch size, such as B/16; default: what the file says")
    text("class_names", None, "with --weights: file with a class name a line, in label order")
    text("normalize", "half", "with --weights: images it was trained on: half (in [-1, 1]) or imagenet (mean and std)")
    text("precision", None, "float32, mixed_bfloat16 or mixed_float16; default: the run's")
    text("strategy", "auto", "auto, cpu, gpu, mirrored or tpu")
    text("tpu", None, "local, or the name or address of a TPU")
    text("json", None, "also write the result to this file")
    flags.DEFINE_integer("batch_size", None, "images at a time; default: the run's", flag_values=values)
    flags.DEFINE_boolean("ema", None, "the average of the weights; default: if the run kept one", flag_values=values)
    flags.DEFINE_multi_string("set", [], "key=value for any key of the config; may be repeated", flag_values=values)


def check_model(values: Any) -> None:
    """Raises UserError for flags that do not say which model, before anything is loaded."""
    if bool(values.workdir) == bool(values.weights):
        raise UserError("give --workdir=RUN or --weights=FILE: whose model it is")
    check_file("json", values.json)
    for name in ("model", "class_names", "normalize"):
        if values.workdir and values[name].present:
            raise UserError(f"--{name} goes with --weights; a run knows its own")
    if values.weights and values["checkpoint"].present:
        raise UserError("--checkpoint goes with --workdir")
    if values.weights and values["ema"].present:
        raise UserError("--ema goes with --workdir: a weight file holds one set of weights")


def check_file(flag: str, path: str | None) -> None:
    """Raises UserError if the file of a flag can clearly not be written, before minutes of computing."""
    if not path:
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UserError(f"--{flag}={path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise UserError(f"--{flag}={path} is a folder: name a file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"--{flag}={path} cannot be written (no permission): choose another place")


def load_model(values: Any, data: str | None = None) -> Any:
    """Returns the `Trained` model that the flags name."""
    from vit_tpu import config as configs
    from vit_tpu.evaluation import loading  # TensorFlow loads here, after the cheap checks

    overrides = loading.data_overrides(data) if data is not None else {}
    overrides |= dict(configs.pairs(values.set))
    overrides |= {"model.variant": values.model} if values.model else {}
    overrides |= {"precision": values.precision} if values.precision else {}
    where = {"strategy": values.strategy, "tpu": values.tpu}
    if values.workdir:
        return loading.from_run(
            values.workdir, ema=values.ema, checkpoint=values.checkpoint, overrides=overrides, **where
        )
    names = loading.read_class_names(values.class_names) if values.class_names else ()
    return loading.from_weights(
        values.weights,
        overrides,
        normalize=values.normalize,
        class_names=names,
        verbose=True,
        **where,
    )


def _define(flags: Any, values: Any) -> None:
    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    define_model(flags, values)
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
    check_model(values)
    shots, neighbours = _numbers(values.fewshot, "fewshot"), _numbers(values.knn, "knn")
    temperature = _positive(values.temperature, "temperature")
    if values.split not in ("train", "validation", "all"):
        raise UserError(f"--split={values.split} is none of validation, train, all")
    if values.plots and os.path.exists(values.plots) and not os.path.isdir(values.plots):
        raise UserError(f"--plots={values.plots} is a file: name a folder")
    if values.weights and values.data is None and not any(s.startswith("data.") for s in values.set):
        raise UserError("--weights needs --data: a folder of class folders, an .npz file, or digits")
    trained = load_model(values, values.data)
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


def write_json(path: str, facts: Any) -> None:
    """Writes the facts of a result for machines."""
    import json

    try:
        with open(path, "w") as file:
            json.dump(facts, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UserError(f"--json={path} cannot be written ({error.strerror})") from None


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
