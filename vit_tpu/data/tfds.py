"""Prepared TensorFlow Datasets folders: their splits and class names, with images left encoded for our decoder.

Nothing is ever downloaded. Records are read by position: TFRecord shards as `tfrecords` does, ArrayRecord files as
`array_records` does; TensorFlow Datasets itself only says which files, and what is in them.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from vit_tpu.data import array_records, examples, splits, tfrecords
from vit_tpu.data.examples import Keys
from vit_tpu.data.source import Source, why
from vit_tpu.errors import UserError, nearest

_INFO = "dataset_info.json"
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def from_tfds(
    data_dir: str | os.PathLike[str] | None,
    dataset: str | None = None,
    split: str = "train",
    *,
    train_name: str | None = None,
    validation_name: str | None = None,
    validation_share: float = 0.1,
    image_key: str | None = None,
    label_key: str | None = None,
    names: tuple[str, ...] | None = None,
    label_offset: int = 0,
    multi_label: bool = False,
) -> Source:
    """Returns the `split` ("train" or "validation") of a prepared image-classification dataset.

    Args:
      data_dir: where datasets lie prepared, or the folder of one version; None: TFDS_DATA_DIR, or
        ~/tensorflow_datasets.
      dataset: "cifar10", "name/config", "name:1.0.0" or "name/config:1.0.0"; not needed if `data_dir` is one version.
      train_name, validation_name: the dataset's splits, also parts such as "train[:90%]"; None: "train", and the first
        of validation, val, valid, test, or else a share of train by hash.
      image_key, label_key: None: the dataset's only image and only class label.
      names, label_offset, multi_label: see `class_names.number`; names of the dataset itself are used by default.

    Raises:
      UserError: not prepared (with the command that prepares it), no such split or feature, an empty split.
    """
    splits.check_split(split, validation_share)
    folder = _find(_data_dir(data_dir), dataset)
    info = _builder(folder).info
    keys, features = _keys(info.features, image_key, label_key, multi_label, folder)
    title = info.full_name
    name, hashed = _split_name(info, split, train_name, validation_name, title)
    parts = _instructions(info, name, title, folder)
    if split == "validation" and not hashed:
        trained_on = _split_name(info, "train", train_name, validation_name, title)[0]
        if _overlap(parts, _instructions(info, trained_on, title, folder)):
            logging.warning("%s: %s and %s share records: the model has seen them in training", title, trained_on, name)
    known = _class_names(features)
    if known and names and len(known) != len(names):
        raise UserError(
            f"data.class_names names {len(names)} classes, but {title} has {len(known)} ({', '.join(known[:3])}, ...): "
            "give one line for each class"
        )
    paths = tuple(dict.fromkeys(path for path, _, _ in parts))
    reader = {"tfrecord": tfrecords, "array_record": array_records}.get(info.file_format.value)
    if reader is None:
        raise UserError(
            f"{folder} is stored as {info.file_format.value}: prepare it again as tfrecord or array_record "
            f"({_command(info.full_name, None)} --file_format=array_record)"
        )
    records = reader.index(paths, keys)
    source = examples.to_source(
        records, keys, f"{title}/{name}", names=known if known else names, multi_label=multi_label,
        label_offset=label_offset,
    )  # fmt: skip
    source = splits.subset(source, _positions(records.shard, paths, parts, title), source.name)
    return splits.by_hash(source, split, validation_share) if hashed else source


def _data_dir(data_dir: str | os.PathLike[str] | None) -> str:
    if data_dir is not None:
        return os.fspath(data_dir).rstrip("/") or "/"
    return os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")


def _find(root: str, dataset: str | None) -> str:
    """Returns the folder of one version: the one asked for, or the newest."""
    if tf.io.gfile.exists(f"{root}/{_INFO}"):
        return root
    if dataset is None:
        found = _prepared(root)
        raise UserError(
            f"{root} is not the folder of one dataset (no {_INFO}): set data.name"
            + (f" to one of {', '.join(found)}" if found else f", and prepare it: {_command('NAME', root)}")
        )
    name, _, version = dataset.partition(":")
    folder = f"{root}/{name}"
    versions = _versions(folder)
    if not versions:  # a dataset with one configuration needs no name for it
        inside = [config for config in _folders(folder) if _versions(f"{folder}/{config}")]
        if len(inside) > 1:
            raise UserError(f'"{name}" has the configurations {", ".join(inside)}: set data.name={name}/{inside[0]}')
        if inside:
            folder = f"{folder}/{inside[0]}"
            versions = _versions(folder)
    if not versions or (version and version not in versions):
        found = _prepared(root)
        have = f"versions {', '.join(versions)}" if versions else ", ".join(found) or "nothing"
        raise UserError(
            f'"{dataset}" is not prepared in {root}{nearest(name, found)}, which has {have}: {_command(dataset, root)}'
        )
    return f"{folder}/{version or versions[-1]}"


def _command(dataset: str, root: str | None) -> str:
    return f"tfds build {dataset}" + (f" --data_dir={root}" if root else "")


def _prepared(root: str) -> list[str]:
    found = []
    for name in _folders(root):
        if _versions(f"{root}/{name}"):
            found.append(name)
        else:
            found += [
                f"{name}/{config}" for config in _folders(f"{root}/{name}") if _versions(f"{root}/{name}/{config}")
            ]
    return found


def _versions(folder: str) -> list[str]:
    """Returns the prepared versions in a folder, the newest last."""
    found = [name for name in _folders(folder) if _VERSION.fullmatch(name)]
    found = [name for name in found if tf.io.gfile.exists(f"{folder}/{name}/{_INFO}")]
    return sorted(found, key=lambda name: tuple(map(int, name.split("."))))


def _folders(folder: str) -> list[str]:
    try:
        names = tf.io.gfile.listdir(folder)
    except tf.errors.OpError:
        return []
    return sorted(name.rstrip("/") for name in names if not name.startswith("."))


def _builder(folder: str) -> Any:
    try:
        import tensorflow_datasets as tfds

        if "://" not in folder:
            return tfds.builder_from_directory(folder)
        # Its own way to remote files needs more packages and knows fewer file systems than TensorFlow does.
        with tempfile.TemporaryDirectory() as local:
            for name in tf.io.gfile.listdir(folder):
                if name.endswith((".json", ".txt")):
                    tf.io.gfile.copy(f"{folder}/{name}", f"{local}/{name}")
            return tfds.builder_from_directory(local)
    except ImportError as error:
        raise UserError(f"data.source=tfds needs a package ({error}): pip install 'vit_tpu[data]'") from None
    except Exception as error:  # a damaged JSON file shows itself in many ways
        raise UserError(
            f"{folder} is not a readable TensorFlow Datasets folder ({why(error)}): prepare it again"
        ) from None


def _split_name(info: Any, split: str, train: str | None, validation: str | None, title: str) -> tuple[str, bool]:
    found = set(info.splits)
    asked = {"data.split": train, "data.validation_split": validation}
    for key, name in asked.items():  # "train[:90%]+test" consists of "train" and "test"
        for part in name.split("+") if name else ():
            plain = part.split("[")[0].strip()
            if plain not in found | {"all"}:
                raise UserError(f'{key}: {title} has no split "{plain}"{nearest(plain, found)}; it has {_list(found)}')
    extended = found | {name for name in asked.values() if name}
    return splits.choose(extended, split, train, validation, title)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _instructions(info: Any, name: str, title: str, folder: str) -> list[tuple[str, int, int]]:
    """Returns (path, first record, number of records) for each piece of a split."""
    try:
        chosen = info.splits[name]
        files = [(os.path.basename(part.filename), part.skip, part.take) for part in chosen.file_instructions]
    except Exception as error:
        raise UserError(f'"{name}" is not a split of {title} ({why(error)}): write it like "train[:90%]"') from None
    parts = [(f"{folder}/{file}", skip, take) for file, skip, take in files]
    if not parts or not chosen.num_examples:
        raise UserError(f'{title}: the split "{name}" is empty: choose another, or prepare the dataset again')
    missing = next((path for path, _, _ in parts if not tf.io.gfile.exists(path)), None)
    if missing:
        raise UserError(f"{missing} is missing: prepare the dataset again, or copy the rest of it")
    return parts


def _overlap(ours: list[tuple[str, int, int]], theirs: list[tuple[str, int, int]]) -> bool:
    """Tells whether two splits have a record in common."""
    spans: dict[str, list[tuple[int, float]]] = {}
    for path, skip, take in theirs:
        spans.setdefault(path, []).append((skip, skip + take if take >= 0 else np.inf))
    return any(
        max(skip, first) < min(skip + take if take >= 0 else np.inf, end)
        for path, skip, take in ours
        for first, end in spans.get(path, ())
    )


def _positions(shard: np.ndarray, paths: tuple[str, ...], parts: list[tuple[str, int, int]], title: str) -> np.ndarray:
    first = np.searchsorted(shard, np.arange(len(paths) + 1))
    chosen = []
    for path, skip, take in parts:
        number = paths.index(path)
        count = int(first[number + 1] - first[number])
        take = count - skip if take < 0 else take
        if skip + take > count:
            raise UserError(f"{path} holds {count} records, {title} announces {skip + take}: copy or prepare it again")
        chosen.append(np.arange(first[number] + skip, first[number] + skip + take, dtype=np.int64))
    return np.concatenate(chosen)


def _keys(
    features: Any, image_key: str | None, label_key: str | None, multi_label: bool, folder: str
) -> tuple[Keys, Any]:
    """Returns where image and label lie in a record, and the label's feature."""
    import tensorflow_datasets as tfds

    kinds = {key: feature for key, feature in _flat(features)}
    images = [key for key, feature in kinds.items() if isinstance(feature, tfds.features.Image)]
    wanted = tfds.features.Sequence if multi_label else tfds.features.ClassLabel
    labels = [key for key, feature in kinds.items() if isinstance(feature, wanted)]
    image = _one("image", image_key, images, kinds, folder)
    label = _one("label", label_key, labels, kinds, folder)
    if not isinstance(kinds[image], tfds.features.Image):
        raise UserError(f'{folder}: "{image}" is {type(kinds[image]).__name__}, not an image: set data.image_key')
    if kinds[image].np_dtype not in (np.uint8, np.uint16):
        raise UserError(
            f"{folder}: images hold {np.dtype(kinds[image].np_dtype)}: only 8- and 16-bit images can be read"
        )
    return Keys(image, label), kinds[label]


def _flat(features: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, feature in features.items():
        if hasattr(feature, "items") and hasattr(feature, "keys"):
            found += _flat(feature, f"{prefix}{key}/")
        else:
            found.append((prefix + key, feature))
    return found


def _one(role: str, asked: str | None, candidates: list[str], kinds: dict[str, Any], folder: str) -> str:
    if asked is not None:
        if asked not in kinds:
            raise UserError(
                f'data.{role}_key: {folder} has no feature "{asked}"{nearest(asked, kinds)}; it has {", ".join(kinds)}'
            )
        return asked
    if len(candidates) != 1:
        raise UserError(
            f"{folder} has {len(candidates) or 'no'} {role} features ({', '.join(candidates or kinds)}): "
            f"choose one with data.{role}_key"
        )
    return candidates[0]


def _class_names(feature: Any) -> tuple[str, ...] | None:
    feature = getattr(feature, "feature", feature)  # a sequence of labels
    found = getattr(feature, "names", None)
    count = getattr(feature, "num_classes", None)
    if found:
        return tuple(found)
    return tuple(map(str, range(count))) if count else None
