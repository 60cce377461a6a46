"""`vit_tpu.evaluate`: a trained model on labelled data, every example once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.evaluation import labels, loading, metrics, outputs
from vit_tpu.evaluation.loading import Trained
from vit_tpu.models.vit import ViT
from vit_tpu.training import display

SHOWN_CLASSES = 20  # rows of the printed table; the object and the JSON file hold all
SCORES_LIMIT = 2**31  # bytes of scores kept for the mean average precision


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """What `evaluate` found; prints as a table.

    Attributes:
      weights: where the weights come from, and whether they are the average.
      data: name of the data.
      count: examples that count; left_out: those that do not, having no label the head could give.
      accuracy, top5: shares of right predictions (top5 None for fewer than 6 classes). With label rows a prediction is
        right when it is one of the labels: hit@1.
      loss: mean of the loss the model was trained with.
      loss_name: "softmax" or "sigmoid", with the label smoothing if any.
      calibration_error: expected, over 15 bins of confidence.
      mean_average_precision: over the classes with a positive example; None unless labels are rows or the loss sigmoid.
      real_accuracy, real_count: on ReaL labels, None without.
      images_per_second: reading and computing, the first batch left out.
      per_class: a row a class (see `metrics.per_class`; for label rows: positives and average precision).
      reliability: a row a bin of confidence.
      confusion: int64 [C, C], label by prediction; None for label rows and above 10,000 classes.
      predicted, confidence, hit: a value for each example that counts.
      ids: their names.
      notes: what a reader has to know.
      devices: where it was computed.
    """

    weights: str
    data: str
    count: int
    left_out: int
    accuracy: float
    top5: float | None
    loss: float
    loss_name: str
    calibration_error: float
    mean_average_precision: float | None
    real_accuracy: float | None
    real_count: int | None
    images_per_second: float | None
    per_class: list[dict[str, Any]]
    reliability: list[dict[str, Any]]
    notes: tuple[str, ...]
    devices: str
    names: tuple[str, ...]
    confusion: np.ndarray | None
    predicted: np.ndarray
    confidence: np.ndarray
    hit: np.ndarray
    ids: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts as plain values; of the arrays only the confusion matrix, up to 100 classes."""
        large = ("predicted", "confidence", "hit", "ids", "confusion", "names")
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in large}
        plain["notes"] = list(self.notes)
        if self.confusion is not None and len(self.confusion) <= 100:
            plain["confusion"] = self.confusion.tolist()
        return plain

    def confusion_picture(self) -> Any:
        """Returns the confusion matrix as a matplotlib figure (shown inline by a notebook)."""
        from vit_tpu.evaluation import pictures

        if self.confusion is None:
            raise UserError("no confusion matrix: labels are rows, or there are more than 10,000 classes")
        return pictures.confusion_picture(self.confusion, self.names, self._title())

    def reliability_picture(self) -> Any:
        """Returns accuracy over confidence as a matplotlib figure."""
        from vit_tpu.evaluation import pictures

        return pictures.reliability_picture(self.reliability, self.calibration_error, self._title())

    def _title(self) -> str:
        return f"{self.weights} on {self.data}"

    def __str__(self) -> str:
        rows = [("weights", self.weights), ("data", f"{self.data}, {self.count:,} examples")]
        if self.left_out:
            rows[-1] = ("data", rows[-1][1] + f" ({self.left_out:,} left out: no label that the head could give)")
        rows += [("note", note) for note in self.notes]
        rows += [("devices", self.devices), ("accuracy", f"{100 * self.accuracy:.2f}%" + self._top5())]
        if self.real_accuracy is not None:
            rows.append(("ReaL", f"{100 * self.real_accuracy:.2f}% of {self.real_count:,}"))
        if self.mean_average_precision is not None:
            rows.append(("mAP", f"{100 * self.mean_average_precision:.2f}%"))
        rows.append(("loss", f"{self.loss:.4f} ({self.loss_name})"))
        rows.append(("calibration", f"expected error {100 * self.calibration_error:.2f}% over {metrics.BINS} bins"))
        if self.images_per_second:
            rows.append(("speed", f"{self.images_per_second:,.0f} images/s, first batch left out"))
        return "evaluation\n" + display.table(rows) + "\n\n" + class_table(self.per_class)

    def __repr__(self) -> str:  # what a notebook shows
        return str(self)

    def _top5(self) -> str:
        return "" if self.top5 is None else f", top-5 {100 * self.top5:.2f}%"


