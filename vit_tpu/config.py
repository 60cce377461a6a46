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

from vit_tpu import mesh, precision
from vit_tpu.errors import UserError, nearest
from vit_tpu.models import variants
from vit_tpu.settings import CHOICES, RANGES, SECTIONS, Config
from vit_tpu.typed import plain, typed


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
    for key, value in pairs(overrides):
        config = replace(config, key, value)
    return validate(config)


def from_dict(values: Mapping[str, Any], where: str = "config") -> Config:
    """Builds a Config from nested mappings over the plain defaults of each section, checking names and types."""
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    plain = {name: cls() for name, cls in SECTIONS.items()}
    unknown = [key for key in values if key not in sections]
    if unknown:
        raise UserError(f'{where}: unknown key "{unknown[0]}"{nearest(str(unknown[0]), sections)}')
    config = Config(**plain)
    for name, value in values.items():
        if name in SECTIONS:
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
        owners = [s for s, cls in SECTIONS.items() if name in {f.name for f in dataclasses.fields(cls)}]
        if len(owners) > 1:
            raise UserError(f'{where}: key "{key}" is in {" and ".join(owners)}: write {owners[0]}.{key}')
        section = owners[0] if owners else ""
    if section and section not in SECTIONS:
        raise UserError(f'{where}: unknown section "{section}"{nearest(section, SECTIONS)}')
    cls = SECTIONS[section] if section else Config
    hints = typing.get_type_hints(cls)
    if name not in hints:
        known = list(hints) if section else all_keys()
        raise UserError(f'{where}: unknown key "{key}"{nearest(name, known)}')
    if name in SECTIONS and not section:
        raise UserError(
            f"{where}: {name} is a section; set one of its keys, such as "
            f"{name}.{next(iter(typing.get_type_hints(SECTIONS[name])))}"
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
        value = get(config, key)
        if value not in choices:
            raise UserError(f'{key} is "{value}"{nearest(str(value), choices)}; choose one of {", ".join(choices)}')
    for key, (low, high) in RANGES.items():
        value = get(config, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key} is {value}: give a number from {low:g} to {high:g}")
    _check_image_size(config)
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
        "keep",
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
    if isinstance(t.ema, str) and t.ema != "polyak":
        raise UserError(f'training.ema is "{t.ema}": give a decay such as 0.9999, or polyak for the plain mean')
    if t.evaluate_ema and t.ema is None:
        raise UserError("training.evaluate_ema needs an average: set training.ema, for example 0.999")
    if config.loss_scale.mode == "off" and config.precision == "mixed_float16":
        raise UserError("loss_scale.mode=off under mixed_float16 loses small gradients: use dynamic, or mixed_bfloat16")
    if config.data.channels not in (None, 1, 3):
        raise UserError(f"data.channels is {config.data.channels}: give 1 (grey) or 3 (colour)")
    _check_source(config)
    _check_variation(config)
    _check_mesh(config)
    if t.profile is not None and not 0 < t.profile[0] <= t.profile[1]:
        raise UserError(f"training.profile is {t.profile}: give the first and last step of the window, such as 10,20")
    return config


# Which sources a key of the data section means something to.
_RECORDS = ("tfds", "tfrecord", "array_record", "manifest")
_MEANT_FOR: dict[str, tuple[str, ...]] = {
    "name": ("tfds",), "split": _RECORDS, "validation_split": _RECORDS, "image_key": _RECORDS, "label_key": _RECORDS,
    "multi_label": _RECORDS, "label_offset": ("npz", *_RECORDS),
}  # fmt: skip


def _check_source(config: Config) -> None:
    data = config.data
    if data.source in ("folder", "npz", "tfrecord", "array_record", "manifest") and not data.path:
        raise UserError(f"data.source={data.source} needs data.path: where the images are")
    if data.source == "tfds" and not (data.name or data.path):
        raise UserError("data.source=tfds needs data.name, such as cifar10, and data.path if it is not prepared in ~")
    for key, sources in _MEANT_FOR.items():
        if getattr(data, key) not in (None, 0, False) and data.source not in sources:
            raise UserError(
                f"data.{key} means nothing to data.source={data.source}, only to {', '.join(sources)}: leave it out"
            )
    if data.multi_label and config.training.loss != "sigmoid":
        raise UserError("data.multi_label gives several labels an image, which need training.loss=sigmoid")
    if not all(0 <= value <= 255 for value in data.background):
        raise UserError(f"data.background is {data.background}: give red, green and blue from 0 to 255")


def _check_mesh(config: Config) -> None:
    found, shape = mesh.parse(config.mesh, config.shard), variants.variant(config.model.variant)
    if found is not None:
        mesh.check_model(found, config.model.num_heads or shape.num_heads, config.model.mlp_dim or shape.mlp_dim)


_MOST_PATCHES = 2**20


def _check_image_size(config: Config) -> None:
    model = config.model
    sides = (model.image_size,) * 2 if isinstance(model.image_size, int) else model.image_size
    patch = model.patch_size or variants.variant(model.variant).patch_size
    if min(sides) < 1:
        raise UserError(f"model.image_size is {model.image_size}: give a side or height,width in pixels")
    patches = sides[0] * sides[1] // max(patch, 1) ** 2
    if patches > _MOST_PATCHES:  # refused before anything of that size is allocated
        raise UserError(
            f"model.image_size {'x'.join(map(str, sides))} has {patches:,} patches of {patch} pixels, more than "
            f"{_MOST_PATCHES:,}: use smaller images or larger patches"
        )


def _check_variation(config: Config) -> None:
    data, batch_size = config.data, config.training.batch_size
    low, high = data.crop_area
    if not 0 < low <= high <= 1:
        raise UserError(f"data.crop_area is {low:g} to {high:g}: give the smallest and largest share of the image")
    if batch_size % data.repeats:
        lower = batch_size // data.repeats * data.repeats
        near = [size for size in (lower, lower + data.repeats) if size]
        raise UserError(
            f"training.batch_size {batch_size} does not hold each example {data.repeats} times (data.repeats): "
            f"use {' or '.join(map(str, near))}"
        )
    for name in ("mixup", "cutmix"):
        if getattr(data, name) and batch_size // data.repeats < 2:
            raise UserError(
                f"data.{name} mixes the examples of a batch, and training.batch_size {batch_size} has one: "
                f"use {2 * data.repeats} or more"
            )
    if data.policy != "randaugment" and (data.policy_layers, data.policy_magnitude) != (2, 10.0):
        raise UserError(f"data.policy_layers and policy_magnitude are RandAugment's, but data.policy={data.policy}")
    if (data.cache == "disk") != (data.cache_dir is not None):
        raise UserError("data.cache=disk and data.cache_dir=FOLDER belong together: give both, or neither")
    if data.data_service and data.cache in ("files", "pixels", "disk"):
        raise UserError(
            f"data.data_service reads in other processes and data.cache={data.cache} keeps in this one: use one of them"
        )


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, as YAML and JSON can hold them."""
    return plain(dataclasses.asdict(config))


def to_yaml(config: Config) -> str:
    """Returns the config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def all_keys() -> list[str]:
    """Returns every dotted key."""
    top = [f.name for f in dataclasses.fields(Config) if f.name not in SECTIONS]
    return top + [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)]


def differences(old: Config, new: Config) -> list[str]:
    """Returns "key: old -> new" for every key in which two configs differ."""
    return [f"{k}: {get(old, k)} -> {get(new, k)}" for k in all_keys() if get(old, k) != get(new, k)]


def get(config: Config, key: str) -> Any:
    """Returns the value at a dotted key."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def pairs(overrides: Iterable[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns overrides, texts such as "pool=gap" or a mapping, as (key, value) pairs."""
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


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error: the first value would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            seen.append(self.construct_object(key, deep=True))
            if seen.count(seen[-1]) > 1:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f'the key "{seen[-1]}" is given twice, once more in line {line}')
        return super().construct_mapping(node, deep)


def _read_yaml(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        values = yaml.load(path.read_text(), Loader=_StrictLoader)
    except OSError as error:
        siblings = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise UserError(f"config {path} cannot be read ({error.strerror}){nearest(str(path), siblings)}") from None
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not text in UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(f"config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise UserError(f"config {path} holds no keys: see experiments/ for examples")
    return values
