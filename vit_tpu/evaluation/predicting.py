"""`vit_tpu.predict`: labels with probabilities for files, each named exactly once."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from vit_tpu.errors import UserError
from vit_tpu.evaluation import files, loading, metrics, outputs
from vit_tpu.evaluation.loading import Trained
from vit_tpu.models.vit import ViT

TOP = 5
OUT = (".csv", ".jsonl")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the model says of one file.

    Attributes:
      file: its name, as given.
      label: the most probable class; probability: its own.
      top: (label, probability) of the most probable classes, the first first.
    """

    file: str
    label: str
    probability: float
    top: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        top = [{"label": label, "probability": probability} for label, probability in self.top]
        return {"file": self.file, "label": self.label, "probability": self.probability, "top": top}


@dataclasses.dataclass(frozen=True, repr=False)
class Predictions:
    """What `predict` found; prints as a table.

    Attributes:
      rows: a `Prediction` for each readable file, in order.
      unreadable: {file: why}.
      weights: where the weights come from.
      images_per_second: reading and computing, the first batch left out.
    """

    rows: list[Prediction]
    unreadable: dict[str, str]
    weights: str
    images_per_second: float | None

    def __repr__(self) -> str:  # what a notebook shows
        return str(self)

    def records(self) -> list[dict[str, Any]]:
        """Returns flat rows for `pandas.DataFrame`: file, label, probability, label2, probability2, ..."""
        return [_flat(row) for row in self.rows]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows as .csv or .jsonl."""
        with Writer(path, min((len(row.top) for row in self.rows), default=1)) as write:
            for row in self.rows:
                write(row)

    def __str__(self) -> str:
        return "\n".join(table(self.rows))


def predict(
    run: str | os.PathLike[str] | ViT | Trained,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, top: int = TOP,
    batch_size: int | None = None, ema: bool | None = None,
) -> Predictions:  # fmt: skip
    """Predicts the classes of image files.

    Args:
      run, ema, batch_size: as in `evaluate`.
      images: files, folders, globs.
      top: classes to name for each file.

    Raises:
      UserError: no run, or no image by these names. Unreadable files are no error: see `Predictions.unreadable`.
    """
    trained = loading.as_trained(run, ema=ema)
    given = [images] if isinstance(images, str | os.PathLike) else images
    named, _ = files.collect([os.fspath(name) for name in given])
    unreadable, speed = files.Unreadable(), outputs.Speed()
    rows = [row for row, _ in each(trained, named, unreadable, top=top, batch_size=batch_size, speed=speed)]
    return Predictions(rows, unreadable.reasons, trained.weights, speed.images_per_second)


def each(
    trained: Trained, named: Sequence[str], unreadable: files.Unreadable, *, top: int = TOP,
    batch_size: int | None = None, speed: outputs.Speed | None = None,
) -> Iterator[tuple[Prediction, Callable[[], np.ndarray]]]:  # fmt: skip
    """Yields the prediction of every readable file, in order, with its picture as the model sees it.

    Args:
      trained: the model.
      named: files.
      unreadable: the others are added to it.
      top: classes to name.
      batch_size: files at a time; the last batch is padded, and what was padded is cut off.
      speed: filled in at the end.

    The picture comes as a function that returns uint8 [H, W, C].
    """
    if top < 1:
        raise UserError(f"top is {top}: ask for 1 class or more")
    source = files.source_of(named)
    dataset = outputs.eval_dataset(trained, source, outputs.batch_size(trained, batch_size, len(named)), unreadable)
    run = outputs.compiled_logits(trained)
    names, first = trained.names, 0
    count = min(top, len(names))
    for logits, _, weights, images in outputs.each_batch(run, dataset, speed):
        shares = metrics.probabilities(logits, trained.config.training.loss)
        best = np.argsort(-shares, axis=1, kind="stable")[:, :count]
        for i in map(int, np.flatnonzero(weights > 0)):
            found = tuple((names[j], float(shares[i, j])) for j in best[i])
            yield Prediction(named[first + i], *found[0], found), functools.partial(picture, images, i)
        first += len(weights)


def picture(images: Any, i: int) -> np.ndarray:
    """Returns image i of a batch in [-1, 1] as uint8 [H, W, C]."""
    return np.rint((images[i].numpy() + 1.0) * 127.5).astype(np.uint8)


class Writer:
    """Writes predictions one by one to a .csv or .jsonl file, so that nothing is lost when a later one fails.

    The file is begun with the first row: wrong use leaves what was there. Names that are not UTF-8 keep their bytes.

    Args:
      path: ends in .csv or .jsonl.
      top: classes a row names, for the header of a .csv.

    Raises:
      UserError: another ending, or the file cannot be written (rows may be there up to where the disk was full).
    """

    def __init__(self, path: str | os.PathLike[str], top: int):
        check_out(path)
        self.path, self.top = pathlib.Path(path), top
        self.file: TextIO | None = None

    def __enter__(self) -> Callable[[Prediction], None]:
        return self._write

    def _begun(self) -> TextIO:
        if self.file is None:
            self.file = open(self.path, "w", newline="", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
            if self.path.suffix == ".csv":
                csv.writer(self.file).writerow(_header(self.top))
        return self.file

    def _write(self, row: Prediction) -> None:
        with self._said():
            if self.path.suffix == ".csv":
                values = [f"{v:.6g}" if isinstance(v, float) else v for v in _flat(row).values()]
                csv.writer(self._begun()).writerow(values)
            else:
                self._begun().write(json.dumps(row.to_dict(), ensure_ascii=False) + "\n")

    def __exit__(self, kind: Any, *error: Any) -> None:
        with self._said():
            if kind is None:
                self._begun()  # no row at all: an empty table is an answer, too
            if self.file is not None:
                self.file.close()

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}): free space or choose another place"
                + ("; it holds only the first rows now" if self.file is not None else "")
            ) from None


def check_out(path: str | os.PathLike[str]) -> None:
    """Raises UserError unless rows can be written there, as far as that shows before."""
    file = pathlib.Path(path)
    if file.suffix not in OUT:
        raise UserError(f"{path} ends in neither .csv nor .jsonl: say which of the two to write")
    if not file.parent.is_dir():
        raise UserError(f"{path}: there is no folder {file.parent}")
    if file.is_dir():
        raise UserError(f"{path} is a folder: name a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{path} cannot be written (no permission): choose another place")


def table(rows: Sequence[Prediction]) -> list[str]:
    """Returns a line a file: label, a bar for its probability, the runners-up, the file."""
    width = min(max((len(row.label) for row in rows), default=0), 28)
    lines = []
    for row in rows:
        label = row.label if len(row.label) <= width else row.label[: width - 3] + "..."
        bar = "#" * round(10 * row.probability)
        others = ", ".join(f"{name} {_percent(share)}" for name, share in row.top[1:3])
        lines.append(
            f"{label:<{width}} {_percent(row.probability):>6} {bar:<10}  {files.shown(row.file)}"
            + (f"   ({others})" if others else "")
        )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _header(top: int) -> list[str]:
    return ["file", "label", "probability"] + [f"{n}{i}" for i in range(2, top + 1) for n in ("label", "probability")]


def _flat(row: Prediction) -> dict[str, Any]:
    values = [row.file, *(value for pair in row.top for value in pair)]
    return dict(zip(_header(len(row.top)), values))
