"""What a design decision saves or costs on a TPU: a table of planned memory and estimated speed for docs/recipes.md.

  python benchmarks/trade_off.py                     v3 and v5e, with step times of v3: about ten CPU minutes
  python benchmarks/trade_off.py --cycles=           memory alone: two minutes
  python benchmarks/trade_off.py --depth=12          all blocks of a B-sized model: longer

The baseline has a class token and heads of a width that 12, 16 and 20 of them divide (960, between B and L), so that
nothing but the number of heads changes. Figures are the TPU compiler's; no TPU is used. The page is written after every
row and names the rows that are missing; answers are kept in the user's cache folder, so that the same command goes on.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator

from vit_tpu import config as configs
from vit_tpu.tpu import show
from vit_tpu.tpu.planner import Options, Plan, make_plans

TARGET = pathlib.Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- trade-off: python benchmarks/trade_off.py -->", "<!-- end of the trade-off -->"
BATCH = 64


def base(depth: int) -> dict:
    return {
        "model": {"variant": "B/16", "num_classes": 1000, "pool": "tok", "width": 960, "depth": depth,
                  "mlp_dim": 3840, "num_heads": 16},
        "data": {"source": "synthetic", "classes": 1000},
        "optimizer": {"name": "adamw"},
        "training": {"steps": 1000, "batch_size": BATCH},
        "precision": "mixed_bfloat16",
    }  # fmt: skip


def rows(depth: int) -> dict[str, dict]:
    """Name -> what differs from the baseline."""
    return {
        f"baseline: {depth} blocks, width 960, 16 heads, class token, 197 tokens": {},
        "two blocks fewer": {"model.depth": depth - 2},
        "width 720 (-25 %), 12 heads": {"model.width": 720, "model.mlp_dim": 2880, "model.num_heads": 12},
        "MAP for the class token, 196 tokens": {"model.pool": "map"},
        "mean for the class token, 196 tokens": {"model.pool": "gap"},
        "12 heads of 80": {"model.num_heads": 12},
        "20 heads of 48": {"model.num_heads": 20},
        "192 tokens (192 x 256 pixels), mean": {"model.pool": "gap", "model.image_size": [192, 256]},
    }


def plans(depth: int, changes: dict, chips: list[str], cycles: bool) -> dict[str, Plan]:
    if not chips:
        return {}
    config = configs.from_dict(base(depth))
    for key, value in changes.items():
        config = configs.replace(config, key, value)
    print(f"planning {chips} {changes}{' with cycles' if cycles else ''}", file=sys.stderr, flush=True)
    return dict(zip(chips, make_plans(config, chips, 1, BATCH, Options(cycles))))


def against(new: float, old: float) -> str:
    return f"{100 * (new / old - 1):+.1f} %"


def tables(chips: list[str], timed: list[str], depth: int) -> Iterator[str]:
    """Gives the table as Markdown after every row."""
    head = ["", "parameters", "FLOPs"]
    head += [cell for chip in chips for cell in (f"{chip}: HBM", "")]
    head += [cell for chip in timed for cell in (f"{chip}: estimated images/s a core", "", "MFU")]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    first: dict[str, Plan] = {}
    for name, changes in rows(depth).items():
        found = plans(depth, changes, [chip for chip in chips if chip not in timed], False)
        found |= plans(depth, changes, timed, True)
        first = first or found
        any_ = found[(chips or timed)[0]]
        start = first[(chips or timed)[0]]
        cells = [name, f"{any_.parameters / 1e6:.1f} M", against(any_.forward_flops, start.forward_flops)]
        for chip in chips:
            total = found[chip].memory.total
            cells += [show.gib(total), against(total, first[chip].memory.total)]
        for chip in timed:
            cost, was = found[chip].cycles, first[chip].cycles
            cells += [f"{BATCH / cost.seconds:,.0f}", against(was.seconds, cost.seconds), f"{100 * cost.mfu:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        missing = list(rows(depth))[len(lines) - 2 :]
        yield "\n".join(lines) + (f"\n\nNot planned yet: {'; '.join(missing)}." if missing else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="v3,v5e", help="generations whose memory is planned")
    parser.add_argument("--cycles", default="v3", help="generations whose step time is estimated; empty for none")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--print", action="store_true", help="write no page")
    args = parser.parse_args()
    chips, timed = ([name for name in text.split(",") if name] for text in (args.chips, args.cycles))
    for made in tables(chips, timed, args.depth):
        if not args.print:
            before, _, rest = TARGET.read_text().partition(BEGIN)
            TARGET.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
