"""Labels of the data against the outputs of the head: by name, by a map, or ImageNet's ReaL sets."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest

UNMAPPED = -1


@dataclasses.dataclass(frozen=True)
class Match:
    """How outputs and labels meet.

    Attributes:
      names: of the classes that are scored.
      outputs: int64 [outputs of the head], the scored class of each, or -1; None if they are the same.
      labels: the data's labels as scored classes: int [n] (-1: no output stands for this one) or rows [n, C].
      note: a sentence about it, or "".
    """

    names: tuple[str, ...]
    outputs: np.ndarray | None
    labels: np.ndarray
    note: str

    def logits(self, logits: np.ndarray, loss: str) -> np.ndarray:
        """Returns logits [B, C] of the scored classes.

        Several outputs that stand for one class are one: their probabilities add up (softmax), or the largest counts
        (sigmoid). Outputs that stand for none are left out.
        """
        if self.outputs is None:
            return logits
        x = np.asarray(logits, np.float64)
        out = np.full((len(x), len(self.names)), -np.inf)
        for output, scored in enumerate(self.outputs):
            if scored != UNMAPPED:
                old = out[:, scored]
                out[:, scored] = np.maximum(old, x[:, output]) if loss == "sigmoid" else np.logaddexp(old, x[:, output])
        out[np.isneginf(out)] = -1e30  # a class without output: probability 0 without NaN
        return out


def match(source: Source, outputs: Sequence[str], classes: int, labels_map: str | os.PathLike[str] | None) -> Match:
    """Returns how the labels of `source` meet the outputs of a head.

    Args:
      source: the data.
      outputs: names of the head's classes; () if unknown.
      classes: outputs of the head.
      labels_map: file that says which class of the data each output stands for (see `read_map`), or None: the names
        decide where both sides have them, the numbers otherwise.

    Raises:
      UserError: they do not fit; says what differs.
    """
    if labels_map is not None:
        return _mapped(source, outputs, classes, labels_map)
    names = source.class_names
    spoken = _spoken(names) and _spoken(outputs)
    if spoken and tuple(outputs) != tuple(names):
        return _by_name(source, tuple(outputs))
    if source.labels.ndim == 2 and source.labels.shape[1] != classes:
        raise UserError(f"{source.name} has label rows of {source.labels.shape[1]} classes, the head {classes}")
    if source.num_classes > classes:
        raise UserError(
            f"{source.name} has {source.num_classes} classes, but the head has {classes}: evaluate on data of the "
            "head's classes, or give --labels_map"
        )
    note = f"the data have {source.num_classes} classes, the head {classes}" if source.num_classes < classes else ""
    if _spoken(names) and not _spoken(outputs):
        note += "; " if note else ""
        note += "the head's classes have no names: output 0 is taken for the data's first class, and so on"
    if source.num_classes == classes and (_spoken(outputs) or not _spoken(names)):
        names = tuple(outputs) or names
    elif source.num_classes < classes:
        names = tuple(outputs) or tuple(str(i) for i in range(classes))
    return Match(tuple(names), None, source.labels, note)


def read_map(path: str | os.PathLike[str], outputs: Sequence[str], names: Sequence[str], classes: int) -> np.ndarray:
    """Returns int64 [classes]: the data's class that each output of the head stands for, or -1.

    The file is JSON: {output: class, ...}, or a list with a class or null for each output. Outputs and classes are
    names or numbers.

    Raises:
      UserError: unreadable, or a name that nobody has.
    """
    given = _json(path, "labels map")
    if isinstance(given, list):
        if len(given) != classes:
            raise UserError(f"labels map {path} lists {len(given)} classes, but the head has {classes} outputs")
        pairs: list[tuple[Any, Any]] = list(enumerate(given))
    elif isinstance(given, dict):
        pairs = list(given.items())
    else:
        raise UserError(f"labels map {path} is neither a JSON object {{output: class}} nor a list")
    found = np.full(classes, UNMAPPED, np.int64)
    for output, name in pairs:
        if name is not None:
            at = _index(output, outputs, classes, f"labels map {path}: output")
            found[at] = _index(name, names, len(names), f"labels map {path}: class")
    if (found == UNMAPPED).all():
        raise UserError(f"labels map {path} maps nothing")
    return found


def read_real(path: str | os.PathLike[str], source: Source, classes: int) -> tuple[list[list[int]], str]:
    """Returns the ReaL label sets in the order of `source`, and a sentence that says how they were matched.

    The file is a JSON list of label lists in the order of the files' names, as published for ImageNet's validation set
    (arXiv 2006.07159). Files named ..._val_00000123... take the set of that number, so parts of the set work too.

    Raises:
      UserError: unreadable, another number of sets than images, or a label that the head does not have.
    """
    sets = _json(path, "ReaL labels")
    if not isinstance(sets, list) or not all(isinstance(s, list) and all(type(i) is int for i in s) for s in sets):
        raise UserError(f"ReaL labels {path} are no list of lists of numbers")
    top = max((label for each in sets for label in each), default=0)
    if top >= classes:
        raise UserError(
            f"ReaL labels {path} name class {top}, but the head has {classes}: they are for ImageNet's 1,000"
        )
    ids = [os.path.basename(source.name_of(i)) for i in range(source.num_examples)]
    numbers = [re.search(r"_val_(\d{8})", name) for name in ids]
    if all(numbers):
        places = [int(number.group(1)) - 1 for number in numbers if number]
        if max(places) >= len(sets):
            raise UserError(f"ReaL labels {path} hold {len(sets)} sets, but there is an image number {max(places) + 1}")
        return [sets[place] for place in places], "ReaL labels by the numbers in the files' names"
    if len(sets) != source.num_examples:
        raise UserError(f"ReaL labels {path} hold {len(sets)} sets, but {source.name} {source.num_examples} images")
    if source.encoded:
        order = sorted(range(len(ids)), key=lambda i: ids[i])
        ordered: list[list[int]] = [[]] * len(sets)
        for place, i in enumerate(order):
            ordered[i] = sets[place]
        return ordered, "ReaL labels in the order of the files' names"
    return sets, "ReaL labels in the order of the records"


def _mapped(source: Source, outputs: Sequence[str], classes: int, path: str | os.PathLike[str]) -> Match:
    names = source.class_names
    found = read_map(path, outputs, names, classes)
    known = np.isin(np.arange(len(names)), found)
    labels = source.labels
    labels = labels * known if labels.ndim == 2 else np.where(known[labels], labels, UNMAPPED)
    note = f"{int((found != UNMAPPED).sum())} of {classes} outputs stand for {int(known.sum())} of {len(names)} classes"
    return Match(names, found, labels, note)


def _by_name(source: Source, outputs: tuple[str, ...]) -> Match:
    place = {name: i for i, name in enumerate(outputs)}
    missing = [name for name in source.class_names if name not in place]
    if missing:
        raise UserError(
            f"classes of data and head differ: {source.name} has {missing[0]}{nearest(missing[0], outputs)}, "
            f"{len(missing)} of its {len(source.class_names)} classes are none of the head's {len(outputs)} "
            f"({', '.join(outputs[:3])}, ...): evaluate on data of the head's classes, or give --labels_map"
        )
    table = np.array([place[name] for name in source.class_names], np.int64)
    labels = source.labels
    if labels.ndim == 2:
        rows = np.zeros((len(labels), len(outputs)), labels.dtype)
        rows[:, table] = labels
        labels = rows
    else:
        labels = table[labels]
    note = f"the data's {len(table)} classes found among the head's {len(outputs)} by name"
    return Match(outputs, None, labels, note)


def _index(value: Any, names: Sequence[str], count: int, where: str) -> int:
    if isinstance(value, str) and value in names:
        return list(names).index(value)
    number = value if type(value) is int else int(value) if isinstance(value, str) and value.isdecimal() else None
    if number is not None and 0 <= number < count:
        return number
    raise UserError(
        f'{where} "{value}" is not known{nearest(str(value), names)}: give a name, or a number below {count}'
    )


def _spoken(names: Sequence[str]) -> bool:
    """Whether these are names that somebody gave, not just numbers."""
    return bool(names) and tuple(names) != tuple(str(i) for i in range(len(names)))


def _json(path: str | os.PathLike[str], what: str) -> Any:
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} cannot be read ({error})") from None
    except ValueError as error:
        raise UserError(f"{what} {path} is no JSON ({error})") from None
