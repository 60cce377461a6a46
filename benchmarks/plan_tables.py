"""Writes the tables of docs/memory.md: what the TPU compiler says of this package's own training step.

  python benchmarks/plan_tables.py                       the tables that take minutes
  python benchmarks/plan_tables.py --giants              also ViT-G/14 and g/14 for three chips (about 20 CPU minutes)
  python benchmarks/plan_tables.py --cycles              also estimated step times (tens of CPU minutes)

Answers are kept in the user's cache folder, so a second run takes seconds. The text between the tables is in this
script: the verdicts are formatted from the figures and cannot go stale.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from vit_tpu import config as configs
from vit_tpu.settings import Config
from vit_tpu.tpu import show
from vit_tpu.tpu.planner import Plan, make_plans

ROOT = pathlib.Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "memory.md"
BASE = {
    "model": {"variant": "B/16", "num_classes": 1000, "pool": "gap"},
    "data": {"source": "synthetic", "classes": 1000},
    "optimizer": {"name": "adamw"},
    "training": {"steps": 1000, "batch_size": 64},
    "precision": "mixed_bfloat16",
}


def config(**changes: object) -> Config:
    found = configs.from_dict(BASE)
    for key, value in changes.items():
        found = configs.replace(found, key.replace("__", "."), value)
    return found


def plan(cycles: bool, chip: str = "v3", batch: int | str = 64, **changes: object) -> Plan:
    print("planning", chip, batch, changes, file=sys.stderr, flush=True)
    return make_plans(config(**changes), [chip], batch_per_core=batch, cycles=cycles)[0]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"


def figures(p: Plan, first: Plan) -> list[str]:
    parts = p.memory.parts
    temporary, before = _temporary(p), _temporary(first)
    row = [
        show.gib(p.memory.total),
        show.gib(temporary),
        f"{100 * (temporary / before - 1):+.1f} %",
        show.gib(parts["padding"]),
    ]
    row.append(f"{100 * (p.forward_flops / first.forward_flops - 1):+.1f} %")
    if p.cycles:
        change = f" ({100 * (p.cycles.total / first.cycles.total - 1):+.1f} %)" if first.cycles else ""
        row += [f"{p.cycles.total / 1e6:,.1f}{change}", f"{1e3 * p.cycles.seconds:,.1f}", f"{100 * p.cycles.mfu:.1f} %"]
    return row


def compared(cycles: bool, named: list[tuple[str, dict]]) -> tuple[str, list[Plan]]:
    plans = [plan(cycles, **changes) for _, changes in named]
    head = ["", "HBM", "temporary", "against the first", "padding", "FLOPs"]
    head += ["Mcycles", "ms", "MFU"] if cycles else []
    rows = [[name, *figures(p, plans[0])] for (name, _), p in zip(named, plans)]
    return table(head, rows), plans


def tokens(cycles: bool) -> str:
    text = "## The class token, pooling heads and the number of tokens\n\n"
    text += "ViT-B, 64 images, one v3 core, AdamW, no remat.\n\n"
    at14, plans14 = compared(cycles, [
        ("patch 14, gap, 256 tokens", {"model__variant": "B/14"}),
        ("patch 14, class token, 257", {"model__variant": "B/14", "model__pool": "tok"}),
        ("patch 14, map, 256", {"model__variant": "B/14", "model__pool": "map"}),
    ])  # fmt: skip
    at16, plans16 = compared(cycles, [
        ("patch 16, gap, 196 tokens", {}),
        ("patch 16, class token, 197", {"model__pool": "tok"}),
        ("patch 16, map, 196", {"model__pool": "map"}),
        ("patch 16, gap, 192 (192 x 256 pixels)", {"model__image_size": [192, 256]}),
    ])  # fmt: skip
    token14, token16 = (_temporary(p[1]) / _temporary(p[0]) - 1 for p in (plans14, plans16))
    map14 = _temporary(plans14[2]) / _temporary(plans14[0]) - 1
    fewer = _temporary(plans16[3]) / _temporary(plans16[0]) - 1
    text += at14 + "\n" + at16 + "\n"
    text += f'- "The class token wastes 50 % in padding": {100 * token14:+.1f} % of the temporary memory where it '
    text += "crosses a "
    text += f"tile (256 to 257 tokens) and {100 * token16:+.1f} % where it does not (196 to 197).\n"
    text += (
        f'- "MAP costs 32 %": {100 * map14:+.1f} % here. With one query the key and value projections fold into the '
    )
    text += "probe, so no [B, N, D] key or value exists.\n"
    text += f'- "192 tokens instead of 196": {100 * fewer:+.1f} % of the temporary memory for 2 % fewer tokens.\n'
    return text


def _temporary(p: Plan) -> int:
    return p.memory.total - sum(p.memory.parts[name] for name in ("parameters", "optimizer", "ema", "batch"))


def optimizers(cycles: bool) -> str:
    text = (
        "## Optimizers\n\nViT-B/16, 64 images, one v3 core; state is what the optimizer keeps besides the weights.\n\n"
    )
    rows, plans = [], {}
    for name in ("sgd", "adafactor", "adamw", "lamb"):
        p = plans[name] = plan(cycles, optimizer__name=name)
        parts = p.memory.parts
        row = [
            name,
            show.gib(p.memory.total),
            show.gib(parts["optimizer"]),
            f"{parts['optimizer'] / parts['parameters']:.3f}",
        ]
        row += (
            [f"{p.cycles.by_kind.get('optimizer', 0) / 1e6:,.2f}", f"{p.cycles.total / 1e6:,.1f}"] if p.cycles else []
        )
        rows.append(row)
    head = ["optimizer", "HBM", "state", "of the weights", *(["Mcycles of the optimizer", "Mcycles"] if cycles else [])]
    lamb = plans["lamb"].memory.total / plans["adamw"].memory.total - 1
    text += table(head, rows) + f'\n- "LAMB costs 30 % more than Adam": {100 * lamb:+.1f} % of HBM'
    if plans["lamb"].cycles and plans["adamw"].cycles:
        text += f", {100 * (plans['lamb'].cycles.total / plans['adamw'].cycles.total - 1):+.1f} % of the cycles"
    return text + ".\n"


def shapes(cycles: bool) -> str:
    text = (
        "## Widths, heads and depth\n\nViT-B/16, 64 images, one v3 core, AdamW. The lanes of a tile are 128 wide.\n\n"
    )
    body, plans = compared(cycles, [
        ("width 768, 12 heads of 64", {}),
        ("6 heads of 128", {"model__num_heads": 6}),
        ("16 heads of 48", {"model__num_heads": 16}),
        ("width 576 (-25 %), 9 heads", _width(576, 9)),
        ("width 704, not a multiple of 128, 11 heads", _width(704, 11)),
        ("width 640, a multiple of 128, 10 heads", _width(640, 10)),
        ("two blocks fewer", {"model__depth": 10}),
    ])  # fmt: skip
    return text + body


def _width(width: int, heads: int) -> dict[str, object]:
    return {"model__width": width, "model__mlp_dim": 4 * width, "model__num_heads": heads}


def memory_savers(cycles: bool) -> str:
    text = "## Rematerialisation, accumulation, averaging\n\nViT-B/16, 64 images, one v3 core, AdamW.\n\n"
    body, _ = compared(cycles, [
        ("nothing", {}),
        ("remat=block", {"model__remat": "block"}),
        ("scan", {"model__scan": True}),
        ("4 micro-batches", {"training__accumulation_steps": 4}),
        ("EMA", {"training__ema": 0.9999}),
        ("dropout 0.1", {"model__dropout": 0.1}),
    ])  # fmt: skip
    return text + body


def giants() -> str:
    text = "## ViT-g/14 and ViT-G/14 on one core\n\n"
    text += "32 images a core, 224 pixels, the paper's recipe: MAP, 29 593 classes, sigmoid loss, "
    text += "float32 weights, Adafactor with bfloat16 momentum, clipping at 1.0, remat=block.\n\n"
    rows = []
    for name in ("g14", "G14"):
        path = ROOT / "experiments" / f"vit_{name}_jft.yaml"
        for p in make_plans(configs.load_config(path), ["v3", "v4", "v5e"], batch_per_core=32):
            rows.append([p.config.model.variant, "Adafactor", p.chip.name, *_giant(p)])
        adam = {
            "optimizer.name": "adamw",
            "optimizer.momentum_dtype": None,
            "optimizer.beta2_cap": None,
            "model.scan": True,
        }
        p = make_plans(configs.load_config(path, adam), ["v3"], batch_per_core=32)[0]
        rows.append([p.config.model.variant, "AdamW float32, scan", "v3", *_giant(p)])
    head = [
        "model",
        "optimizer",
        "chip",
        "HBM",
        "available",
        "fits",
        "weights",
        "state",
        "gradients",
        "activations",
        "padding",
    ]
    return text + table(head, rows)


def _giant(p: Plan) -> list[str]:
    m = p.memory
    names = ("parameters", "optimizer", "gradients", "activations", "padding")
    return [
        show.gib(m.total),
        show.gib(m.available),
        "yes" if m.fits else "**no**",
        *(show.gib(m.parts[n]) for n in names),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--giants", action="store_true")
    parser.add_argument("--cycles", action="store_true")
    parser.add_argument("--only", default="tokens,optimizers,shapes,memory_savers")
    parser.add_argument("--output", default=str(TARGET))
    args = parser.parse_args()
    made = {"tokens": tokens, "optimizers": optimizers, "shapes": shapes, "memory_savers": memory_savers}
    sections = [giants()] if args.giants else []
    sections += [made[name](args.cycles) for name in args.only.split(",") if name]
    by = show.by_whom(plan(False))
    intro = (
        "# What a training step needs, according to the TPU compiler\n\n"
        "Made by `python benchmarks/plan_tables.py`; nothing here is edited by hand. The figures are the compiler's "
        f"own for this package's training step ({by}): bytes are what it allocates on one core, cycles are its "
        "**estimate, not measured**. Ask for your own configuration with `python -m vit_tpu.plan`.\n\n"
        "\"Temporary\" is everything besides weights, optimizer state and the batch: activations, gradients, padding. "
        "Padding counts the bytes that tiles of 8 x 128 add to arrays whose last two axes do not fill them.\n\n"
        "Caveats: TensorFlow lowered the step with its CPU kernels, which can differ from the TPU's in random numbers; "
        "a TPU runtime of another version may need more or less; transfers between cores and the input pipeline are "
        "not in the cycles.\n"
    )  # fmt: skip
    pathlib.Path(args.output).write_text(intro + "\n" + "\n".join(sections))


if __name__ == "__main__":
    main()
