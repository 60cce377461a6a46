"""Writes the tables of docs/sharding.md: what the TPU compiler says of a step divided over eight cores of a v3.

python benchmarks/sharding_tables.py            all rows (about six CPU minutes; answers are kept, see vit_tpu.plan)
python benchmarks/sharding_tables.py L/16       the rows of one model, printed and not written
"""

from __future__ import annotations

import pathlib
import re
import sys

from vit_tpu import config as configs
from vit_tpu.settings import Config
from vit_tpu.tpu import show
from vit_tpu.tpu.compiler import CompilerError
from vit_tpu.tpu.planner import Options, Plan, make_plans

TARGET = pathlib.Path(__file__).resolve().parents[1] / "docs" / "sharding.md"
MODELS = ("L/16", "g/14", "G/14")
OPTIMIZERS = ("adafactor", "adamw")
MESHES = (("data=8", "none"), ("data=8", "state"), ("data=8", "full"), ("data=4,model=2", "full"))
CORES, BATCH = 8, 32
PARTS = ("parameters", "optimizer", "gradients", "weight copies", "activations")


def config(model: str, optimizer: str, mesh: str, shard: str) -> Config:
    return configs.from_dict({
        "model": {"variant": model, "num_classes": 1000, "pool": "map", "scan": True},
        "data": {"source": "synthetic", "classes": 1000},
        "optimizer": {"name": optimizer},
        "training": {"steps": 1000, "batch_size": CORES * BATCH},
        "precision": "mixed_bfloat16", "mesh": mesh, "shard": shard,
    })  # fmt: skip


def plan(*what: str) -> Plan | None:
    print("planning", *what, file=sys.stderr, flush=True)
    try:
        found = make_plans(config(*what), ["v3"], CORES, BATCH, Options())[0]
    except CompilerError as error:
        print(f"  {error}", file=sys.stderr, flush=True)
        return None
    print(f"  {show.gib(found.memory.total)}, {found.seconds:.0f} CPU s", file=sys.stderr, flush=True)
    return found


def row(optimizer: str, mesh: str, shard: str, found: Plan | None) -> str:
    name = [optimizer, mesh, shard]
    if found is None:
        return "| " + " | ".join([*name, "the compiler failed", *[""] * (len(PARTS) + 1)]) + " |"
    m = found.memory
    rest = m.total - sum(m.parts[part] for part in PARTS)
    total = f"**{show.gib(m.total)}**{'' if m.fits else ' does not fit'}"
    return "| " + " | ".join([*name, total, *(show.gib(m.parts[part]) for part in PARTS), show.gib(rest)]) + " |"


def table(model: str) -> str:
    head = ["optimizer", "mesh", "shard", "a core", *PARTS, "batch, padding, gaps"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    size = 0
    for optimizer in OPTIMIZERS:
        for mesh, shard in MESHES:
            found = plan(model, optimizer, mesh, shard)
            size = found.parameters if found is not None else size
            lines.append(row(optimizer, mesh, shard, found))
    return f"**{model}**, {size / 1e6:,.0f} million parameters\n\n" + "\n".join(lines) + "\n"


def main(models: list[str]) -> None:
    tables = "\n".join(table(model) for model in models or MODELS)
    if models:
        print(tables)
        return
    text = TARGET.read_text()
    new = re.sub(r"(<!-- tables -->\n).*(<!-- end of tables -->)", lambda m: f"{m[1]}{tables}{m[2]}", text, flags=re.S)
    TARGET.write_text(new)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main(sys.argv[1:])
