"""Reads a profiler trace through xprof and says the main thing: where the time went, and one advice."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from vit_tpu.errors import UserError

ENDING = ".xplane.pb"

# column of xprof's step table -> what it is called here
TIMES = {
    "deviceComputeTimeMs": "device compute",
    "deviceCollectivesTimeMs": "collectives",
    "deviceToDeviceTimeMs": "device to device",
    "hostComputeTimeMs": "host compute",
    "kernelLaunchTimeMs": "kernel launch",
    "infeedTimeMs": "waiting for input",
    "outfeedTimeMs": "output",
    "compileTimeMs": "compilation",
    "otherTimeMs": "other (Python, I/O)",
}
# The first that is part of an operation's name; our layers name their scopes so.
KINDS = ("softmax", "attention", "mlp", "norm", "embedding", "positions", "head", "map", "optimizer", "loss")
OPTIMIZERS = ("adamw", "lamb", "adafactor", "sgd", "lossscale")


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a trace says.

    Attributes:
      trace: its file.
      hardware: as xprof calls it.
      steps: executions with a step marker.
      step_ms: mean duration of one.
      times: mean milliseconds by what they were spent on; none that are zero.
      operations: (name, kind of operation, share of all operations' own time), the costliest first.
      layers: share of that time by kind of layer, the largest first; "other" is what no layer's name covers.
      memory: whether the trace has memory events of a device.
    """

    trace: str
    hardware: str
    steps: int
    step_ms: float
    times: dict[str, float]
    operations: list[tuple[str, str, float]]
    layers: dict[str, float]
    memory: bool

    def advice(self) -> str:
        """Returns the one thing to do first."""
        share = {name: time / self.step_ms for name, time in self.times.items()} if self.step_ms else {}
        if not self.steps:
            return (
                "the trace holds no step: record it with --profile=START,STOP, whose executions are marked, and let "
                "the window lie inside the run"
            )
        if share.get("compilation", 0) > 0.05:
            return "the window holds a compilation: let it start later, or look for changing shapes if it is late"
        waiting = share.get("waiting for input", 0)
        if waiting > 0.1:
            return (
                f"{waiting:.0%} of a step waits for input: data.cache, smaller files, fewer augmentations, more CPU "
                "cores, or --data_service"
            )
        if share.get("other (Python, I/O)", 0) > 0.2:
            return "much time between executions: raise training.steps_per_execution, log and save less often"
        if share.get("collectives", 0) > 0.2:
            return "much time in collectives: a larger batch per device, or accumulation_steps"
        if self.layers:
            kind = next((name for name in self.layers if name != "other"), None)
            if kind in ("norm", "softmax", "positions"):
                return f"{self.layers[kind]:.0%} of the time is {kind}, which moves memory: --jit fuses it"
            if kind:
                return (
                    f"compute-bound, most of it {kind} ({self.layers[kind]:.0%}): a lower precision or a smaller "
                    "model is what is left; for a TPU `python -m vit_tpu.plan --cycles` names the operations"
                )
        return "compute-bound: input and Python are not what to look at"

    def __str__(self) -> str:
        lines = [f"profile {self.trace} ({self.hardware})"]
        lines.append(f"  {self.steps} executions of {self.step_ms:,.1f} ms on average")
        for name, time in sorted(self.times.items(), key=lambda item: -item[1]):
            lines.append(f"    {name:<24}{time:>10,.1f} ms  {time / self.step_ms if self.step_ms else 0:>6.1%}")
        if self.layers:
            lines.append("  operations by layer: " + ", ".join(f"{k} {v:.0%}" for k, v in self.layers.items()))
        lines.append("  costliest operations")
        lines += [f"    {share:>6.1%}  {kind:<22} {name}" for name, kind, share in self.operations[:10]]
        if not self.memory:
            lines.append(
                "  no device memory events (CPUs have none): python -m vit_tpu.train --dry_run estimates the memory"
            )
        lines.append(f"advice: {self.advice()}")
        return "\n".join(lines)


def find_trace(folder: str | os.PathLike[str]) -> str:
    """Returns the newest trace in or below a run's folder, its logs, or a trace's own folder; or the trace given.

    Raises:
      UserError: there is none; says where one is expected.
    """
    root = os.fspath(folder)
    if root.endswith(ENDING) and ("://" in root or os.path.isfile(root)):
        return root
    if "://" in root:
        found = sorted(_in_store(root))  # the folders are named after the time
    else:
        found = sorted(map(str, pathlib.Path(root).rglob(f"*{ENDING}")), key=os.path.getmtime)
    if not found:
        raise UserError(
            f"{root} holds no trace (expected logs/plugins/profile/<time>/<host>.xplane.pb): record one with "
            "python -m vit_tpu.train --profile=START,STOP"
        )
    return found[-1]


