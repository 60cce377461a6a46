"""Asks the real TPU compiler, on a machine without a TPU, whether a training step fits and what it costs.

Examples:
  python -m vit_tpu.plan --config=experiments/vit_G14_jft.yaml --chip=v3 --batch_per_core=32
      fits or not, and where every byte of HBM goes
  python -m vit_tpu.plan --config=experiments/vit_g14_jft.yaml --chip=v3,v4,v5e --batch_per_core=auto
      the largest batch that fits on each chip
  python -m vit_tpu.plan --set model.variant=L/16 --compare pool=map,gap,tok --cycles
      one table, with the compiler's estimate of a step's time (minutes)
  python -m vit_tpu.plan --config=experiments/vit_G14_jft.yaml --mesh=data=8 --batch_per_core=32
  --compare shard=none,state,full
      eight cores: the step summed over them, the optimizer's state divided, the weights too
  python -m vit_tpu.plan --config=experiments/vit_G14_jft.yaml --optimizer=adamw --advice
      what to change until it fits, each change compiled

Nothing is trained, no weight is allocated and no data are read. Times are the compiler's estimates, not measured.
Needs the extra: pip install "vit_tpu[plan]".

Exit codes: 0 it fits (or a table was made), 1 it does not fit or the compiler failed, 2 wrong use.
"""

from __future__ import annotations

import sys
from typing import Any

from vit_tpu.command import check_file, execute, write_json

SHORTCUTS = {
    "model": ("model.variant", "shape and patch size, such as S/16 or G/14"),
    "pool": ("model.pool", "tok, gap or map"),
    "remat": ("model.remat", "none or block"),
    "optimizer": ("optimizer.name", "adamw, lamb, adafactor or sgd"),
    "precision": ("precision", "float32, mixed_bfloat16 or mixed_float16"),
    "accumulation_steps": ("training.accumulation_steps", "micro-batches a batch is cut into"),
    "mesh": ("mesh", "cores that one model copy is divided over, such as data=4,model=2"),
    "shard": ("shard", "none, state (moments, average, gradients) or full (weights too), over the mesh's data axis"),
}


# What is planned without --config: S/16 on 224 pixels and 1000 classes, as on a TPU.
PLAIN: dict[str, Any] = {
    "model": {"num_classes": 1000},
    "data": {"source": "synthetic", "classes": 1000},
    "training": {"epochs": 1},
    "precision": "mixed_bfloat16",
}


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments)


FLAGS: list[tuple[str, str, Any, str]] = [
    ("string", "config", None, "YAML file of an experiment; none for S/16, 224 pixels, 1000 classes, mixed_bfloat16"),
    ("multi_string", "set", [], "key=value for any key of the config"),
    *(("string", name, None, f"{text} ({key})") for name, (key, text) in SHORTCUTS.items()),
    ("string", "chip", "v3", "v2, v3 (default), v4, v5e, v5p, v6e or v7x; several with commas"),
    ("integer", "cores", None, "cores that train together; default those of --mesh or --data_parallel, or 1"),
    ("integer", "data_parallel", None, "parts of a batch, each on cores of its own: --mesh=data=N in a word"),
    ("string", "batch_per_core", None, "images a step on each core, or auto; default training.batch_size / cores"),
    ("multi_string", "compare", [], "key=a,b,c: one table over the values; of several keys, over every combination"),
    ("boolean", "cycles", False, "also the compiler's estimate of a step's time (minutes)"),
    ("boolean", "advice", False, "if it does not fit, try changes until it does"),
    ("string", "json", None, "also write everything to this file"),
    ("string", "png", None, "also draw the bars to this file"),
    ("float", "limit", 1800.0, "seconds after which a compilation is ended"),
]


def _define(flags: Any, values: Any) -> None:
    for kind, name, default, text in FLAGS:
        getattr(flags, f"DEFINE_{kind}")(name, default, text, flag_values=values)


