"""CSV and JSONL lists of image files with their labels."""

from __future__ import annotations

import csv
import io
import json
import os
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from vit_tpu.data import class_names, splits
from vit_tpu.data.source import Source, why
from vit_tpu.errors import UserError, nearest

_LOOK_AT = 16  # files whose existence is checked at once, evenly spread


def from_manifest(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    train_name: str | None = None,
    validation_name: str | None = None,
    validation_share: float = 0.1,
    image_key: str = "image",
    label_key: str = "label",
    names: tuple[str, ...] | None = None,
    label_offset: int = 0,
    multi_label: bool = False,
) -> Source:
    """Returns the `split` ("train" or "validation") of the images that a CSV or JSONL file lists.

    Columns or keys: image (a path, relative ones against the list's folder), label (a number, a class name, or with
    `multi_label` several: "cat;dog" in CSV, a list in JSON), and optionally split and id. Without a split column, or
    without a validation split in it, records are dealt out by a hash of their id; the id is the path if there is none.

    Args:
      path: the list, local or gs://; "{split}" in it stands for the split's name.
      train_name, validation_name: values of the split column, see `splits.choose`.
      image_key, label_key: other names of the two columns.
      names: class names; None: the sorted names of the whole list.
      label_offset, multi_label: see `class_names.number`.

    Raises:
      UserError: naming file and line: missing columns, no label, an id twice, an unknown class, files not there.
    """
    splits.check_split(split, validation_share)
    pattern = os.fspath(path)
    rows, chosen_split, hashed = [], None, True
    if "{split}" in pattern:
        found = {name for name in {train_name or splits.TRAIN, validation_name or "", *splits.HELD_OUT} - {""}
                 if tf.io.gfile.exists(pattern.replace("{split}", name))}  # fmt: skip
        name, hashed = splits.choose(found, split, train_name, validation_name, pattern)
        # Class names come from all parts, so that they are the same in each.
        rows = [row | {"split": part} for part in sorted(found)
                for row in _rows(pattern.replace("{split}", part), image_key, label_key, multi_label)]  # fmt: skip
        chosen_split = name
    else:
        rows = _rows(pattern, image_key, label_key, multi_label)
        found = {row["split"] for row in rows if row["split"]}
        if found:
            chosen_split, hashed = splits.choose(found, split, train_name, validation_name, pattern)
        elif train_name or validation_name:
            raise UserError(f"{pattern} has no split column: leave data.split and data.validation_split out")
    _tell_listed_twice(rows, pattern)
    labels, classes = class_names.number(
        [row["label"] for row in rows], name=pattern, name_of=lambda i: rows[i]["where"], names=names,
        multi_label=multi_label, offset=label_offset,
    )  # fmt: skip
    if chosen_split is None:
        kept = np.arange(len(rows))
    else:
        kept = np.array([i for i, row in enumerate(rows) if row["split"] == chosen_split], np.int64)
        unused = sorted({row["split"] or "(none)" for row in rows} - {chosen_split, *splits.HELD_OUT, splits.TRAIN})
        if unused and split == "train":
            logging.warning("%s: rows of split %s are not used.", pattern, ", ".join(unused))
    title = pattern.replace("{split}", chosen_split or "") if "{split}" in pattern else pattern
    if chosen_split and "{split}" not in pattern:
        title = f"{pattern}/{chosen_split}"
    source = _source(title, [rows[i] for i in kept], labels[kept], classes)
    return splits.by_hash(source, split, validation_share) if hashed else source


def _tell_listed_twice(rows: list[dict[str, Any]], path: str) -> None:
    """Warns of images that one line calls a cat and another a dog, or that are in training and validation."""
    first: dict[str, dict[str, Any]] = {}
    for key in ("label", "split"):
        twice = [row for row in rows if row[key] != first.setdefault(row["path"], row)[key]]
        if twice:
            other = first[twice[0]["path"]]["where"]
            logging.warning(
                "%s: %d lines list an image again with another %s, such as %s and %s.",
                path, len(twice), key, other, twice[0]["where"],
            )  # fmt: skip


