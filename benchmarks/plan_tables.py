"""Writes docs/memory.md: what the TPU compiler says of this package's own training step.

  python benchmarks/plan_tables.py                              memory of all tables (about ten CPU minutes)
  python benchmarks/plan_tables.py --giants=v3,v4,v5e           also ViT-G/14 and g/14 on these chips (five more,
                                                              four of them for the unrolled ones on v3)
  python benchmarks/plan_tables.py --cycles=tokens,optimizers   estimated step times in these tables (a minute or two
                                                                of CPU a row)

Answers are kept in the user's cache folder, so a second run takes seconds. The text between the tables is in this
script; each verdict begins with a word that the figures decide.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from vit_tpu import config as configs
from vit_tpu.settings import Config
from vit_tpu.tpu import show
from vit_tpu.tpu.planner import Options, Plan, make_plans

ROOT = pathlib.Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "memory.md"
BASE = {
    "model": {"variant": "B/16", "num_classes": 1000, "pool": "gap"},
    "data": {"source": "synthetic", "classes": 1000},
    "optimizer": {"name": "adamw"},
    "training": {"steps": 1000, "batch_size": 64},
    "precision": "mixed_bfloat16",
}
Verdicts = list[list[str]]  # claim, figures, verdict


def config(**changes: object) -> Config:
    found = configs.from_dict(BASE)
    for key, value in changes.items():
        found = configs.replace(found, key.replace("__", "."), value)
    return found


def plan(cycles: bool, **changes: object) -> Plan:
    print("planning", "with cycles" if cycles else "", changes, file=sys.stderr, flush=True)
    return make_plans(config(**changes), ["v3"], 1, 64, Options(cycles))[0]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"


def temporary(p: Plan) -> int:
    return p.memory.total - sum(p.memory.parts[name] for name in ("parameters", "optimizer", "ema", "batch"))


def more(new: float, old: float) -> str:
    return f"{100 * (new / old - 1):+.1f} %"


def figures(p: Plan, first: Plan) -> list[str]:
    kept = temporary(p)
    row = [show.gib(p.memory.total), show.gib(kept), more(kept, temporary(first)), show.gib(p.memory.parts["padding"])]
    row.append(more(p.forward_flops, first.forward_flops))
    if p.cycles and first.cycles:
        row += [f"{1e3 * p.cycles.seconds:,.1f}", more(p.cycles.total, first.cycles.total)]
        row.append(f"{100 * p.cycles.mfu:.1f} %")
    return row


def compared(cycles: bool, named: list[tuple[str, dict]]) -> tuple[str, list[Plan]]:
    plans = [plan(cycles, **changes) for _, changes in named]
    head = ["", "HBM", "temporary", "against the first", "padding", "FLOPs"]
    head += ["estimated ms a step", "against the first", "MFU"] if cycles else []
    rows = [[name, *figures(p, plans[0])] for (name, _), p in zip(named, plans)]
    return table(head, rows), plans


def judged(found: float, claimed: float) -> str:
    """The first word of a verdict on "costs (or saves) `claimed` more"."""
    share = found / claimed
    return "True" if share > 0.8 else "Partly true" if share > 0.3 else "No"


def growth(new: Plan, old: Plan) -> float:
    """By how much temporary memory grows, or time where that is known and grows more."""
    found = temporary(new) / temporary(old) - 1
    return max(found, new.cycles.total / old.cycles.total - 1) if new.cycles and old.cycles else found


def compare_words(new: Plan, old: Plan) -> str:
    """What changes from one plan to another: "+32.9 % temporary memory, +14.6 % time"."""
    words = f"{more(temporary(new), temporary(old))} temporary memory"
    if new.cycles and old.cycles:
        words += f", {more(new.cycles.total, old.cycles.total)} time"
    return words


def tokens(cycles: bool) -> tuple[str, Verdicts]:
    at14, p14 = compared(cycles, [
        ("patch 14, gap, 256 tokens", {"model__variant": "B/14"}),
        ("patch 14, class token, 257", {"model__variant": "B/14", "model__pool": "tok"}),
        ("patch 14, map, 256", {"model__variant": "B/14", "model__pool": "map"}),
    ])  # fmt: skip
    at16, p16 = compared(cycles, [
        ("patch 16, gap, 196 tokens", {}),
        ("patch 16, class token, 197", {"model__pool": "tok"}),
        ("patch 16, map, 196", {"model__pool": "map"}),
        ("patch 16, gap, 192 (192 x 256 pixels)", {"model__image_size": [192, 256]}),
    ])  # fmt: skip
    text = (
        "## The class token, pooling heads and the number of tokens\n\nViT-B, 64 images, AdamW, nothing rematerialised."
        " Tiles are 128 wide: 256 tokens fill two of them, 257 need a third; 196 and 197 both need two.\n\n"
        f"{at14}\n{at16}"
    )
    verdicts = [
        [
            "The class token costs up to 50 % in padding (arXiv 2106.04560, section 3.2).",
            f"256 to 257 tokens: {compare_words(p14[1], p14[0])}; 196 to 197: {compare_words(p16[1], p16[0])}.",
            f"{judged(growth(p14[1], p14[0]), 0.5)}, where a tile's edge is crossed: the attention maps and what else "
            "has tokens in its lanes grow by half, the rest does not. Elsewhere: "
            f"{judged(growth(p16[1], p16[0]), 0.5).lower()}.",
        ],
        [
            "MAP pooling costs 32 %.",
            f"patch 14: {compare_words(p14[2], p14[0])}; patch 16: {compare_words(p16[2], p16[0])}.",
            f"{judged(growth(p14[2], p14[0]), 0.32)}, as it is computed here: with one query the key and value "
            "projections fold into the probe and the output, so that no key or value of every token exists.",
        ],
        [
            "192 tokens instead of 196 save the padding (a quarter of the lanes).",
            f"{compare_words(p16[3], p16[0])} for {more(p16[3].forward_flops, p16[0].forward_flops)} FLOPs.",
            f"{judged(-growth(p16[3], p16[0]), 0.25)}: both need two tiles of 128, so it saves little more than its "
            "FLOPs.",
        ],
    ]
    return text, verdicts


def optimizers(cycles: bool) -> tuple[str, Verdicts]:
    rows, plans = [], {}
    for name in ("sgd", "adafactor", "adamw", "lamb"):
        p = plans[name] = plan(cycles, optimizer__name=name)
        state = p.memory.parts["optimizer"]
        row = [name, show.gib(p.memory.total), show.gib(state), f"{state / p.memory.parts['parameters']:.3f}"]
        if p.cycles:
            row += [f"{p.cycles.by_kind.get('optimizer', 0) / 1e6:,.2f}", f"{1e3 * p.cycles.seconds:,.1f}"]
        rows.append(row)
    head = ["", "HBM", "state", "of the weights", *(["Mcycles of the update", "estimated ms a step"] if cycles else [])]
    text = "## Optimizers\n\nViT-B/16, 64 images. State is what the optimizer keeps besides the weights.\n\n"
    lamb, adam = plans["lamb"], plans["adamw"]
    found = f"{more(lamb.memory.total, adam.memory.total)} HBM"
    if lamb.cycles and adam.cycles:
        found += f", {more(lamb.cycles.total, adam.cycles.total)} time"
    dearer = growth(lamb, adam)
    why = "it keeps the same two moments; the norms of its trust ratios are sums over arrays that are read anyway."
    return text + table(head, rows), [["LAMB costs 30 % more than Adam.", found + ".", f"{judged(dearer, 0.3)}: {why}"]]


def shapes(cycles: bool) -> tuple[str, Verdicts]:
    body, p = compared(cycles, [
        ("width 768, 12 heads of 64", {}),
        ("6 heads of 128", {"model__num_heads": 6}),
        ("16 heads of 48", {"model__num_heads": 16}),
        ("width 576 (-25 %), 9 heads", _width(576, 9)),
        ("width 704, not a multiple of 128, 11 heads", _width(704, 11)),
        ("width 640, a multiple of 128, 10 heads", _width(640, 10)),
        ("two blocks fewer", {"model__depth": 10}),
    ])  # fmt: skip
    text = "## Widths, heads and depth\n\nViT-B/16, 64 images, AdamW.\n\n" + body
    each = [temporary(p[i]) / w for i, w in ((5, 640), (4, 704), (0, 768))]
    verdict = [
        "Widths should be multiples of 128 (704 channels fill 768 lanes, 9 % more).",
        f"temporary memory for each channel, width 640, 704, 768: {each[0] / each[2]:.3f}, {each[1] / each[2]:.3f}, 1.",
        f"{judged(each[1] / each[0] - 1, 0.09)}, in memory. What counts is the size of a head: fewer, wider heads keep "
        f"fewer attention maps ({more(temporary(p[1]), temporary(p[0]))} for 6 heads of 128).",
    ]
    return text, [verdict]


def _width(width: int, heads: int) -> dict[str, object]:
    return {"model__width": width, "model__mlp_dim": 4 * width, "model__num_heads": heads}


def memory_savers(cycles: bool) -> tuple[str, Verdicts]:
    body, _ = compared(cycles, [
        ("nothing", {}),
        ("remat=block", {"model__remat": "block"}),
        ("scan", {"model__scan": True}),
        ("4 micro-batches", {"training__accumulation_steps": 4}),
        ("EMA", {"training__ema": 0.9999}),
        ("dropout 0.1", {"model__dropout": 0.1}),
    ])  # fmt: skip
    return "## Rematerialisation, accumulation, averaging\n\nViT-B/16, 64 images, AdamW.\n\n" + body, []


def giants(chips: list[str]) -> tuple[str, Verdicts]:
    rows, found = [], {}
    for name in ("g14", "G14"):
        path = ROOT / "experiments" / f"vit_{name}_jft.yaml"
        adam = {"optimizer.name": "adamw", "optimizer.momentum_dtype": None, "optimizer.beta2_cap": None}
        looped = {"model.scan": True, "model.remat": "none"}
        unrolled = {"model.scan": False, "model.remat": "block"}
        for label, changes, where in (
            ("Adafactor, scan", looped, ["v3", *(chip for chip in chips if chip != "v3")]),
            ("Adafactor, remat=block", unrolled, ["v3"]),
            ("AdamW in float32, scan", {**adam, **looped}, ["v3"]),
        ):
            print("planning", name, label, file=sys.stderr, flush=True)
            for p in make_plans(configs.load_config(path, changes), where, 1, 32):
                rows.append([p.config.model.variant, label, p.chip.name, *_giant(p)])
                found[name, label, p.chip.name] = p
    head = ["model", "optimizer", "chip", "HBM", "available", "fits", "weights", "state", "gradients", "activations"]
    text = (
        "## ViT-g/14 and ViT-G/14 on one core\n\n32 images a core, 224 pixels, the recipe of arXiv 2106.04560: MAP, "
        "29 593 classes, sigmoid loss, float32 weights, Adafactor with bfloat16 momentum, clipping at norm 1.\n\n"
        + table([*head, "padding"], rows)
        + "\nLoops over stacked blocks (`scan`) are traced and compiled in a tenth of the time. There are four: the "
        "inputs of the later blocks go before the gradients of the earlier ones come.\n"
    )
    big, adam_ = found["G14", "Adafactor, scan", "v3"], found["G14", "AdamW in float32, scan", "v3"]
    small = found["g14", "Adafactor, scan", "v3"]
    verdict = [
        "ViT-g/14 and G/14 train on single v3 cores with data parallelism alone (arXiv 2106.04560, section 3.4).",
        f"of {show.gib(big.memory.available)}: g/14 {show.gib(small.memory.total)}, G/14 {show.gib(big.memory.total)}; "
        f"G/14 with AdamW {show.gib(adam_.memory.total)}.",
        "True with this optimizer." if big.fits and small.fits and not adam_.fits else "Not with this version.",
    ]
    return text, [verdict]


def _giant(p: Plan) -> list[str]:
    m = p.memory
    parts = [show.gib(m.parts[n]) for n in ("parameters", "optimizer", "gradients", "activations", "padding")]
    return [show.gib(m.total), show.gib(m.available), "yes" if m.fits else "**no**", *parts]


def peers(paths: list[str]) -> str:
    """What `benchmarks/tpu_step.py --json` found for other implementations of the same step."""
    text = "## Beside other implementations\n\nThe same model, batch and optimizer (Adam, GAP, nothing rematerialised)"
    text += ", by `python benchmarks/tpu_step.py`.\n\n"
    rows = []
    for path in paths:
        found = json.loads(pathlib.Path(path).read_text())
        where = f"{found['model']}, {found['batch']} images, {found['chip']}"
        for name, row in found["rows"].items():
            c = row["cycles"] or {"seconds": 0.0, "mfu": 0.0}
            timed = [f"{1e3 * c['seconds']:,.1f}", f"{100 * c['mfu']:.1f} %"]
            rows.append([where, "**vit_tpu**" if name == "ours" else name, f"{row['total'] / 2**20:,.0f} MiB", *timed])
    return text + table(["", "step", "HBM", "estimated ms a step", "MFU"], rows)


MADE = {"tokens": tokens, "optimizers": optimizers, "shapes": shapes, "memory_savers": memory_savers}
INTRO = """# What a training step needs, according to the TPU compiler

