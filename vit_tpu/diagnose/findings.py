"""What the doctor says: findings, each with its cure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

LEVELS = ("error", "warning", "note", "ok")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      level: "error" must be fixed, "warning" costs speed or accuracy, "note" is good to know, "ok" is healthy.
      topic: a word or two, such as "versions".
      text: what is the case, with numbers.
      cure: what to do; () for healthy things and notes that need nothing.
    """

    level: str
    topic: str
    text: str
    cure: str = ""


def must_be_fixed(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.level == "error" for finding in findings)


def report(findings: Iterable[Finding]) -> str:
    """Returns the findings as text, the worst first, each with its cure below."""
    ordered = sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    width = max((len(finding.topic) for finding in ordered), default=0)
    marks = {"error": "FIX ", "warning": "WARN", "note": "note", "ok": "ok  "}
    lines = []
    for finding in ordered:
        lines.append(f"{marks[finding.level]}  {finding.topic:<{width}}  {finding.text}")
        if finding.cure:
            lines.append(f"{'':<{width + 8}}-> {finding.cure}")
    counts = {level: sum(f.level == level for f in ordered) for level in LEVELS}
    lines.append(
        f"\n{counts['error']} to fix, {counts['warning']} warnings, {counts['note']} notes, {counts['ok']} healthy"
    )
    return "\n".join(lines)
