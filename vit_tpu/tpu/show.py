"""Plans as tables and pictures."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from vit_tpu.settings import Config
from vit_tpu.tpu import report
from vit_tpu.tpu.result import Result

ESTIMATE = "compiler estimate, not measured"
COLORS = {
    "parameters": "#1b4f72",
    "optimizer": "#2e86c1",
    "ema": "#85c1e9",
    "accumulator": "#7d3c98",
    "gradients": "#c39bd3",
    "weight copies": "#f1948a",
    "activations": "#e67e22",
    "batch": "#27ae60",
    "other": "#7f8c8d",
    "padding": "#d5d8dc",
    "gaps": "#f2f3f4",
}


def gib(size: float) -> str:
    """Bytes in a unit that keeps three digits."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def table(plan: Result, buffers: int = 8) -> str:
    """Returns the terminal table of one plan."""
    m, c = plan.memory, plan.config
    cores = "one core" if plan.cores == 1 else f"each of {plan.cores} cores"
    of = f" of {gib(m.available)} ({100 * m.total / m.available:.1f} %)"
    lines = [
        f"vit_tpu plan: {c.model.variant}, pool {c.model.pool}, {plan.tokens} tokens, {plan.parameters / 1e6:,.1f} M "
        f"parameters, {c.precision}",
        f"  {', '.join([c.optimizer.name, *_settings(c)])}; {plan.batch_per_core} images a core, {plan.chip.name}",
        "",
        f"  {'FITS' if plan.fits else 'DOES NOT FIT'}: {gib(m.total)}{of} of HBM on {cores}",
    ]
    if plan.largest_batch:
        lines.append(f"  largest batch per core that fits: {plan.largest_batch}")
    elif plan.largest_batch is not None:
        lines.append("  not even the smallest batch fits")
    lines += ["", *_parts(m), "", "  largest arrays", *_buffers(m.buffers[:buffers])]
    if plan.layout:
        lines += ["", "  how weights and their state are divided", plan.layout]
    if plan.cycles is not None:
        lines += ["", *_cycles(plan)]
    if plan.advice:
        lines += ["", "  what would help, each one compiled"]
        for a in plan.advice:
            saves = f"saves {gib(a.saved)}" if a.saved > 0 else "saves nothing"
            lines.append(f"    {a.change:<44} {gib(a.total):>10}  {saves}{'  -> fits' if a.fits else ''}")
    lines += ["", "  " + by_whom(plan), *([f"  {plan.chip.note}"] if plan.chip.note else [])]
    return "\n".join(lines)


def _settings(c: Config) -> list[str]:
    t, m = c.training, c.model
    named = [
        (t.accumulation_steps > 1, f"{t.accumulation_steps} micro-batches"),
        (m.remat != "none", f"remat {m.remat}"),
        (m.scan, "scan"),
        (t.grad_clip_norm is not None, f"clip {t.grad_clip_norm or 0:g}"),
        (t.ema is not None, f"EMA {t.ema}"),
        (m.dropout > 0, f"dropout {m.dropout:g}"),
        (m.drop_path > 0, f"drop path {m.drop_path:g}"),
        (c.mesh is not None, f"mesh {c.mesh}, shard {c.shard}"),
    ]
    return [text for there, text in named if there]


def by_whom(*plans: Result) -> str:
    """One sentence: which compiler said it, for which chips."""
    v = plans[0].versions
    platforms = ", ".join(dict.fromkeys(p.versions.get("platform") or p.chip.name for p in plans))
    return (
        f"compiled for {platforms} by libtpu {v.get('libtpu')} (PJRT {v.get('pjrt') or '?'}) "
        f"from TensorFlow {v.get('tensorflow')}; no TPU was used"
    )


def _parts(m: report.Memory) -> list[str]:
    lines = []
    width = max(m.available, m.total)
    for part in report.PARTS:
        size = m.parts[part]
        if size >= 0.0005 * m.total or part in ("parameters", "optimizer", "activations"):
            bar = "#" * round(40 * size / width)
            lines.append(f"    {part:<14}{gib(size):>11} {100 * size / m.total:5.1f} %  {bar:<28} {report.WHAT[part]}")
    worst = sorted(m.padding.items(), key=lambda item: -item[1])[:2]
    named = ", ".join(f"{gib(size)} in {part}" for part, size in worst if size > 0.001 * m.total)
    if named:
        lines.append(f"    padding: {named}")
    return lines


def _buffers(buffers: Sequence[report.Buffer]) -> list[str]:
    lines = []
    for b in buffers:
        waste = f", {100 * (b.bytes - b.raw_bytes) / b.bytes:.0f} % padding" if b.bytes > 1.005 * b.raw_bytes else ""
        lines.append(f"    {gib(b.bytes):>10}  {b.part:<13} {report.bare_shape(b.shape):<28} {b.layer}{waste}")
    return lines


