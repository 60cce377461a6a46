"""Out of memory, told: what was asked, what there is, the largest arrays by layer, and what to change."""

from __future__ import annotations

import functools

from vit_tpu.diagnose import memory, savings, shortage
from vit_tpu.diagnose.memory import Breakdown, size_text
from vit_tpu.settings import Config

HAS = {True: "this process may have", False: "the device has"}


def message(
    error: BaseException,
    config: Config,
    classes: int | None = None,
    channels: int | None = None,
    replicas: int = 1,
    hardware: str = "CPU",
    kept: str = "",
) -> str | None:
    """Returns the error told for a user, or None if it is not about memory.

    Args:
      error: as TensorFlow, XLA, NumPy or Python raised it.
      config: of the run.
      classes, channels: of its data.
      replicas: devices that share a batch.
      hardware: "CPU", "GPU" or "TPU": what it ran on.
      kept: one sentence on what was saved before.
    """
    found = shortage.read(error)
    if found is None:
        return None
    place = found.place or hardware
    there = found.there or shortage.of_device(place)
    measure = functools.partial(
        memory.breakdown, classes=classes, channels=channels, replicas=replicas, hardware=hardware
    )
    needs = measure(config)
    lines = [f"out of memory on the {'host' if place == 'CPU' else place}", f"  {_asked(found)}"]
    if there:
        lines[-1] += f"; {HAS[place == 'CPU']} {size_text(there)}"
    if found.free is not None:
        lines[-1] += f"; {size_text(found.free)} were free"
    lines += needed(needs)
    lines += advice(config, measure, found.program, there if place == hardware else None)
    return "\n".join([*lines, *([f"  {kept}"] if kept else [])])


def warning(
    config: Config, classes: int | None = None, channels: int | None = None, replicas: int = 1, hardware: str = "CPU"
) -> list[str]:
    """Returns lines that say that a step will hardly fit, with what to change; [] if it fits or nothing is known.

    A host that runs out of memory ends the process without a word, so that it has to be said before.
    """
    there = shortage.of_device(hardware)
    measure = functools.partial(
        memory.breakdown, classes=classes, channels=channels, replicas=replicas, hardware=hardware
    )
    needs = measure(config)
    whole = needs.total * (replicas if hardware == "CPU" else 1)  # CPU devices share the host's memory
    if there is None or whole <= there:
        return []
    what = f"{HAS[hardware == 'CPU']} {size_text(there)}"
    return [
        f"warning: a step needs about {size_text(whole)} (estimated), and {what}: it will run out of memory",
        *advice(config, measure, None, round(there * needs.total / whole)),
    ]


def _asked(found: shortage.Shortage) -> str:
    if found.program is not None:
        return f"the compiled step needs {size_text(found.program)}"
    if found.asked is None:
        return "an allocation failed; its size is not known"
    what = f" for {found.array}" if found.array else ""
    return f"asked: {size_text(found.asked)}{what}{f' in {found.layer}' if found.layer else ''}"


def needed(needs: Breakdown) -> list[str]:
    """Returns lines on what a step needs and on its largest arrays."""
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in needs.parts.items() if size)
    lines = [
        f"  a step needs about {size_text(needs.total)} on each device, without padding and TensorFlow itself "
        f"(estimated): {parts}",
        "  the largest arrays:",
    ]
    for layer, what, count, size in needs.largest():
        lines.append(f"    {size_text(count * size):>12}  {layer}: {f'{count} x ' if count > 1 else ''}{what}")
    return lines


def advice(config: Config, measure: savings.Measure, program: int | None = None, there: int | None = None) -> list[str]:
    """Returns lines on what to change, in order, each with its predicted saving.

    Args:
      config: that needs too much.
      measure: the breakdown of a config.
      program: bytes that the compiler says the step needs; the predictions are scaled to it.
      there: bytes that there are, or None if unknown.
    """
    before = measure(config).total
    scale = program / before if program else 1.0
    limit = there / scale if there and before > there / scale else None
    found = savings.alone(config, measure, limit)
    if not found:
        return ["  nothing in the config would save memory: a smaller model, or a larger device"]
    width = max(len(saving.change) for saving in found)
    lines = ["  what to change, what costs least first (--set KEY=VALUE; predicted, each alone):"]
    for saving in found:
        enough = ", enough" if limit is not None and saving.total <= limit else ""
        lines.append(
            f"    {saving.change:<{width}}  saves {size_text(scale * saving.saved):>10}, leaves "
            f"{size_text(scale * saving.total)}{enough}; {saving.costs}"
        )
    if limit is not None and not any(saving.total <= limit for saving in found[:1]):
        steps = savings.together(config, measure, limit)
        if len(steps) > 1:
            changes = " ".join(step.change for step in steps)
            lines.append(f"    together: {changes} leaves {size_text(scale * steps[-1].total)}, enough")
        elif not steps:
            lines.append("    all of these together are not enough: a smaller model, or more devices")
    return lines
