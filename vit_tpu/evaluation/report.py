"""What features are worth, in one report; and the pictures of an evaluation, as files."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.evaluation import fewshot, loading, neighbours, outputs, pictures, probe
from vit_tpu.evaluation.evaluating import Evaluation
from vit_tpu.evaluation.loading import Trained
from vit_tpu.models.vit import ViT
from vit_tpu.training import display


@dataclasses.dataclass(frozen=True, repr=False)
class FeatureReport:
    """What `judge_features` found; prints as a table.

    Attributes:
      weights: where the weights come from.
      features: "head", "cls" or "mean", and their width.
      train, test: names and sizes of the data.
      fewshot: accuracies by shots and seeds, or None.
      neighbours: {"k", "temperature", "accuracy"} each.
      probe: {"l2", "accuracy", "converged"}, or None.
      images_per_second: of computing the test features, the first batch left out.
      devices: where they were computed.
    """

    weights: str
    features: str
    train: str
    test: str
    fewshot: fewshot.FewShot | None
    neighbours: list[dict[str, Any]]
    probe: dict[str, Any] | None
    images_per_second: float | None
    devices: str

    def __repr__(self) -> str:  # what a notebook shows
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {"fewshot": self.fewshot.to_dict() if self.fewshot else None}

    def __str__(self) -> str:
        rows = [("weights", self.weights), ("features", self.features), ("train", self.train), ("test", self.test),
                ("devices", self.devices)]  # fmt: skip
        if self.images_per_second:
            rows.append(("speed", f"{self.images_per_second:,.0f} images/s, first batch left out"))
        for row in self.neighbours:
            vote = "" if row["temperature"] is None else f", temperature {row['temperature']:g}"
            rows.append((f"{row['k']}-NN", f"{100 * row['accuracy']:.2f}% (cosine{vote})"))
        if self.probe is not None:
            how = "" if self.probe["converged"] else ", not converged"
            rows.append(("probe", f"{100 * self.probe['accuracy']:.2f}% (logistic, l2 {self.probe['l2']:g}{how})"))
        text = "features\n" + display.table(rows)
        return text if self.fewshot is None else f"{text}\n\nfew-shot, linear regression\n{self.fewshot}"


def judge_features(
    run: str | os.PathLike[str] | ViT | Trained, data: str | tuple[Source, Source] | None = None, *,
    shots: Sequence[int] = (), seeds: Sequence[int] = fewshot.SEEDS, neighbours: Sequence[int] = (),
    temperature: float | None = None, probe: bool = False, features: str = "head", batch_size: int | None = None,
    ema: bool | None = None,
) -> FeatureReport:  # fmt: skip
    """Measures frozen features: fitted on the training split, judged on the validation split.

    Args:
      run, ema, batch_size: as in `evaluate`.
      data: as in `evaluate`, or (train, test) sources.
      shots, seeds: of few-shot linear regression.
      neighbours: numbers of nearest neighbours; temperature: of their votes.
      probe: whether to train a linear probe on all training examples.
      features: "head" (what the classifier reads), "cls" or "mean".

    Raises:
      UserError: nothing to judge, no run, no such features, or too few examples of a class.
    """
    if not (shots or neighbours or probe):
        raise UserError("nothing to judge the features by: give shots=(1, 5), neighbours=(10,) or probe=True")
    options: dict[str, Any] = {"ema": ema}
    if isinstance(data, str):
        options["overrides"] = loading.data_overrides(data)
    trained = loading.as_trained(run, **options)
    if isinstance(data, str):
        settled = loading.with_overrides(trained.config, loading.data_overrides(data))
        trained = dataclasses.replace(trained, config=settled)
    train, test = (
        data if isinstance(data, tuple) else [outputs.open_source(trained, s) for s in ("train", "validation")]
    )
    if train.class_names != test.class_names:
        raise UserError(f"{train.name} and {test.name} have different classes")
    for n in shots:  # before minutes of computing features
        for seed in seeds[:1]:
            if train.labels.ndim == 1:
                fewshot.choose(train.labels, n, seed, train.num_classes, train.class_names)
    speed = outputs.Speed()
    x, y = outputs.features(trained, train, features, batch=batch_size)
    x_test, y_test = outputs.features(trained, test, features, batch=batch_size, speed=speed)
    classes = train.num_classes
    table = None
    if shots:
        table = fewshot.few_shot(x, y, x_test, y_test, shots, seeds, classes=classes, names=train.class_names)
    return FeatureReport(
        weights=trained.weights,
        features=f"{features}, {x.shape[1]} numbers",
        train=f"{train.name}, {len(y):,} examples, {classes} classes",
        test=f"{test.name}, {len(y_test):,} examples",
        fewshot=table,
        neighbours=[_neighbours(x, y, x_test, y_test, k, temperature, classes) for k in neighbours],
        probe=_probe(x, y, x_test, y_test, classes) if probe else None,
        images_per_second=speed.images_per_second,
        devices=f"{trained.here.line}, {trained.config.precision}",
    )


def _neighbours(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, k: int, temperature: float | None,
    classes: int,
) -> dict[str, Any]:  # fmt: skip
    found = neighbours.predict(x, y, x_test, k=k, temperature=temperature, classes=classes)
    return {"k": k, "temperature": temperature, "accuracy": float((found == y_test).mean())}


def _probe(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, classes: int) -> dict[str, Any]:
    fitted = probe.fit(x, y, classes)
    accuracy = float((fitted.logits(x_test).argmax(1) == y_test).mean())
    return {"l2": fitted.l2, "accuracy": accuracy, "converged": fitted.converged}


def draw(evaluation: Evaluation, folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes confusion.png (where there is a matrix) and reliability.png; returns their paths."""
    from vit_tpu.training.plots import _pyplot

    _pyplot()
    root = pathlib.Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        drawn = {"reliability.png": evaluation.reliability_picture()}
        if evaluation.confusion is not None:
            drawn = {"confusion.png": evaluation.confusion_picture(), **drawn}
        for name, figure in drawn.items():
            pictures.save(figure, root / name)
    except OSError as error:
        raise UserError(f"pictures cannot be written to {root} ({error.strerror}): choose another folder") from None
    return [root / name for name in drawn]