def variations(texts: list[str]) -> list[list[str]]:
    """Returns the settings of every combination: ["pool=map,gap", "optimizer.name=lamb"] gives two lists of two.

    Values that are lists themselves keep their commas inside brackets ("model.image_size=[224,224],[192,256]").
    """
    import itertools
    import re

    from vit_tpu.errors import UserError

    groups = []
    for text in texts:
        key, equals, values = text.partition("=")
        parts = [part for part in re.split(r",(?![^\[]*\])", values) if part]
        if not equals or not parts:
            raise UserError(f'--compare "{text}" compares nothing: write key=a,b,c, such as pool=map,gap,tok')
        groups.append([f"{key.strip()}={part}" for part in parts])
    return [list(combination) for combination in itertools.product(*groups)]


def _config(path: str | None, overrides: list[str]) -> Any:
    """Returns the config of a file, or without one that of a plain ViT on ImageNet-sized images."""
    import yaml

    from vit_tpu import config as configs
    from vit_tpu.errors import UserError

    if path is not None:
        return configs.load_config(path, overrides)
    config = configs.from_dict(PLAIN)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f'"{text}" sets nothing: write key=value, such as optimizer.name=lamb')
        config = configs.replace(config, key.strip(), yaml.safe_load(value))
    return configs.validate(config)


def _cores(cores: int | None, parts: int | None, configs: list[Any]) -> int | None:
    """Returns on how many cores to plan; None for those of the mesh."""
    from vit_tpu.errors import UserError

    if parts is None:
        return cores
    if parts < 1:
        raise UserError(f"--data_parallel={parts} is not a positive whole number")
    if any(config.mesh is not None for config in configs):
        raise UserError("--data_parallel is the data axis of --mesh: give one of the two")
    if cores not in (None, parts):
        raise UserError(
            f"--data_parallel={parts} parts of a batch and --cores={cores} leave cores without a part: use "
            f"--data_parallel={cores}"
            + (f", or --mesh=data={parts},model={cores // parts}" if cores is not None and cores % parts == 0 else "")
        )
    return parts


def _run(values: Any) -> int:
    from vit_tpu.errors import UserError
    from vit_tpu.tpu import planner, show, topologies
    from vit_tpu.tpu.compiler import CompilerError

    chips = [topologies.chip(name.strip()).name for name in values.chip.split(",")]
    given = [
        *values.set,
        *(f"{key}={values[name].value}" for name, (key, _) in SHORTCUTS.items() if values[name].value is not None),
    ]
    combinations = variations(values.compare)
    # Every combination is checked before the first is compiled.
    configs = [_config(values.config, [*given, *settings]) for settings in combinations]
    several = len(configs) * len(chips) > 1
    if values.advice and several:
        raise UserError("--advice is for one plan: leave --compare and further chips away")
    cores = _cores(values.cores, values.data_parallel, configs)
    if values.limit <= 0:
        raise UserError(f"--limit={values.limit:g} leaves no time: give seconds, 1800 by default")
    for name in ("json", "png"):  # before the minutes of compiling
        check_file(name, values[name].value)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    options = planner.Options(values.cycles, values.advice, values.limit, say=say)
    plans, labels = [], []
    try:
        for settings, config in zip(combinations, configs):
            if settings:
                say(f"planning {', '.join(settings)}")
            plans += planner.make_plans(config, chips, cores, values.batch_per_core, options)
            labels += [[*settings, *([chip] if len(chips) > 1 or not settings else [])] for chip in chips]
    except CompilerError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(show.comparison(plans, labels) if several else str(plans[0]))
    if values.json:
        write_json(values.json, [p.to_dict() for p in plans] if several else plans[0].to_dict())
    if values.png:
        show.picture(plans, values.png, [", ".join(label) for label in labels] if several else None)
    return 0 if several or plans[0].fits else 1


if __name__ == "__main__":
    sys.exit(main())
