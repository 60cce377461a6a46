"""Looks for what will go wrong: the installation, the devices, a run that has not started, a trace.

Examples:
  python -m vit_tpu.doctor
      versions, devices and the precision they gain from, XLA, the clock
  python -m vit_tpu.doctor --config=experiments/cifar10.yaml --set data.path=DIR --workdir=runs/first
      also that run: records decoded, labels, batch arithmetic, shapes, memory, disk
  python -m vit_tpu.doctor --config=experiments/cifar10.yaml --set data.path=DIR --hardware=TPU --replicas=8
      as if it ran on eight TPU cores: which shapes are padded, by how much
  python -m vit_tpu.doctor --profile=runs/first
      where the time of a recorded trace went, and one advice
  python -m vit_tpu.doctor --memory --config=experiments/vit_G14_jft.yaml --set model.num_classes=1000 --hardware=TPU
      where the bytes of a step go and what would save some; nothing is built
  python -m vit_tpu.doctor --ranges --workdir=runs/first
      the numbers of a step layer by layer, and what float16 and bfloat16 would lose of them
  python -m vit_tpu.doctor --replay=runs/first
      a step whose loss or gradient was not finite, taken again layer by layer, in the run's precision and in float32

Exit codes: 0 nothing to fix, 1 something must be fixed, 2 wrong use.
"""

from __future__ import annotations

import sys
from typing import Any

from vit_tpu.command import check_file, execute, write_json
from vit_tpu.errors import UserError, nearest

HARDWARE = ("CPU", "GPU", "TPU")
# What each question takes besides --json; without one of them the installation, and a run if one is named, is examined.
QUESTIONS = {
    "profile": (), "replay": (), "memory": ("config", "set", "workdir", "hardware", "replicas"),
    "ranges": ("config", "set", "workdir"),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments)


def _define(flags: Any, values: Any) -> None:
    flags.DEFINE_string("config", None, "experiment to look at; none: the installation alone", flag_values=values)
    flags.DEFINE_multi_string("set", [], "key=value for any key of the config; may be repeated", flag_values=values)
    flags.DEFINE_string("workdir", None, "folder the run would have", flag_values=values)
    flags.DEFINE_string(
        "hardware", None, "CPU, GPU or TPU: check shapes for it; default: what is here", flag_values=values
    )
    flags.DEFINE_integer("replicas", None, "devices that share a batch; default: what is here", flag_values=values)
    flags.DEFINE_string("profile", None, "folder with a trace: read it instead", flag_values=values)
    flags.DEFINE_string("replay", None, "folder of a run that failed: take its bad step again", flag_values=values)
    flags.DEFINE_boolean("memory", False, "where the bytes of the run's step go, and what would save some",
                         flag_values=values)  # fmt: skip
    flags.DEFINE_boolean("ranges", False, "the numbers of the run's next step, layer by layer", flag_values=values)
    flags.DEFINE_string("json", None, "also write the findings to this file", flag_values=values)


def _run(values: Any) -> int:
    import dataclasses

    if values.hardware is not None and values.hardware not in HARDWARE:
        raise UserError(f"--hardware={values.hardware}{nearest(values.hardware, HARDWARE)}: use CPU, GPU or TPU")
    if values.replicas is not None and values.replicas < 1:
        raise UserError(f"--replicas={values.replicas}: give a number above 0")
    asked = [name for name in QUESTIONS if getattr(values, name)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} are two questions: ask one at a time")
    of_a_run = [name for name in ("config", "set", "workdir", "hardware", "replicas") if values[name].present]
    useless = [name for name in of_a_run if asked and name not in QUESTIONS[asked[0]]]
    if useless:
        raise UserError(f"--{asked[0]} has no use for --{useless[0]}: leave it out, or ask without --{asked[0]}")
    if of_a_run and not asked and not (values.config or values.set or values.workdir):
        raise UserError(f"--{of_a_run[0]} is about a run: name its --config, or settings with --set")
    check_file("json", values.json)
    if values.profile:
        from vit_tpu.diagnose import profile

        found = profile.read(values.profile)
        print(found)
        if values.json:
            write_json(values.json, dataclasses.asdict(found) | {"advice": found.advice()})
        return 0 if found.steps else 1
    if values.replay:
        from vit_tpu.diagnose import replay

        again = replay.replay(values.replay)
        print(again)
        if values.json:
            write_json(values.json, dataclasses.asdict(again))
        return 1 if again.run.culprit else 0
    if values.memory:
        return _memory(values)
    if values.ranges:
        return _ranges(values)
    from vit_tpu.diagnose import examine, findings

    config, overrides = _own(values) or values.config, values.set
    results = examine.examine(
        config, overrides, workdir=values.workdir, hardware=values.hardware, replicas=values.replicas
    )
    print(findings.report(results))
    if values.json:
        write_json(values.json, [dataclasses.asdict(finding) for finding in results])
    return 1 if findings.must_be_fixed(results) else 0


def _own(values: Any) -> Any:
    """Returns the config of the run that --workdir holds, or None if it holds none or another config is named."""
    import dataclasses

    from vit_tpu.evaluation import run_folder
    from vit_tpu.training import storage

    if not values.workdir or not storage.exists(storage.join(values.workdir, "config.yaml")):
        return None
    if values.config or values.set:
        return None
    return dataclasses.replace(run_folder.config_of(values.workdir), workdir=values.workdir)


def _memory(values: Any) -> int:
    from vit_tpu.config import load_config
    from vit_tpu.diagnose import examine, oom, savings

    config = _own(values) or load_config(values.config, values.set)
    found = examine.needs(config, values.hardware, values.replicas)
    print("\n".join([str(found.needs), *oom.needed(found.needs)[1:], *oom.advice(config, found.measure)]))
    if values.json:
        changes = [
            {"change": saving.change, "costs": saving.costs, "saved": saving.saved, "total": saving.total}
            for saving in savings.alone(config, found.measure)
        ]
        write_json(values.json, found.needs.to_dict() | {"changes": changes})
    return 0


def _ranges(values: Any) -> int:
    from vit_tpu.config import load_config
    from vit_tpu.diagnose import ranges

    own = _own(values)
    if values.workdir and (values.config or values.set):
        raise UserError(
            f"--workdir={values.workdir} is looked at with its own config and weights: leave --config and --set out"
        )
    if values.workdir and own is None:
        raise UserError(f"--workdir={values.workdir} holds no run; --config looks at one that has not begun")
    found = ranges.of_run(values.workdir) if own else ranges.of_config(load_config(values.config, values.set))
    print(found)
    if values.json:
        write_json(values.json, found.to_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
