"""Few-shot accuracy during training, as a Keras callback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from vit_tpu.data.source import Source
from vit_tpu.errors import UserError
from vit_tpu.evaluation import fewshot, loading, outputs
from vit_tpu.training.callbacks import StepCallback


class FewShotCallback(StepCallback):
    """Measures the features every so many steps, and at the end, by few-shot linear regression.

    Args:
      train: from which the few examples are chosen.
      test: on which they are judged.
      every: training steps.
      shots, seeds: as in `fewshot.few_shot`.
      features: "head", "cls" or "mean", see `outputs.features_of`.
      averaged: whether to judge the moving average of the weights, which the model must keep.
      batch_size: images at a time.
      say: told a line each time; None: nobody.

    Attributes:
      results: {"step", "fewshot": {shots: mean accuracy over the seeds}}, one a time.
    """

    def __init__(
        self, train: Source, test: Source, every: int, *, shots: Sequence[int] = (1, 5, 10),
        seeds: Sequence[int] = fewshot.SEEDS, features: str = "head", averaged: bool = False, batch_size: int = 64,
        start: int = 0, say: Callable[[str], None] | None = print,
    ):  # fmt: skip
        super().__init__(every, start)
        for n in shots:  # too few examples show now, not after hours of training
            for seed in seeds:
                fewshot.choose(train.labels, n, seed, train.num_classes, train.class_names)
        if train.class_names != test.class_names:
            raise UserError(f"{train.name} and {test.name} have different classes")
        self.train, self.test, self.shots, self.seeds = train, test, tuple(shots), tuple(seeds)
        self.features, self.averaged, self.batch_size, self.say = features, averaged, batch_size, say
        self.results: list[dict[str, Any]] = []
        self.run: Any = None

    def on_steps(self, step: int, logs: Any) -> None:
        trained = loading.of_model(self.model)
        if self.run is None:  # traced once for the whole training
            self.run = outputs.compiled(trained, outputs.features_of(self.model, self.features))
        with self.model.averaged_weights() if self.averaged else contextlib.nullcontext():
            sets = [
                outputs.features(trained, source, batch=self.batch_size, run=self.run)
                for source in (self.train, self.test)
            ]
        found = fewshot.few_shot(
            *sets[0], *sets[1], self.shots, self.seeds, classes=self.train.num_classes, names=self.train.class_names
        )
        self.results.append({"step": step, "fewshot": {n: found.mean(n) for n in self.shots}})
        if self.say is not None:
            means = "  ".join(f"{n}-shot {100 * found.mean(n):.2f}%" for n in self.shots)
            self.say(f"step {step:,}  few-shot  {means}")
