"""What a run shows while it runs: a moving bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = ("loss", "accuracy", "learning_rate", "grad_norm")


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns "name  value" lines with the values under one another; later lines of a value are indented."""
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        first, *rest = value.split("\n")
        lines.append(f"  {name:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Returns "1:02:03" or "2:03"."""
    whole = max(round(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def figures(values: Mapping[str, Any], prefix: str = "") -> str:
    """Returns the metrics of a line, in a fixed order and precision; what has a "/" in its name is for TensorBoard."""
    values = {name: value for name, value in values.items() if "/" not in name}
    ordered = [name for name in SHOWN if name in values] + [name for name in values if name not in SHOWN]
    parts = []
    for name in ordered:
        value = values[name]
        if value is None:
            continue
        if name in ("accuracy", "top5"):
            text = f"{100 * value:.2f}%"
        elif name == "learning_rate":
            name, text = "lr", f"{value:.2e}"
        elif name == "mfu":
            parts.append(f"{100 * value:.1f}% of peak")
            continue
        elif name == "images_per_second":
            parts.append(f"{value:,.0f} img/s")
            continue
        else:
            text = f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
        parts.append(f"{prefix}{name} {text}")
    return "  ".join(parts)


class Progress:
    """Shows how far a run of `total` steps is.

    On a terminal one line moves; otherwise a line is printed about twenty times a run and at every validation.

    Args:
      total: steps of the run.
      done: steps already taken when it starts.
      stream: where to write; standard output if None.
    """

    def __init__(self, total: int, done: int = 0, stream: Any = None):
        self.total, self.printed = total, done
        self.stream = stream or sys.stdout
        self.bar: Any = None
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[text]}"))
            self.bar = RichProgress(*columns, console=Console(file=self.stream), transient=True)
            self.task = self.bar.add_task("compiling", total=total, completed=done, text="the first step takes longest")
            self.bar.start()
        else:
            self.say("compiling the step ...")

    def update(self, step: int, values: Mapping[str, Any], eta: float) -> None:
        text = f"{figures(values)}  ETA {duration(eta)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=f"step {step:,}/{self.total:,}", text=text)
        elif step - self.printed >= self.total / 20 or step == self.total:
            self.printed = step
            self.say(f"step {step:,}/{self.total:,} ({100 * step / self.total:.0f}%)  {text}")

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