libtpu, the compiler of Cloud TPUs, compiles for every generation on a machine that has none. The figures here are its
own for this package's training step: bytes are what it allocates in the memory (HBM) of one core, times are its
**estimate, not measured**. {by}.

Ask for your own configuration:

```
pip install "vit_tpu[plan]"
python -m vit_tpu.plan --config=experiments/vit_G14_jft.yaml --chip=v3 --batch_per_core=32
python -m vit_tpu.plan --model=B/16 --compare pool=map,gap,tok --cycles
```

This page is written by `python benchmarks/plan_tables.py{flags}`.
"""
READING = """## How to read the tables

- One v3 core, `mixed_bfloat16`, 224 pixels, 1000 classes, unless a table says otherwise.
- *Temporary* is everything besides weights, optimizer state and the batch: activations, gradients, padding.
- *Padding* are the bytes that tiles of 8 x 128 (16 x 128 in bfloat16) add to arrays whose last two axes do not fill
  them.
- *FLOPs* are the model's, forward; *MFU* is three times those over what the core's matrix units could do in the time.
- TensorFlow lowered the step with its CPU kernels, which can differ from a TPU's in random numbers; a TPU runtime of
  another version may need more or less; transfers between cores and the input pipeline are not in the times.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--giants", default="", help="chips for ViT-g/14 and G/14; v3 is among them")
    parser.add_argument("--cycles", default="", help="sections with step times: " + ",".join(MADE))
    parser.add_argument("--only", default=",".join(MADE), help="sections to write")
    parser.add_argument("--peers", default="", help="files that benchmarks/tpu_step.py --json wrote")
    parser.add_argument("--output", default=str(TARGET))
    args = parser.parse_args()
    timed = args.cycles.split(",")
    made = [MADE[name](name in timed) for name in args.only.split(",") if name]
    made += [giants(args.giants.split(","))] if args.giants else []
    verdicts = [row for _, rows in made for row in rows]
    given = {"giants": args.giants, "cycles": args.cycles, "only": "" if args.only == ",".join(MADE) else args.only}
    given["peers"] = ",".join(pathlib.Path(path).name for path in args.peers.split(",") if path)
    flags = "".join(f" --{name}={value}" for name, value in given.items() if value)
    by = show.by_whom(plan(False))
    parts = [INTRO.format(by=by[0].upper() + by[1:], flags=flags)]
    if verdicts:
        parts.append("## Often-heard claims, checked\n\n" + table(["claim", "the compiler", "verdict"], verdicts))
    parts += [READING, *(text for text, _ in made), *([peers(args.peers.split(","))] if args.peers else [])]
    pathlib.Path(args.output).write_text("\n".join(parts))


if __name__ == "__main__":
    main()