def evaluate(
    run: str | os.PathLike[str] | ViT | Trained, data: str | Source | None = None, *, split: str = "validation",
    ema: bool | None = None, batch_size: int | None = None, real: str | os.PathLike[str] | None = None,
    labels_map: str | os.PathLike[str] | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluates a trained model on labelled data.

    Args:
      run: a run's folder, a model in memory, or what `load_trained` returned.
      data: a folder of class folders, an .npz file, the name of a source, or a `Source`; None for the run's own.
      split: "validation", "train", or "all" for every image of data that have no validation split of their own.
      ema: the average of the weights, or not; None: the average if the run kept one. Only with a run's folder.
      batch_size: examples at a time; None: the run's.
      real: file of ReaL labels, see `labels.read_real`; data and head must be ImageNet's 1,000 classes.
      labels_map: file that says which class of the data each output stands for, see `labels.read_map`.

    Returns:
      The figures, each over every example exactly once.

    Raises:
      UserError: no run, no data, or they do not fit each other.
    """
    options: dict[str, Any] = {"ema": ema}
    if isinstance(data, str):
        options["overrides"] = loading.data_overrides(data)
    trained = loading.as_trained(run, **options)
    if isinstance(data, str) and not isinstance(run, str | os.PathLike):
        trained = dataclasses.replace(
            trained, config=loading.with_overrides(trained.config, loading.data_overrides(data))
        )
    source = data if isinstance(data, Source) else outputs.open_source(trained, split)
    return _evaluate(trained, source, batch_size, real, labels_map)


def _evaluate(
    trained: Trained, source: Source, batch_size: int | None, real: Any, labels_map: Any
) -> Evaluation:  # fmt: skip
    model, config = trained.model, trained.config
    compute = outputs.compiled_logits(trained)
    found = labels.match(source, trained.class_names, model.num_classes, labels_map)
    rows = found.labels.ndim == 2
    if real is not None and labels_map is not None:
        raise UserError(
            "ReaL labels are numbers of the head's classes, a labels map changes those: give one of the two"
        )
    sets, real_note = labels.read_real(real, source, model.num_classes) if real is not None else (None, "")
    counts = found.labels.max(-1) > 0 if rows else found.labels >= 0
    if not counts.any():
        raise UserError(f"{source.name} has no example with a label that the head could give")
    loss, smoothing = config.training.loss, config.training.label_smoothing
    notes = [found.note, real_note]
    keep = (rows or loss == "sigmoid") and counts.sum() * len(found.names) * 4 <= SCORES_LIMIT
    if (rows or loss == "sigmoid") and not keep:
        size = counts.sum() * len(found.names) * 4 / 2**30
        notes.append(f"no mean average precision: its scores would take {size:.0f} GiB")
    broken, speed = BrokenRecords(0), outputs.Speed()
    size = outputs.batch_size(trained, batch_size, source.num_examples)
    dataset = outputs.eval_dataset(trained, source, size, broken)
    parts, scores = [], []
    with outputs.readable(broken):
        for logits, where in _in_order(compute, dataset, speed, source.num_examples):
            chosen = where[counts[where]]
            logits = found.logits(logits[counts[where]], loss)
            if len(chosen):
                parts.append(metrics.judge(logits, found.labels[chosen], loss, smoothing))
            if keep:
                scores.append(np.asarray(logits, np.float32))
    judged = metrics.joined(parts)
    own = found.labels[counts]
    real_accuracy = real_count = None
    if sets is not None:
        chosen_sets = [sets[i] for i in np.flatnonzero(counts)]
        real_accuracy, real_count = metrics.real_accuracy(judged.predicted, chosen_sets)
    precisions = _average_precisions(np.concatenate(scores), own) if keep else []
    positive = [value for value in precisions if value is not None]
    names = found.names
    table = metrics.per_class(own, judged.predicted, names) if not rows else [
        {"class": name, "count": int((own[:, i] > 0).sum()), "average_precision": precisions[i] if keep else None}
        for i, name in enumerate(names)
    ]  # fmt: skip
    return Evaluation(
        weights=trained.weights,
        data=source.name,
        count=len(judged.hit),
        left_out=int(len(counts) - counts.sum()),
        accuracy=float(judged.hit.mean()),
        top5=float((judged.rank <= 5).mean()) if len(names) > 5 else None,
        loss=float(judged.loss.mean()),
        loss_name=loss + (f", label smoothing {smoothing:g}" if smoothing else ""),
        calibration_error=metrics.calibration_error(judged.confidence, judged.hit),
        mean_average_precision=float(np.mean(positive)) if positive else None,
        real_accuracy=real_accuracy,
        real_count=real_count,
        images_per_second=speed.images_per_second,
        per_class=table,
        reliability=metrics.reliability(judged.confidence, judged.hit),
        notes=tuple(note for note in notes if note),
        devices=f"{trained.here.line}, {config.precision}",
        names=names,
        confusion=None if rows or len(names) > 10_000 else metrics.confusion(own, judged.predicted, len(names)),
        predicted=judged.predicted,
        confidence=judged.confidence,
        hit=judged.hit,
        ids=tuple(source.name_of(int(i)) for i in np.flatnonzero(counts)),
    )


def _in_order(
    compute: Any, dataset: Any, speed: outputs.Speed, examples: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields logits of real examples with their places in the source; padding is gone."""
    seen = 0
    for logits, _, weights, _ in outputs.each_batch(compute, dataset, speed):
        real = np.flatnonzero(weights > 0)
        yield logits[real], seen + real
        seen += len(weights)
    assert seen >= examples


def _average_precisions(scores: np.ndarray, labels: np.ndarray) -> list[float | None]:
    classes = scores.shape[1]
    own = [labels[:, i] > 0 if labels.ndim == 2 else labels == i for i in range(classes)]
    return [metrics.average_precision(scores[:, i], own[i]) for i in range(classes)]


def class_table(rows: list[dict[str, Any]], shown: int = SHOWN_CLASSES) -> str:
    """Returns the per-class rows as text: all, or the worst `shown` of many."""
    key = "recall" if rows and "recall" in rows[0] else "average_precision"
    chosen = [row for row in rows if row["count"]]
    title = f"{len(chosen)} classes"
    if len(chosen) > shown:
        known = [row for row in chosen if row[key] is not None]  # an average precision may not have been computed
        which = "worst" if known else "first"
        title = f"the {which} {shown} of {len(chosen)} classes"
        chosen = sorted(known, key=lambda row: row[key])[:shown] or chosen[:shown]
    width = max([len(title), *(len(row["class"]) for row in chosen)])
    columns = ["recall", "precision", "f1"] if key == "recall" else ["average_precision"]
    lines = [f"  {title:<{width}}  {'count':>7}" + "".join(f"  {name:>9}" for name in columns)]
    for row in chosen:
        line = f"  {row['class']:<{width}}  {row['count']:>7,}"
        line += "".join(f"  {_percent(row[name]):>{max(len(name), 9)}}" for name in columns)
        if row.get("taken_for") is not None:
            line += f"   {row['times']} taken for {row['taken_for']}"
        lines.append(line)
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
