"""Reads the project's Markdown: fenced blocks with the remark above them, commands, links, flags."""

import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|checked, not run): (?P<reason>[^>]+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: `mark` is None (it runs), "not run" or "checked, not run" (flags and keys are); with a reason."""

    page: str
    line: int
    language: str
    text: str
    mark: str | None
    reason: str

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def commands(self):
        """The command lines as lists of words; remarks and continued lines are taken care of."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines if line.strip()]
        return [found for found in words if found]

    def program(self):
        """The first word of the first command, or "" for what is no shell text."""
        try:
            return self.commands[0][0]
        except (IndexError, ValueError):
            return ""


def blocks(page):
    """Every fenced block of a page, in order."""
    text, found = page.read_text(), []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        parts = match.groupdict()
        found.append(Block(page.name, line, parts["language"], parts["text"], parts["mark"], parts["reason"] or ""))
    return found


def links(page):
    """(text, target) of every link and picture outside code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text)


def anchors(page):
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def flags_named(page):
    """Every --flag in a page, in text and in blocks, with `--no` of the switches."""
    return set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]*)(?![\w-])", page.read_text()))
