"""A trained model, from a run's folder, from a weight file or from memory, with all that is needed to use it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_tpu import config as configs
from vit_tpu import devices, precision
from vit_tpu.errors import UserError, nearest
from vit_tpu.evaluation import run_folder
from vit_tpu.models.vit import ViT
from vit_tpu.settings import CHOICES, Config, Data
from vit_tpu.training import inputs

# Keys of the data section that describe one source and would be wrong for another.
_OF_ONE_SOURCE = (
    "path", "name", "split", "validation_split", "class_names", "image_key", "label_key", "label_offset", "multi_label",
)  # fmt: skip
# What images of 0..1 had taken off and were divided by; this package's own are in [-1, 1], which is 0.5 and 0.5.
NORMALIZATIONS = {"half": (0.5,) * 3, "imagenet": (0.485, 0.456, 0.406)}
_STD = {"half": (0.5,) * 3, "imagenet": (0.229, 0.224, 0.225)}


@dataclasses.dataclass(frozen=True, repr=False)
class Trained:
    """A model with what it was trained on.

    Attributes:
      model: the network.
      config: what it was trained with, or what its weight file says.
      class_names: a name for each output; () if nobody knows them.
      weights: where the weights come from, in words.
      here: the devices it lives on.
    """

    model: ViT
    config: Config
    class_names: tuple[str, ...]
    weights: str
    here: devices.Devices

    def __repr__(self) -> str:
        return f"Trained({self.weights}; {len(self.names)} classes; {self.here.line}, {self.config.precision})"

    @functools.cached_property
    def functions(self) -> dict[str, Any]:
        """Functions compiled for this model by name, so that a second call need not compile again."""
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """The class names, or numbers where there are none."""
        return self.class_names or tuple(str(i) for i in range(self.model.num_classes))


def from_run(
    workdir: str | os.PathLike[str], *, ema: bool | None = None, checkpoint: str | int = "newest",
    overrides: Iterable[str] | Mapping[str, Any] = (), strategy: str = "auto", tpu: str | None = None,
) -> Trained:  # fmt: skip
    """Returns the model of a run's checkpoint; nothing but weights is read.

    Args:
      workdir: the run's folder.
      ema: True the moving average of the weights, False the weights themselves; None the average if the run kept one.
      checkpoint: "newest" whole one, "best" (of the highest validation accuracy), or the step of one.
      overrides: changes to the run's config, such as "data.path=elsewhere" or "precision=float32".
      strategy, tpu: where to compute, as in a config; the run's own devices need not be here.

    Raises:
      UserError: no run or no such checkpoint there, or no average in it.
    """
    folder = os.fspath(workdir).rstrip("/") or "/"
    config = with_overrides(run_folder.config_of(folder), overrides)
    path, manifest = run_folder.find(folder, checkpoint)
    stored = manifest["arrays"]
    averages = any(name.startswith(run_folder.EMA) for name in stored)
    if ema and not averages:
        raise UserError(f"{folder} kept no average of its weights (training.ema is not set): leave --ema out")
    averaged = averages and ema is not False
    classes = stored.get(f"{run_folder.WEIGHTS}head/bias", [[0]])[0][0]
    channels = stored[f"{run_folder.WEIGHTS}embedding/kernel"][0][2]
    here = devices.choose(strategy, tpu)
    settled = dataclasses.replace(config, init_from=None, model=dataclasses.replace(config.model, num_classes=classes))
    settings = dataclasses.asdict(settled.model) | {"channels": channels}
    with here.scope(), precision.scope(config.precision):
        model = ViT(settings.pop("variant"), **settings)
    run_folder.fill(model, path, manifest, averaged)
    name = "Polyak" if config.training.ema == "polyak" else "EMA"
    kind = f"average ({name})" if averaged else "trained weights" + (", not their average" if averages else "")
    names = tuple(manifest.get("class_names") or _names_from_data(config, classes))
    return Trained(model, settled, names, f"{folder}, step {manifest['step']:,}, {kind}", here)


def from_weights(
    path: str, overrides: Iterable[str] | Mapping[str, Any] = (), *, allow: Sequence[str] = (), resize: str = "auto",
    normalize: str = "half", class_names: Sequence[str] = (), strategy: str = "auto", tpu: str | None = None,
    verbose: bool = False,
) -> Trained:  # fmt: skip
    """Returns a model for a weight file; what the file says of its shape is taken from it.

    Args:
      path: as in `vit_tpu.load_weights`.
      overrides: what the file does not say or should become: "model.variant=B/16", "model.gelu=erf",
        "model.image_size=384", "data.source=folder", ...
      allow, resize: as in `vit_tpu.load_weights`; the config's init_allow and init_resize hold, too.
      normalize: the images it was trained on: "half" in [-1, 1], as ours, or "imagenet" with ImageNet's mean and
        standard deviation; the difference is folded into the patch embedding, so that ours suit it.
      class_names: a name for each output, if known.
      strategy, tpu: where to compute, as in a config.
      verbose: prints what was loaded.

    Raises:
      UserError: as `vit_tpu.load_weights`.
    """
    from vit_tpu import weights

    known = {field.name for field in dataclasses.fields(configs.from_dict({}).model)}
    described = weights.describe(path)
    facts = {name: value for name, value in described.items() if name in known and value is not None}
    given = dict(configs.pairs(overrides))
    named = {key.rpartition(".")[2] for key in given}
    shape = ("width", "depth", "mlp_dim", "num_heads", "patch_size")
    # A variant named by the user is what the file has to match, not the other way round.
    facts = {k: v for k, v in facts.items() if k not in named and not ("variant" in named and k in shape)}
    base = configs.from_dict({"model": facts, "training": {"epochs": 1}}, path)
    config = with_overrides(base, given)
    classes = config.model.num_classes if config.model.num_classes is not None else 0
    here = devices.choose(strategy, tpu)
    settings = dataclasses.asdict(config.model) | {"num_classes": classes}
    settings["channels"] = config.data.channels or described.get("channels") or 3
    with here.scope(), precision.scope(config.precision):
        model = ViT(settings.pop("variant"), **settings)
        kernel = config.init_resize if resize == "auto" else resize
        weights.load_weights(model, path, allow=(*allow, *config.init_allow), resize=kernel, verbose=verbose)
    fold_normalization(model, normalize)
    return Trained(model, config, _checked_names(class_names, classes), path, here)


def fold_normalization(model: ViT, name: str) -> None:
    """Changes the patch embedding so that images in [-1, 1] give what images normalised by `name` gave before.

    Exact, since the embedding is linear in each patch and has no padding.

    Raises:
      UserError: an unknown name, or images that are not RGB.
    """
    if name not in NORMALIZATIONS:
        raise UserError(f'normalize "{name}"{nearest(name, NORMALIZATIONS)}: choose one of {", ".join(NORMALIZATIONS)}')
    if name == "half":
        return
    if model.channels != 3:
        raise UserError(f"normalize={name} is for images of 3 channels, this model reads {model.channels}")
    mean, std = np.array(NORMALIZATIONS[name]), np.array(_STD[name])
    variables = {parameter.path: parameter.variable for parameter in model.parameters()}
    kernel, bias = variables["embedding/kernel"], variables["embedding/bias"]
    old = kernel.numpy().astype(np.float64)  # [p, p, 3, D]; (x - mean) / std with x = (v + 1) / 2
    bias.assign(bias.numpy() + np.einsum("hwcd,c->d", old, (0.5 - mean) / std))
    kernel.assign(old * (0.5 / std)[:, None])


def of_model(model: ViT, class_names: Sequence[str] = (), config: Config | None = None) -> Trained:
    """Returns a model in memory as a `Trained` one: images of its own size, the loss it was compiled with."""
    loss = getattr(model, "loss", None)
    kind = "sigmoid" if type(loss).__name__ == "SigmoidCrossEntropy" else "softmax"
    base = config or configs.from_dict({
        "model": {"image_size": list(model.image_size), "num_classes": model.num_classes},
        "data": {"channels": model.channels},
        "training": {"loss": kind, "label_smoothing": getattr(loss, "label_smoothing", 0.0), "epochs": 1},
    })  # fmt: skip
    strategy = model.distribute_strategy
    here = devices.Devices(strategy, f"{strategy.num_replicas_in_sync} replica(s)", "")
    return Trained(model, base, _checked_names(class_names, model.num_classes), "in memory", here)


def load_trained(
    workdir: str | os.PathLike[str] | None = None, *, weights: str | None = None, **options: Any
) -> Trained:
    """Returns a trained model, from a run's folder or from a weight file.

    Args:
      workdir: the run's folder; weights: the weight file instead.
      **options: of `from_run` (ema, overrides, strategy, tpu) or of `from_weights` (overrides, allow, resize,
        class_names, strategy, tpu).
    """
    if (workdir is None) == (weights is None):
        raise UserError("load_trained: give the folder of a run, or weights=FILE")
    return from_run(workdir, **options) if workdir is not None else from_weights(str(weights), **options)


def as_trained(run: str | os.PathLike[str] | ViT | Trained, **options: Any) -> Trained:
    """Returns what a function was given, loaded: a run's folder, a model or a `Trained`."""
    if isinstance(run, Trained):
        return run
    if isinstance(run, ViT):
        return of_model(run)
    return from_run(run, **options)


