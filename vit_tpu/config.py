"""Everything a run is made of, as frozen dataclasses: from YAML and overrides, checked before anything starts.

Nothing here imports TensorFlow, so `--help` and a mistyped key answer at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from vit_tpu import precision
from vit_tpu.errors import UserError, nearest
from vit_tpu.models import variants
from vit_tpu.typed import plain, typed

Duration = int | float | str  # steps, or text: "5 epochs", "10%", "50000 examples"


@dataclasses.dataclass(frozen=True)
class Model:
    """What `vit_tpu.ViT` is built with; None leaves the variant's own value."""

    variant: str = "S/16"
    image_size: int | tuple[int, int] = 224
    num_classes: int | None = None  # None: as many as the data has
    pool: str = "map"
    posemb: str = "learn"
    registers: int = 0
    dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    head_bias_init: float = 0.0
    representation_size: int | None = None
    remat: str = "none"
    scan: bool = False
    gelu: str = "tanh"
    epsilon: float = 1e-6
    norm_position: str = "before"  # the final LayerNorm: before | after the pooling
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    num_heads: int | None = None
    patch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """What is read and how training images are varied."""

    source: str = "digits"  # digits | folder | npz | synthetic
    path: str | None = None
    channels: int | None = None  # None: as the source has them
    crop: str = "resize"  # resize | inception
    crop_area: tuple[float, float] = (0.05, 1.0)
    flip: bool = False
    shift: int = 0  # pixels of padding for a random shift
    mixup: float = 0.0
    in_memory: bool | None = None  # decode files once and keep them; None: if they fit into 1 GiB and crop is resize
    validation_fraction: float = 0.1  # of a class-folder tree without its own validation split
    max_broken: int | None = None  # unreadable training files tolerated; None: one in a thousand
    size: int = 1024  # examples of the synthetic source
    classes: int = 10  # classes of the synthetic source


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Name and numbers of the optimizer; None leaves its own default."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    head_weight_decay: float | None = None
    decay_style: str | None = None  # LAMB: decoupled | paper
    momentum_dtype: str | None = None
    beta_1: float | None = None
    beta_2: float | None = None
    beta2_cap: float | None = None  # Adafactor
    epsilon: float | None = None
    momentum: float | None = None  # SGD
    nesterov: bool | None = None  # SGD
    trust_clip: float | None = None  # LAMB
    clipping_threshold: float | None = None  # Adafactor
    exclude_from_weight_decay: tuple[str, ...] | None = None
    exclude_from_layer_adaptation: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()
    layer_decay: float | None = None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate moves; durations are steps or text such as "5 epochs", "10%", "50000 examples"."""

    name: str = "cosine"  # reciprocal_sqrt | cosine | linear | constant
    warmup: Duration = 0
    cooldown: Duration = 0
    timescale: Duration = 10_000  # reciprocal_sqrt


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Loss scaling; off suits float32 and mixed_bfloat16, dynamic is needed by mixed_float16."""

    mode: str = "auto"  # auto | off | fixed | dynamic
    initial: float = 4096.0
    growth_steps: int = 2000
    minimum: float = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Training:
    """Length, batch and rhythm of a run."""

    batch_size: int = 64
    epochs: float | None = None  # give epochs or steps
    steps: int | None = None
    accumulation_steps: int = 1
    grad_clip_norm: float | None = 1.0
    loss: str = "softmax"  # softmax | sigmoid
    label_smoothing: float = 0.0
    ema: float | None = None
    evaluate_ema: bool = False
    steps_per_execution: int | None = None  # None: chosen from the number of steps
    jit: bool | None = None  # None: chosen for the device
    log_every: int | None = None  # steps; None: about a hundred lines a run
    evaluate_every: Duration | None = None  # None: every epoch, or so that about twenty fit into the run
    checkpoint_every: Duration | None = None  # None: at the end and when interrupted
    max_skipped: int = 50
    seed: int = 0
    deterministic: bool = False
    check_numerics: bool = False
    profile: tuple[int, int] | None = None  # first and last step of a profiler window


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. `Config()` trains a small ViT on the embedded digits."""

    model: Model = dataclasses.field(default_factory=lambda: Model(**DIGITS_MODEL))
    data: Data = dataclasses.field(default_factory=lambda: Data(mixup=0.2))
    optimizer: Optimizer = dataclasses.field(default_factory=lambda: Optimizer(learning_rate=3e-3, weight_decay=0.05))
    schedule: Schedule = dataclasses.field(default_factory=lambda: Schedule(warmup="5%"))
    loss_scale: LossScale = dataclasses.field(default_factory=LossScale)
    training: Training = dataclasses.field(default_factory=lambda: Training(**DIGITS_TRAINING))
    precision: str = "float32"
    strategy: str = "auto"
    tpu: str | None = None
    workdir: str | None = None  # None: runs/<name of the config>
    init_from: str | None = None  # weight file to start from
    init_allow: tuple[str, ...] = ()  # globs of parameters that may start afresh, such as head/*
    init_resize: str = "auto"  # kernel for position embeddings of another grid, see vit_tpu.load_weights


DIGITS_MODEL: dict[str, Any] = {
    "variant": "Ti/2", "image_size": 8, "pool": "gap", "width": 64, "depth": 4, "mlp_dim": 256, "num_heads": 4,
}  # fmt: skip
DIGITS_TRAINING: dict[str, Any] = {"epochs": 50.0, "ema": 0.98, "evaluate_ema": True}


def load_config(path: str | pathlib.Path | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """Reads a YAML file over the defaults, then overrides over that, and checks the result.

    A file starts from the plain defaults of each section, not from the digits experiment that `Config()` is.

    Args:
      path: YAML file whose keys are the fields of `Config`; None for the digits experiment.
      overrides: texts such as "optimizer.name=lamb" (the value is read as YAML), or a mapping of dotted keys.

    Returns:
      The checked configuration.

    Raises:
      UserError: missing file, unknown key (with the nearest name), wrong type, or values that exclude each other.
    """
    config = Config()
    if path is not None:
        config = from_dict(_read_yaml(pathlib.Path(path)), str(path))
    for key, value in _pairs(overrides):
        config = replace(config, key, value)
    return validate(config)


def from_dict(values: Mapping[str, Any], where: str = "config") -> Config:
    """Builds a Config from nested mappings over the plain defaults of each section, checking names and types."""
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    plain = {name: cls() for name, cls in _SECTIONS.items()}
    unknown = [key for key in values if key not in sections]
    if unknown:
        raise UserError(f'{where}: unknown key "{unknown[0]}"{nearest(str(unknown[0]), sections)}')
    config = Config(**plain)
    for name, value in values.items():
        if name in _SECTIONS:
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: {name} is a section with keys of its own, not {value!r}")
            for key, inner in value.items():
                config = replace(config, f"{name}.{key}", inner, where)
        else:
            config = replace(config, name, value, where)
    return config


def replace(config: Config, key: str, value: Any, where: str = "config") -> Config:
    """Returns `config` with the field at a dotted key replaced.

    Args:
      config: stays as it is.
      key: "optimizer.name"; a name that only one section has may stand alone ("pool").
      value: of the field's type; whole numbers are taken for floats and lists for tuples.
    """
    section, _, name = key.rpartition(".")
    if not section and name not in {f.name for f in dataclasses.fields(Config)}:
        owners = [s for s, cls in _SECTIONS.items() if name in {f.name for f in dataclasses.fields(cls)}]
        if len(owners) > 1:
            raise UserError(f'{where}: key "{key}" is in {" and ".join(owners)}: write {owners[0]}.{key}')
        section = owners[0] if owners else ""
    if section and section not in _SECTIONS:
        raise UserError(f'{where}: unknown section "{section}"{nearest(section, _SECTIONS)}')
    cls = _SECTIONS[section] if section else Config
    hints = typing.get_type_hints(cls)
    if name not in hints:
        known = list(hints) if section else all_keys()
        raise UserError(f'{where}: unknown key "{key}"{nearest(name, known)}')
    if name in _SECTIONS and not section:
        raise UserError(
            f"{where}: {name} is a section; set one of its keys, such as "
            f"{name}.{next(iter(typing.get_type_hints(_SECTIONS[name])))}"
        )
    checked = typed(value, hints[name], f"{where}: {section + '.' if section else ''}{name}")
    if not section:
        return dataclasses.replace(config, **{name: checked})
    inner = dataclasses.replace(getattr(config, section), **{name: checked})
    return dataclasses.replace(config, **{section: inner})


def validate(config: Config) -> Config:
    """Checks what can be checked without data or devices; returns the config.

    Raises:
      UserError: the first contradiction found, with the keys and what to change.
    """
    if not isinstance(config, Config):
        raise UserError(f"a Config is needed, not {type(config).__name__}: vit_tpu.load_config(path) makes one")
    precision.check(config.precision)
    for key, choices in CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise UserError(f'{key} is "{value}"{nearest(str(value), choices)}; choose one of {", ".join(choices)}')
    for key, (low, high) in RANGES.items():
        value = _get(config, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key} is {value}: give a number from {low:g} to {high:g}")
    variants.variant(config.model.variant)
    t = config.training
    if (t.epochs is None) == (t.steps is None):
        given = "both" if t.steps is not None else "neither"
        raise UserError(f"training.epochs and training.steps: {given} given; say how long to train with one of them")
    for name in (
        "batch_size",
        "epochs",
        "steps",
        "accumulation_steps",
        "steps_per_execution",
        "log_every",
        "max_skipped",
    ):
        value = getattr(t, name)
        if value is not None and value <= 0:
            raise UserError(f"training.{name} is {value}: give a number above 0")
    if t.batch_size % t.accumulation_steps:
        near = sorted({max(t.batch_size // t.accumulation_steps, 1) * t.accumulation_steps,
                       (t.batch_size // t.accumulation_steps + 1) * t.accumulation_steps})  # fmt: skip
        raise UserError(
            f"training.batch_size {t.batch_size} does not divide into accumulation_steps "
            f"{t.accumulation_steps} equal parts: "
            f"use {' or '.join(map(str, near))}"
        )
    if t.evaluate_ema and t.ema is None:
        raise UserError("training.evaluate_ema needs an average: set training.ema, for example 0.999")
    if config.loss_scale.mode == "off" and config.precision == "mixed_float16":
        raise UserError("loss_scale.mode=off under mixed_float16 loses small gradients: use dynamic, or mixed_bfloat16")
    if config.data.channels not in (None, 1, 3):
        raise UserError(f"data.channels is {config.data.channels}: give 1 (grey) or 3 (colour)")
    if config.data.source in ("folder", "npz") and not config.data.path:
        raise UserError(f"data.source={config.data.source} needs data.path: where the images are")
    if t.check_numerics and t.jit:
        raise UserError(
            "training.check_numerics stops at the operation that fails, which XLA cannot: leave training.jit out"
        )
    if t.profile is not None and not 0 < t.profile[0] <= t.profile[1]:
        raise UserError(f"training.profile is {t.profile}: give the first and last step of the window, such as 10,20")
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, as YAML and JSON can hold them."""
    return plain(dataclasses.asdict(config))


