"""Where a run is in its data, and how it goes back when the loss is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vit_tpu import config as configs
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.settings import Config
from vit_tpu.training import guest, resume, state
from vit_tpu.training.callbacks import Checkpointer, Evaluator
from vit_tpu.training.hosts import Team
from vit_tpu.training.logger import Logger, StepCallback
from vit_tpu.training.resume import Start


@dataclasses.dataclass
class Position:
    """Where training stands in the stream of batches.

    Attributes:
      start: of the present `fit`. batch: number of the batch that its first step takes.
      config: of the run. num_examples: in an epoch. class_names: of the data.
    """

    start: Start
    batch: int
    config: Config
    num_examples: int
    class_names: Sequence[str] = ()

    def examples(self, step: int) -> int:
        distinct = self.config.training.batch_size // self.config.data.repeats
        return (self.batch + step - self.start.step) * distinct

    def micro_steps(self, step: int) -> int:
        return self.start.micro_steps + (step - self.start.step) * self.config.training.accumulation_steps

    def manifest(self, step: int, model: Any, logger: Logger, evaluator: Evaluator, replicas: int) -> dict[str, Any]:
        """Returns what a checkpoint of `step` says beside its arrays, as plain values."""
        from vit_tpu.training import summary

        examples, counters = self.examples(step), model.counters.values()
        return {
            "position": {
                "examples": examples, "epoch": round(examples / self.num_examples, 6),
                "micro_steps": self.micro_steps(step),
            },
            # The schedule and the bias corrections follow the applied updates.
            "counters": {"applied_updates": int(model.optimizer.iterations.numpy()), "skipped": counters["skipped"]},
            "metrics": {**logger.state(), **evaluator.state()},
            # No generator has a state: order and augmentation follow from (seed, epoch, position), dropout from
            # (seed, step).
            "seeds": {"training.seed": self.config.training.seed},
            "rollbacks": self.start.rollbacks, "precision": self.config.precision, "replicas": replicas,
            "class_names": list(self.class_names), "config": configs.to_dict(self.config),
            "versions": summary.versions(),
        }  # fmt: skip


def after(
    error: NonFiniteError, at: Position, model: Any, saver: Checkpointer, logger: Logger, evaluator: Evaluator,
    watchers: Sequence[Any], team: Team,
) -> None:  # fmt: skip
    """Deals with a loss (or many gradients) that was not finite: keeps the last good state and raises, or goes back.

    Going back takes the newest whole checkpoint and passes over the data from there to the bad step; without a
    checkpoint, the state before the bad step, which the latched step has kept. `at` then says where to go on.

    Raises:
      NonFiniteError: training.on_nonfinite is "stop", or training.max_rollbacks are used up.
    """
    saver.writer.wait()
    t, counters = at.config.training, model.counters.values()
    bad = counters["bad_step"] or counters["steps"]
    good = bad - 1 if counters["bad_step"] else bad
    used = at.start.rollbacks
    model.counters.bad_step.assign(0)
    model.counters.in_a_row.assign(0)
    model.counters.steps.assign(good)
    model.reset_metrics()
    logger.sums = {}
    if t.on_nonfinite != "rollback" or used >= t.max_rollbacks:
        if good > 0:
            print(f"the weights after step {good} are in {saver.save_now(good)}", flush=True)
        hint = (
            "; --on_nonfinite=rollback goes back and passes over the data"
            if t.on_nonfinite != "rollback"
            else f"; training.max_rollbacks={t.max_rollbacks} are used up"
        )
        raise NonFiniteError(f"{error}{hint}") from None
    batch = at.batch + bad - at.start.step
    found = guest.agree_checkpoint(team, saver.folder)
    if found is not None:
        path, manifest = found
        state.restore(model, path, manifest)
        at.start = dataclasses.replace(resume.from_checkpoint(path, manifest), rollbacks=used + 1)
        metrics, place = manifest.get("metrics", {}), "the checkpoint"
    else:
        at.start = dataclasses.replace(at.start, step=good, micro_steps=at.micro_steps(good), rollbacks=used + 1)
        metrics, place = {**logger.state(), **evaluator.state(), "window": {}}, "the state"
    at.batch = batch
    model.counters.in_a_row.assign(0)
    back = at.start.step
    for watcher in watchers:
        if isinstance(watcher, StepCallback):
            watcher.rewind(back)
    logger.load(metrics)
    logger.forget_after(back)
    evaluator.load(metrics, back)
    say = logger.progress.say if logger.progress is not None else print
    lost = f"steps {back + 1:,} to {bad:,} are" if bad > back + 1 else f"step {bad:,} is"
    say(
        f"step {bad:,} is not finite: back to {place} of step {back:,}, and the data of {lost} passed over (rollback "
        f"{used + 1} of at most {t.max_rollbacks})"
    )
