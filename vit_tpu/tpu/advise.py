"""What to change when a step does not fit: changes in the order in which they cost least, each one compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.tpu.report import Memory
from vit_tpu.tpu.result import Advice, Result


def changes(config: Config, cores: int = 1) -> Iterator[tuple[str, Config]]:
    """Yields (what, config) of each change that this config can still make, the cheapest in speed and accuracy first.

    Args:
      config: every change is made to it alone; the caller makes them on top of each other.
      cores: that train together; with several, state and weights can be divided over them.
    """

    def with_(*pairs: tuple[str, object]) -> tuple[str, Config]:
        changed = config
        for key, value in pairs:
            changed = configs.replace(changed, key, value)
        return " ".join(f"{key}={value}" for key, value in pairs), changed

    if config.precision == "float32":
        yield with_(("precision", "mixed_bfloat16"))
    if cores > 1 and config.shard == "none":
        yield with_(("mesh", config.mesh or f"data={cores}"), ("shard", "state"))
    if config.optimizer.name in ("adamw", "lamb") and config.optimizer.momentum_dtype != "bfloat16":
        yield with_(("optimizer.momentum_dtype", "bfloat16"))
    if config.model.remat == "none" and not config.model.scan:
        yield with_(("model.remat", "block"))
    if cores > 1 and config.shard == "state":
        yield with_(("shard", "full"))
    if config.training.accumulation_steps == 1:
        yield with_(("training.accumulation_steps", 4))
    if config.model.pool == "tok":
        yield with_(("model.pool", "gap"))
    if config.optimizer.name in ("adamw", "lamb"):
        yield with_(("optimizer.name", "adafactor"), *((name, None) for name in _only_adam(config)))
    if config.model.scan:  # saves little, and the compiler takes ten times as long
        yield with_(("model.scan", False), ("model.remat", "block"))
    if config.training.ema is not None:
        yield with_(("training.ema", None), ("training.evaluate_ema", False))


def _only_adam(config: Config) -> list[str]:
    names = ("beta_2", "epsilon", "trust_clip", "decay_style", "exclude_from_layer_adaptation")
    return [f"optimizer.{name}" for name in names if getattr(config.optimizer, name) is not None]


def until_it_fits(plan: Result, compiled: Callable[[Config, int], Memory]) -> list[Advice]:
    """Makes one change after the other until the step fits; then halves the batch if none of them was enough.

    Args:
      plan: of the step that does not fit.
      compiled: plans the memory of a config with a batch per core.

    Returns:
      What was tried, in order; the changes kept so far are in force for each.
    """
    found: list[Advice] = []
    config, total, tried = plan.config, plan.memory.total, set[str]()
    while True:
        change = next(((what, changed) for what, changed in changes(config, plan.cores) if what not in tried), None)
        if change is None:
            break
        what, changed = change
        tried.add(what)
        try:
            memory = compiled(changed, plan.batch_per_core)
        except UserError:
            continue
        saved = total - memory.total
        found.append(Advice(what, memory.total, saved, memory.fits, saved > 0))
        if saved > 0:
            config, total = changed, memory.total
        if memory.fits:
            return found
    batch, unit = plan.batch_per_core, config.training.accumulation_steps
    while batch // 2 >= unit:
        batch //= 2
        memory = compiled(config, batch)
        found.append(Advice(f"batch_per_core={batch}", memory.total, total - memory.total, memory.fits, True))
        total = memory.total
        if memory.fits:
            break
    return found