def to_yaml(config: Config) -> str:
    """Returns the config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def all_keys() -> list[str]:
    """Returns every dotted key."""
    top = [f.name for f in dataclasses.fields(Config) if f.name not in _SECTIONS]
    return top + [f"{section}.{f.name}" for section, cls in _SECTIONS.items() for f in dataclasses.fields(cls)]


def differences(old: Config, new: Config) -> list[str]:
    """Returns "key: old -> new" for every key in which two configs differ."""
    return [f"{k}: {_get(old, k)} -> {_get(new, k)}" for k in all_keys() if _get(old, k) != _get(new, k)]


def _get(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _pairs(overrides: Iterable[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    if isinstance(overrides, str):
        raise UserError(f'overrides are a list of texts such as ["optimizer.name=lamb"], not the text "{overrides}"')
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f'"{text}" sets nothing: write key=value, such as optimizer.name=lamb')
        try:
            pairs.append((key.strip(), yaml.safe_load(value)))
        except yaml.YAMLError:
            pairs.append((key.strip(), value))
    return pairs


def _read_yaml(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        siblings = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise UserError(f"config {path} cannot be read ({error.strerror}){nearest(str(path), siblings)}") from None
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not text in UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(f"config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise UserError(f"config {path} holds no keys: see experiments/ for examples")
    return values


_SECTIONS: dict[str, Any] = {
    "model": Model, "data": Data, "optimizer": Optimizer, "schedule": Schedule, "loss_scale": LossScale,
    "training": Training,
}  # fmt: skip

RANGES: dict[str, tuple[float, float]] = {
    "data.mixup": (0.0, 100.0),
    "data.shift": (0.0, 10_000.0),
    "data.validation_fraction": (0.0, 0.9),
    "data.max_broken": (0.0, 1e18),
    "data.size": (1.0, 1e12),
    "data.classes": (1.0, 1e9),
    "optimizer.learning_rate": (0.0, 1e6),
    "training.grad_clip_norm": (1e-12, 1e12),
    "training.seed": (0.0, 2.0**31 - 1),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "data.source": ("digits", "folder", "npz", "synthetic"),
    "data.crop": ("resize", "inception"),
    "optimizer.name": ("adamw", "lamb", "adafactor", "sgd"),
    "schedule.name": ("reciprocal_sqrt", "cosine", "linear", "constant"),
    "loss_scale.mode": ("auto", "off", "fixed", "dynamic"),
    "training.loss": ("softmax", "sigmoid"),
    "strategy": ("auto", "cpu", "gpu", "mirrored", "tpu"),
}
