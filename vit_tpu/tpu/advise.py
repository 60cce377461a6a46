"""What to change when a step does not fit: changes in the order in which they cost least, each one compiled."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.settings import Config

if TYPE_CHECKING:
    from vit_tpu.tpu.planner import Plan, Say


@dataclasses.dataclass(frozen=True)
class Advice:
    """One change on top of those before it, compiled.

    Attributes:
      change: "model.remat=block".
      total: bytes with it and all before it.
      saved: bytes against the step before.
      fits: whether that is enough.
      kept: False if it saved nothing and so is not in force for those after it.
    """

    change: str
    total: int
    saved: int
    fits: bool
    kept: bool


def changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields (what, config) of each change that this config can still make, the cheapest in speed and accuracy first.

    Args:
      config: every change is made to it alone; the caller makes them on top of each other.
    """

    def with_(*pairs: tuple[str, object]) -> tuple[str, Config]:
        changed = config
        for key, value in pairs:
            changed = configs.replace(changed, key, value)
        return " ".join(f"{key}={value}" for key, value in pairs), changed

    if config.precision == "float32":
        yield with_(("precision", "mixed_bfloat16"))
    if config.optimizer.name in ("adamw", "lamb") and config.optimizer.momentum_dtype != "bfloat16":
        yield with_(("optimizer.momentum_dtype", "bfloat16"))
    if config.model.remat == "none" and not config.model.scan:
        yield with_(("model.remat", "block"))
    if config.training.accumulation_steps == 1:
        yield with_(("training.accumulation_steps", 4))
    if config.model.pool == "tok":
        yield with_(("model.pool", "gap"))
    if config.optimizer.name in ("adamw", "lamb"):
        yield with_(("optimizer.name", "adafactor"), *((name, None) for name in _only_adam(config)))
    if (
        config.model.scan
    ):  # the loop keeps all its gradients and all its inputs at once; the compiler takes longer without
        yield with_(("model.scan", False), ("model.remat", "block"))
    if config.training.ema is not None:
        yield with_(("training.ema", None), ("training.evaluate_ema", False))


def _only_adam(config: Config) -> list[str]:
    names = ("beta_2", "epsilon", "trust_clip", "decay_style", "exclude_from_layer_adaptation")
    return [f"optimizer.{name}" for name in names if getattr(config.optimizer, name) is not None]


def until_it_fits(plan: Plan, limit: float, cache: str | os.PathLike[str] | None, say: Say) -> list[Advice]:
    """Makes one change after the other until the step fits; then halves the batch if none of them was enough.

    Returns:
      What was tried, in order; the changes kept so far are in force for each.
    """
    from vit_tpu.tpu.planner import make_plan

    found: list[Advice] = []
    config, total, tried = plan.config, plan.memory.total, set[str]()

    def compiled(config: Config, batch: int) -> Plan:
        return make_plan(config, plan.chip.name, plan.cores, batch, limit=limit, cache=cache, say=say)

    while True:
        change = next(((what, changed) for what, changed in changes(config) if what not in tried), None)
        if change is None:
            break
        what, changed = change
        tried.add(what)
        try:
            answer = compiled(changed, plan.batch_per_core)
        except UserError:
            continue
        saved = total - answer.memory.total
        found.append(Advice(what, answer.memory.total, saved, answer.fits, saved > 0))
        if saved > 0:
            config, total = changed, answer.memory.total
        if answer.fits:
            return found
    batch, unit = plan.batch_per_core, config.training.accumulation_steps
    while batch // 2 >= unit:
        batch //= 2
        answer = compiled(config, batch)
        found.append(
            Advice(f"batch_per_core={batch}", answer.memory.total, total - answer.memory.total, answer.fits, True)
        )
        total = answer.memory.total
        if answer.fits:
            break
    return found
