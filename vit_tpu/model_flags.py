"""The flags that say which trained model a command is about: a run's, or a weight file's."""

from __future__ import annotations

from typing import Any

from vit_tpu.command import check_file
from vit_tpu.errors import UserError


def define(flags: Any, values: Any) -> None:
    """Defines the flags that name the model."""

    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    text("workdir", None, "folder of the run whose model it is")
    text("checkpoint", "newest", "with --workdir: newest, best (of the highest validation accuracy) or a step")
    text("weights", None, "weight file instead of a run (.npz, .safetensors, as for --init_from)")
    text("model", None, "with --weights: shape and patch size, such as B/16; default: what the file says")
    text("class_names", None, "with --weights: file with a class name a line, in label order")
    text("normalize", "half", "with --weights: images it was trained on: half (in [-1, 1]) or imagenet (mean and std)")
    flags.DEFINE_boolean("ema", None, "the average of the weights; default: if the run kept one", flag_values=values)
    flags.DEFINE_multi_string("set", [], "key=value for any key of the config; may be repeated", flag_values=values)


def define_where(flags: Any, values: Any) -> None:
    """Defines the flags that say how it is computed, and where the result goes."""

    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    text("precision", None, "float32, mixed_bfloat16 or mixed_float16; default: the run's")
    text("strategy", "auto", "auto, cpu, gpu, mirrored or tpu")
    text("tpu", None, "local, or the name or address of a TPU")
    text("json", None, "also write the result to this file")
    flags.DEFINE_integer("batch_size", None, "images at a time; default: the run's", flag_values=values)


def check(values: Any) -> None:
    """Raises UserError for flags that do not say which model, before anything is loaded."""
    if bool(values.workdir) == bool(values.weights):
        raise UserError("give --workdir=RUN or --weights=FILE: whose model it is")
    for name in ("model", "class_names", "normalize"):
        if values.workdir and values[name].present:
            raise UserError(f"--{name} goes with --weights; a run knows its own")
    if values.weights and values["checkpoint"].present:
        raise UserError("--checkpoint goes with --workdir")
    if values.weights and values["ema"].present:
        raise UserError("--ema goes with --workdir: a weight file holds one set of weights")
    if "json" in values:
        check_file("json", values.json)


def load(values: Any, data: str | None = None) -> Any:
    """Returns the `Trained` model that the flags name; `data` as in `evaluation.loading.data_overrides`."""
    from vit_tpu import config as configs
    from vit_tpu.evaluation import loading  # TensorFlow loads here, after the cheap checks

    overrides = loading.data_overrides(data) if data is not None else {}
    overrides |= dict(configs.pairs(values.set))
    overrides |= {"model.variant": values.model} if values.model else {}
    where: dict[str, Any] = {}
    if "precision" in values:
        overrides |= {"precision": values.precision} if values.precision else {}
        where = {"strategy": values.strategy, "tpu": values.tpu}
    if values.workdir:
        return loading.from_run(
            values.workdir, ema=values.ema, checkpoint=values.checkpoint, overrides=overrides, **where
        )
    names = loading.read_class_names(values.class_names) if values.class_names else ()
    return loading.from_weights(
        values.weights, overrides, normalize=values.normalize, class_names=names, verbose=True, **where
    )
