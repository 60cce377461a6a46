"""How long a run is and how often it logs, evaluates and saves, in whole executions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vit_tpu.errors import UserError
from vit_tpu.optim import schedules
from vit_tpu.settings import Config
from vit_tpu.training.checkpoints import Keep


@dataclasses.dataclass(frozen=True)
class Plan:
    """Lengths in steps; the intervals are multiples of `steps_per_execution`, since Python sees nothing in between.

    Attributes:
      keep: which checkpoints stay.
      changed: sentences about intervals that were moved to the next multiple.
    """

    total_steps: int
    steps_per_epoch: float
    steps_per_execution: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int
    keep: Keep
    changed: tuple[str, ...]


def plan(config: Config, num_examples: int) -> Plan:
    """Returns the lengths of a run over `num_examples` training examples.

    An epoch is num_examples / batch_size steps, rounded once over the whole run. Unless the config says otherwise an
    execution is about a hundredth of the run, at most 50 steps.
    """
    t = config.training
    if t.batch_size > num_examples:
        raise UserError(f"training.batch_size {t.batch_size:,} is larger than the {num_examples:,} training examples")
    per_epoch = num_examples / t.batch_size
    total = t.steps if t.steps is not None else max(round((t.epochs or 0) * per_epoch), 1)
    each = min(t.steps_per_execution or min(max(total // 100, 1), 50), total)
    changed: list[str] = []

    def interval(name: str, wanted: Any, default: int) -> int:
        steps = default
        if wanted is not None:
            steps = schedules.steps_from(wanted, total_steps=total, steps_per_epoch=per_epoch)
        rounded = max(math.ceil(steps / each), 1) * each
        if wanted is not None and isinstance(wanted, int) and rounded != steps:
            changed.append(f"{name} {steps} -> {rounded} (a multiple of steps_per_execution {each})")
        return rounded

    return Plan(
        total_steps=total,
        steps_per_epoch=per_epoch,
        steps_per_execution=each,
        log_every=interval("log_every", t.log_every, max(total // 100, 1)),
        evaluate_every=interval("evaluate_every", t.evaluate_every, max(round(per_epoch), total // 20)),
        checkpoint_every=interval("checkpoint_every", t.checkpoint_every, 2**40),
        keep=Keep(t.keep, interval("keep_every", t.keep_every, 0) if t.keep_every else 0, t.keep_best),
        changed=tuple(changed),
    )


def learning_rate(config: Config, plan: Plan) -> Any:
    """Returns the schedule that `config.schedule` names, over the plan's length."""
    s, peak = config.schedule, config.optimizer.learning_rate

    def steps(duration: Any) -> int:
        return schedules.steps_from(
            duration,
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            batch_size=config.training.batch_size,
        )

    common: dict[str, Any] = {
        "total_steps": plan.total_steps,
        "warmup_steps": steps(s.warmup),
        "cooldown_steps": steps(s.cooldown),
    }
    if s.name == "reciprocal_sqrt":
        return schedules.ReciprocalSqrt(peak, timescale=steps(s.timescale), **common)
    return {"cosine": schedules.Cosine, "linear": schedules.Linear, "constant": schedules.Constant}[s.name](
        peak, **common
    )