def _in_store(root: str) -> Iterator[str]:
    """Yields the traces below a folder such as gs://bucket/run, without listing what else it holds."""
    from vit_tpu.training import storage  # TensorFlow's, which takes seconds to import

    for below in ("", "plugins/profile", "logs/plugins/profile"):
        place = storage.join(root, below) if below else root
        for name in storage.names(place):
            inner = storage.names(storage.join(place, name)) if below else []
            yield from (storage.join(place, part) for part in [name, *(f"{name}/{i}" for i in inner)]
                        if part.endswith(ENDING))  # fmt: skip


@contextlib.contextmanager
def _on_disk(trace: str) -> Iterator[str]:
    """Gives the path of a trace on this machine: xprof reads no store."""
    if "://" not in trace:
        yield trace
        return
    from vit_tpu.training import storage

    with tempfile.TemporaryDirectory() as place:
        copy = os.path.join(place, os.path.basename(trace))
        with storage.reading(trace) as source, open(copy, "wb") as target:
            target.write(source.read())
        yield copy


def read(folder: str | os.PathLike[str]) -> Profile:
    """Returns what the newest trace below `folder` says.

    Raises:
      UserError: no trace, no xprof, or a file that it cannot read.
    """
    trace = find_trace(folder)
    with _on_disk(trace) as copy:
        return _read(trace, copy)


def _read(trace: str, copy: str) -> Profile:
    try:
        from xprof.convert import raw_to_tool_data
    except ImportError:
        raise UserError("xprof is not installed: pip install tensorboard-plugin-profile") from None

    def table(tool: str) -> Any:
        try:
            data, _ = raw_to_tool_data.xspace_to_tool_data([copy], tool, {})
            return json.loads(data)
        except Exception as error:  # xprof's errors have no common type
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{trace} cannot be read by xprof ({reason}): record it again") from None

    overview = table("overview_page")
    empty: dict[str, Any] = {"cols": [], "rows": [], "p": {}}
    steps = next((part for part in overview if part["cols"] and part["cols"][0]["id"] == "stepnum"), empty)
    names = [column["id"] for column in steps["cols"]]
    rows = [[cell.get("v") for cell in row["c"]] for row in steps["rows"]]

    def mean(name: str) -> float:
        values = [float(row[names.index(name)]) for row in rows] if name in names else []
        return sum(values) / len(values) if values else 0.0

    times = {label: mean(column) for column, label in TIMES.items() if mean(column) > 0.005}
    operations, layers = _operations(table("framework_op_stats"))
    memory = any("HBM" in key or "gpu" in key.lower() for key in _allocators(table("memory_profile")))
    return Profile(
        trace=trace,
        hardware=steps["p"].get("hardware_type", "unknown"),
        steps=len(rows),
        step_ms=sum(times.values()),
        times=times,
        operations=operations,
        layers=layers,
        memory=memory,
    )


def _allocators(profile: Any) -> list[str]:
    return list(profile.get("memoryProfilePerAllocator", {})) if isinstance(profile, dict) else []


def _operations(tables: Any) -> tuple[list[tuple[str, str, float]], dict[str, float]]:
    """The costliest operations and the shares of layers, of the device if it has any, else of the host."""
    columns = [column["id"] for column in tables[0]["cols"]]
    rows = [dict(zip(columns, (cell.get("v") for cell in row["c"]))) for row in tables[0]["rows"]]
    rows = [row for row in rows if row["operation"] != "IDLE"]
    device = [row for row in rows if row["host_or_device"] == "Device"]
    rows = [row for row in device or rows if not _is_input(row)]
    total = sum(row["total_self_time"] for row in rows) or 1.0
    rows.sort(key=lambda row: -row["total_self_time"])
    layers: dict[str, float] = {}
    for row in rows:
        kind = kind_of(row["operation"])
        layers[kind] = layers.get(kind, 0.0) + row["total_self_time"] / total
    ordered = dict(sorted(layers.items(), key=lambda item: -item[1]))
    return [(row["operation"], row["type"], row["total_self_time"] / total) for row in rows], ordered


def _is_input(row: dict[str, Any]) -> bool:
    return "Iterator" in row["type"] or "Dataset" in row["type"]


def kind_of(operation: str) -> str:
    """Returns the kind of layer that an operation's name speaks of, "other" if of none."""
    parts = re.split(r"[/_.]", operation.lower())
    if any(part.startswith(OPTIMIZERS) for part in parts):
        return "optimizer"
    return next((kind for kind in KINDS if any(part.startswith(kind) for part in parts)), "other")