def with_overrides(config: Config, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
    """Returns `config` changed by texts such as "data.path=x" or a mapping, checked."""
    for key, value in configs.pairs(overrides):
        config = configs.replace(config, key, value)
    return configs.validate(config)


def data_overrides(text: str) -> dict[str, Any]:
    """Returns the config keys that `--data` stands for.

    Args:
      text: a folder of class folders, an .npz file, the name of a source ("digits"), or source:path ("tfds:cifar10",
        "tfrecord:records/"). What the config says of where labels and splits are in its own data is set back.

    Raises:
      UserError: it is none of these.
    """
    fresh = {f"data.{f.name}": f.default for f in dataclasses.fields(Data) if f.name in _OF_ONE_SOURCE}
    source, colon, rest = text.partition(":")
    if source in CHOICES["data.source"] and not os.path.exists(text):
        where = {"data.name" if source == "tfds" else "data.path": rest} if colon else {}
        return fresh | {"data.source": source} | where
    if text.endswith(".npz"):
        return fresh | {"data.source": "npz", "data.path": text}
    if os.path.isdir(text) or "://" in text:
        return fresh | {"data.source": "folder", "data.path": text}
    near = nearest(text, CHOICES["data.source"])
    raise UserError(
        f"--data={text}{near} is neither a folder, nor an .npz file, nor one of {', '.join(CHOICES['data.source'])}"
    )


def _checked_names(names: Sequence[str], classes: int) -> tuple[str, ...]:
    if names and len(names) != classes:
        raise UserError(f"{len(names)} class names for a head of {classes} classes: give one for each")
    return tuple(names)


def _names_from_data(config: Config, classes: int) -> tuple[str, ...]:
    """Runs before class names were kept in checkpoints: their data may still be there."""
    try:
        names = inputs.open_source(config, "train").class_names
    except (UserError, OSError):
        return ()
    return tuple(names) if len(names) == classes else ()


def read_class_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Returns names from a text file with one a line, or a JSON list."""
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"class names {path} cannot be read ({error})") from None
    if text.lstrip().startswith("["):
        try:
            return tuple(str(name) for name in json.loads(text))
        except ValueError as error:
            raise UserError(f"class names {path} is no JSON list ({error})") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())