def _source(name: str, rows: list[dict[str, Any]], labels: np.ndarray, classes: tuple[str, ...]) -> Source:
    paths, ids = [row["path"] for row in rows], [row["id"] for row in rows]
    for i in range(0, len(paths), max(len(paths) // _LOOK_AT, 1)):
        if not tf.io.gfile.exists(paths[i]):
            raise UserError(f"{rows[i]['where']}: there is no file {paths[i]}: paths count from the list's own folder")
    with tf.device("CPU:0"):
        path_tensor, id_tensor, label_tensor = tf.constant(paths), tf.constant(ids), tf.constant(labels)

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            "image": tf.io.read_file(tf.gather(path_tensor, index)),
            "label": tf.gather(label_tensor, index),
            "id": tf.gather(id_tensor, index),
        }

    return Source(
        name=name,
        num_examples=len(rows),
        num_classes=len(classes),
        class_names=classes,
        labels=labels,
        get=get,
        image_shape=None,
        name_of=lambda i: ids[i],
    )


def _rows(path: str, image_key: str, label_key: str, multi_label: bool) -> list[dict[str, Any]]:
    """Returns {"path", "label", "split", "id", "where"} for each line."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except tf.errors.OpError as error:
        raise UserError(f"the list {path} cannot be read ({why(error)}): check data.path") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8: data.source=manifest reads CSV or JSONL") from None
    if text.lstrip().startswith("["):
        raise UserError(f"{path} is one JSON array: write one object a line (JSONL)")
    is_json = text.lstrip().startswith("{")
    entries = _json_lines(text, path) if is_json else _csv_lines(text, path)
    folder = path.rpartition("/")[0] or "."
    rows: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    for number, entry in entries:
        where = f"{path} line {number}"
        for key, option in ((image_key, "image"), (label_key, "label")):
            if key not in entry:
                if is_json:
                    where, cure = f"{where} has no", "or write the line again"
                else:
                    where, cure = f"{path} has no column", "or name the columns in the first line"
                raise UserError(
                    f'{where} "{key}"{nearest(key, entry)}; it has {", ".join(map(str, entry)) or "nothing"}: '
                    f"set data.{option}_key, {cure}"
                )
            if entry[key] is None:
                raise UserError(f"{where}: {key} is null: give it one, or take the line out")
        image, label = entry[image_key], entry[label_key]
        if not isinstance(image, str) or not image:
            raise UserError(f"{where}: {image_key} is {image!r}, not a path")
        if isinstance(label, str):
            label = label.strip()
            if multi_label or ";" in label:
                label = [part.strip() for part in label.split(";") if part.strip()]
            elif not label:
                label = []
        name = str(entry["id"]) if entry.get("id") not in (None, "") else image
        if entry.get("id") not in (None, "") and name in seen:
            raise UserError(f'{where} and {seen[name]} have the same id "{name}": ids must differ')
        seen[name] = where
        absolute = image.startswith("/") or "://" in image
        rows.append({
            "path": image if absolute else f"{folder}/{image}",
            "label": label, "split": str(entry.get("split") or "").strip(), "id": name, "where": where,
        })  # fmt: skip
    if not rows:
        raise UserError(f"{path} lists no images: write a line with image and label for each")
    return rows


def _csv_lines(text: str, path: str) -> list[tuple[int, dict[str, Any]]]:
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # a spreadsheet may end lines with either
    first = text.partition("\n")[0]
    # A spreadsheet writes semicolons where the comma is the decimal sign.
    delimiter = "\t" if "\t" in first else ";" if ";" in first and "," not in first else ","
    # Without skipinitialspace the quotes in `a.jpg, "cat"` would be part of the name.
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, strict=True, skipinitialspace=True)
    found = []
    try:
        for row in reader:
            if None in row or any(value is None for value in row.values()):
                raise UserError(
                    f"{path} line {reader.line_num} has {sum(v is not None for v in row.values())} fields, the first "
                    f"line names {len(reader.fieldnames or ())}: quote values that hold a comma"
                )
            found.append((reader.line_num, {key.strip(): value for key, value in row.items()}))
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num} is not CSV ({error}): write it again") from None
    return found


def _json_lines(text: str, path: str) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is not JSON ({error}): one object a line") from None
        if not isinstance(entry, dict):
            raise UserError(f'{path} line {number} is not an object: write {{"image": ..., "label": ...}}')
        found.append((number, entry))
    return found
