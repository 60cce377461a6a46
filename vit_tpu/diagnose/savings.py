"""What to change so that a step needs less memory: in the order of what a change costs, each with its saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

from vit_tpu import config as configs
from vit_tpu.diagnose.memory import Breakdown
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.tpu import advise

Measure = Callable[[Config], Breakdown]
WORTH_SAYING = 0.005  # share of the whole


@dataclasses.dataclass(frozen=True)
class Saving:
    """A change of the config: `change` as for --set, what it costs, its saving and what the step then needs (bytes)."""

    change: str
    costs: str
    saved: int
    total: int
    config: Config = dataclasses.field(repr=False, compare=False)


def changes(config: Config, fits: Callable[[Config], bool] = lambda config: False) -> Iterator[tuple[str, str, Config]]:
    """Yields (change, what it costs, changed config), the cheapest in speed and accuracy first.

    Args:
      config: every change is made to it alone.
      fits: whether a config is small enough; micro-batches and batches are cut until it says so, or at least once.
    """
    costs = {
        "precision": "half precision: faster on TPUs and GPUs that have it",
        "optimizer.momentum_dtype": "the first moment is rounded",
        "model.remat": "a third more computing",
        "optimizer.name": "another optimizer: its learning rate has to be found anew",
        "model.scan": "slower to compile",
        "training.ema": "no averaged weights",
    }
    first: list[tuple[str, str, Config]] = []
    last: list[tuple[str, str, Config]] = []
    for told, changed in advise.changes(config):
        what = told.replace("=None", "=null").replace("=False", "=false").replace("=True", "=true")  # as YAML
        key = _key(what)
        if key in costs:  # what touches the result comes after what only costs time
            (last if key in ("optimizer.name", "training.ema") else first).append((what, costs[key], changed))
    yield from (row for row in first if not row[0].startswith("model.remat"))
    yield from _cut(config, "training.accumulation_steps", "more, smaller micro-batches: the same result", 2.0, fits)
    yield from (row for row in first if row[0].startswith("model.remat"))
    for shard in ("state", "full"):
        if config.mesh and shard != config.shard and config.shard != "full":
            yield f"shard={shard}", "more exchange between the cores", configs.replace(config, "shard", shard)
    yield from last
    yield from _cut(config, "training.batch_size", "another batch: learning rate and steps go with it", 0.5, fits)
    smaller = _smaller_image(config)
    if smaller:
        yield (f"model.image_size={smaller[0]}".replace(" ", ""), "less to see: accuracy falls", smaller[1])


def _cut(
    config: Config, key: str, costs: str, factor: float, fits: Callable[[Config], bool]
) -> Iterator[tuple[str, str, Config]]:
    value, least, first = configs.get(config, key), config.training.accumulation_steps, None
    while True:
        value = int(value * factor)
        if value < least or value > config.training.batch_size or (factor > 1 and config.training.batch_size % value):
            break
        cut = (f"{key}={value}", costs, configs.replace(config, key, value))
        first = first or cut
        if fits(cut[2]):
            first = cut
            break
    if first:  # where no cut is enough, the first shows the way
        yield first


def _smaller_image(config: Config) -> tuple[object, Config] | None:
    """Three quarters of the image's side, in whole patches."""
    from vit_tpu.models import variants

    m = config.model
    patch = m.patch_size or variants.variant(m.variant).patch_size
    sides = (m.image_size, m.image_size) if isinstance(m.image_size, int) else m.image_size
    found = tuple(int(side * 0.75) // patch * patch for side in sides)
    if min(found) < patch:
        return None
    value: object = found[0] if isinstance(m.image_size, int) else found
    return value, configs.replace(config, "model.image_size", value)


def alone(config: Config, measure: Measure, there: float | None = None) -> list[Saving]:
    """Returns each change that saves something, made alone.

    Args:
      config: that needs too much.
      measure: the breakdown of a config.
      there: bytes that there are, or None if unknown.
    """
    return list(_savings(config, measure, there))


def together(config: Config, measure: Measure, there: float) -> list[Saving]:
    """Returns the changes made one on top of the other until they are enough; [] if all of them are not."""
    found: list[Saving] = []
    while measure(config).total > there:
        seen = {_key(step.change) for step in found}
        step = next((s for s in _savings(config, measure, there, seen)), None)
        if step is None:
            return []
        found.append(step)
        config = step.config
    return found


def _savings(config: Config, measure: Measure, there: float | None, without: Collection[str] = ()) -> Iterator[Saving]:
    before = measure(config).total

    def total(changed: Config) -> int:
        try:
            configs.validate(changed)
            return measure(changed).total
        except UserError:  # a change that this config does not allow saves nothing
            return before

    enough = before / 2 if there is None else there
    for change, costs, changed in changes(config, lambda changed: total(changed) <= enough):
        needs = before if _key(change) in without else total(changed)
        if needs < before * (1 - WORTH_SAYING):
            yield Saving(change, costs, before - needs, needs, changed)


def _key(change: str) -> str:
    return change.partition("=")[0]