def _cycles(plan: Result) -> list[str]:
    c = plan.cycles
    assert c is not None
    lines = [
        f"  step {1e3 * c.seconds:,.1f} ms at {plan.chip.clock_hz / 1e6:.0f} MHz, {c.images_per_second:,.0f} images/s "
        f"a core, MFU {100 * c.mfu:.1f} %, {c.total / 1e6:,.1f} million cycles ({ESTIMATE})",
    ]
    if plan.cores > 1:
        lines.append("  transfers between cores are not in the estimate")
    lines += [
        f"    {kind:<14}{cycles / 1e6:>10,.1f} M {100 * cycles / c.total:5.1f} %" for kind, cycles in c.by_kind.items()
    ]
    lines.append("  costliest operations, blocks summed up")
    for row in c.costliest[:10]:
        what = f"{row['runs']:>4} x {row['opcode']:<12} {row['shape'][:36]:<37} {row['layer']}"
        lines.append(f"    {row['cycles'] / 1e6:>8,.2f} M  {what}")
    return lines


def comparison(plans: Sequence[Result], varied: Sequence[Sequence[str]]) -> str:
    """Returns one table of several plans.

    Args:
      varied: for each plan what makes it differ ("pool=map", "v3"); the first plan is the yardstick.
    """
    first = plans[0].memory.total
    labels = [", ".join(names) for names in varied]
    width = max(map(len, labels), default=8) + 2
    timed = any(p.cycles for p in plans)
    auto = any(p.largest_batch is not None for p in plans)
    head = f"{'':<{width}}{'HBM':>11}{'to first':>10}{'state':>11}{'activations':>13}{'padding':>11}  fits"
    head += "  largest batch" if auto else ""
    head += f"{'Mcycles':>11}{'ms':>9}{'img/s':>8}{'MFU':>7}" if timed else ""
    lines = [head]
    for label, p in zip(labels, plans):
        parts = p.memory.parts
        state = parts["parameters"] + parts["optimizer"] + parts["ema"]
        row = f"{label:<{width}}{gib(p.memory.total):>11}{100 * (p.memory.total / first - 1):>+9.1f}%{gib(state):>11}"
        row += f"{gib(parts['activations']):>13}{gib(parts['padding']):>11}  {'yes' if p.fits else 'NO':<4}"
        row += f"{p.largest_batch if p.largest_batch is not None else '':>15}" if auto else ""
        if p.cycles:
            c = p.cycles
            row += f"{c.total / 1e6:>11,.1f}{1e3 * c.seconds:>9,.1f}{c.images_per_second:>8,.0f}{100 * c.mfu:>6.1f}%"
        lines.append(row)
    if timed:
        lines.append(f"times: {ESTIMATE}")
    lines.append(by_whom(*plans))
    lines += sorted({f"{p.chip.name}: {p.chip.note}" for p in plans if p.chip.note})
    return "\n".join(lines)


def picture(plans: Sequence[Result], path: str | os.PathLike[str], labels: Sequence[str] | None = None) -> None:
    """Writes one stacked bar a plan, with the chip's limit as a line, to a PNG file.

    Where all plans are far below the limit, the axis ends with the bars and the limits are only written.
    """
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules and not os.environ.get("MPLBACKEND"):  # a notebook's choice stands
        matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(labels) if labels else [f"{p.config.model.variant}, {p.chip.name}" for p in plans]
    largest, limit = max(p.memory.total for p in plans), max(p.memory.available for p in plans)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    rows = list(range(len(plans)))
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(plans)), layout="constrained")
    left = [0.0] * len(plans)
    for part in report.PARTS:
        sizes = [p.memory.parts[part] / unit for p in plans]
        if max(sizes) > 0:
            edge: Any = {"edgecolor": "#aab7b8", "hatch": "//"} if part in ("padding", "gaps") else {}
            axes.barh(rows, sizes, left=left, color=COLORS[part], label=part, height=0.6, **edge)
        left = [a + b for a, b in zip(left, sizes)]
    whole = largest > 0.2 * limit
    for row, p in enumerate(plans):
        verdict = "fits" if p.fits else "does not fit"
        text = f" {gib(p.memory.total)} of {gib(p.memory.available)}, {verdict}"
        end = max(left[row], p.memory.available / unit) if whole else left[row]
        axes.text(end, row, text, va="center", fontsize=8)
        axes.plot([p.memory.available / unit] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1.5)
    axes.set_xlim(0, 1.4 * (max(largest, limit) if whole else largest) / unit)
    axes.set_xlabel(f"{name} of HBM on one core" + (" (black line: what the compiler grants)" if whole else ""))
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25 - 0.1 / len(plans)))
    head = plans[0]
    title = f"{head.batch_per_core} images a core, {head.config.precision}"
    axes.set_title(f"{title}; compiled by libtpu {head.versions.get('libtpu')}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
