"""Writes the pages that come from the source: docs/api.md, docs/config.md, and lists in docs/troubleshooting.md
and docs/measured.md.

  python docs/build.py            writes what has changed
  python docs/build.py --check    says what is out of date, and exits with 1

tests/docs/test_generated_pages.py makes the same check.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# Page of the API: heading, module, what it is for, and the names; None for the module's __all__.
API: list[tuple[str, str, list[str] | None]] = [
    ("vit_tpu", "Models, runs, plans and weights.", [
        "Config", "load_config", "ViT", "run", "Summary", "callbacks", "load_weights", "save_weights", "LoadReport",
        "load_trained", "judge_features", "export_model", "make_plan", "Plan", "UserError"]),
    ("vit_tpu.evaluation.evaluating", "`vit_tpu.evaluate(...)` is this function.", ["evaluate", "Evaluation"]),
    ("vit_tpu.evaluation.predicting", "`vit_tpu.predict(...)` is this function.", [
        "predict", "Predictions", "Prediction"]),
    ("vit_tpu.precision", "`with vit_tpu.precision(policy):` is `scope`.", [
        "scope", "check", "recommended", "explain", "for_gpu", "for_cpu"]),
    ("vit_tpu.models", "Named shapes.", ["VARIANTS", "Variant", "variant", "flops"]),
    ("vit_tpu.optim", "Optimizers, loss scale and averages.", [
        "LAMB", "Adafactor", "AdamW", "SGD", "GroupedOptimizer", "build", "state_bytes", "LossScale", "Ema", "Group",
        "Parameter"]),
    ("vit_tpu.optim.schedules", "Learning rates by the number of applied updates.", [
        "ReciprocalSqrt", "Cosine", "Linear", "Constant", "steps_from"]),
    ("vit_tpu.optim.decay", "Groups of parameters.", ["resolve", "table", "select", "matches"]),
    ("vit_tpu.optim.loss_scale", "Wrapping an optimizer by hand.", ["wrap"]),
    ("vit_tpu.losses", "Losses on logits.", [
        "SoftmaxCrossEntropy", "SigmoidCrossEntropy", "LogitsLoss", "get",
        "pick"]),
    ("vit_tpu.metrics", "Metrics that count every example once.", ["Accuracy", "TopK", "Count", "get"]),
    ("vit_tpu.weights", "Files of other frameworks.", ["convert", "describe", "SaveReport"]),
    ("vit_tpu.data.source", "What every source of images is.", ["Source"]),
    ("vit_tpu.data.arrays", "Arrays in memory and `.npz` files.", ["from_arrays", "from_npz"]),
    ("vit_tpu.data.folders", "Class folders.", ["from_folders"]),
    ("vit_tpu.data.tfds", "TensorFlow Datasets.", ["from_tfds"]),
    ("vit_tpu.data.tfrecords", "TFRecord files.", ["from_tfrecords"]),
    ("vit_tpu.data.array_records", "ArrayRecord files.", ["from_array_records"]),
    ("vit_tpu.data.manifests", "Lists of files.", ["from_manifest"]),
    ("vit_tpu.data.pipeline", "From a source to batches.", ["train_pipeline", "eval_pipeline"]),
    ("vit_tpu.evaluation.report", "What `vit_tpu.judge_features` returns.", ["FeatureReport"]),
    ("vit_tpu.evaluation.watch", "Features judged while a model trains.", ["FewShotCallback"]),
    ("vit_tpu.training.run", "What `--dry_run` prints.", ["dry_run"]),
    ("vit_tpu.exporting.formats", "Exported artefacts as functions.", ["read"]),
    ("vit_tpu.diagnose.examine", "The doctor, from Python.", ["examine"]),
    ("vit_tpu.diagnose.profile", "Recorded traces, from Python.", ["read", "Profile"]),
    ("vit_tpu.diagnose.replay", "A bad step again, from Python.", ["replay", "Replay"]),
]  # fmt: skip
# What Keras calls and users do not.
PLUMBING = {
    "build", "call", "get_config", "from_config", "compute_output_shape", "update_state", "result", "reset_state",
    "save_own_variables", "load_own_variables", "train_step", "test_step", "predict_step", "make_train_function",
    "hit", "on_train_begin", "on_train_end", "on_steps", "on_train_batch_end", "on_epoch_end", "update",
}  # fmt: skip
_SCRIPTS, _SCRIPTS_END = "<!-- scripts: python docs/build.py -->", "<!-- end of the scripts -->"
_BEGIN, _END = "<!-- messages: python docs/build.py -->", "<!-- end of the messages -->"


def public(module: str, names: list[str] | None) -> list[tuple[str, object]]:
    """Returns (name, object) for the names of a module."""
    loaded = importlib.import_module(module)
    return [(name, getattr(loaded, name)) for name in names or loaded.__all__]


def api() -> str:
    """Returns docs/api.md."""
    lines = [
        "# API reference", "",
        "Made from the docstrings by `python docs/build.py`. Keys of a config are in [config.md](config.md), the "
        "commands' flags in their `--help`.", "",
    ]  # fmt: skip
    for module, _, names in API:
        lines += [f"- [{module}](#{module.replace('.', '').lower()}): {', '.join(n for n, _ in public(module, names))}"]
    for module, purpose, names in API:
        lines += ["", f"## {module}", "", purpose]
        for name, value in public(module, names):
            lines += ["", f"### {name}", "", *entry(name, value)]
    return "\n".join(lines) + "\n"


def entry(name: str, value: object) -> list[str]:
    """Returns the lines about one function, class or constant."""
    if not callable(value):
        shown = ", ".join(value) if isinstance(value, dict) else repr(value)
        return [f"A constant: {shown}."]
    lines = ["```text", f"{name}{signature(value)}", "```", "", *prose(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        for method, function in methods(value):
            lines += ["", f"**`{name}.{method}{signature(function, bound=True)}`**", ""]
            lines += prose(inspect.getdoc(function) or "")
    return lines


def methods(kind: type) -> list[tuple[str, object]]:
    """Returns the documented public methods that this package, not Keras, gives a class, in the order of their text."""
    found = {}
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith("vit_tpu"):
            continue
        for name, value in vars(owner).items():
            value = getattr(value, "__func__", value)
            if name.startswith("_") or name in PLUMBING or not inspect.isfunction(value) or not value.__doc__:
                continue
            found[name] = getattr(value, "__wrapped__", value)
    return list(found.items())


def signature(value: object, bound: bool = False) -> str:
    """Returns the arguments as they are typed, without the quotes of late annotations or addresses of objects."""
    try:
        parameters = list(inspect.signature(value).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    texts, star = [], False
    for number, p in enumerate(parameters):
        if bound and number == 0 and p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            texts.append("*")
        star = star or p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY)
        text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        if p.default is not p.empty:
            text += f"={default(p.default)}"
        texts.append(text)
    return f"({', '.join(texts)})"


def default(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}()"
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def prose(text: str) -> list[str]:
    """Returns a docstring as Markdown: sections such as "Args:" become lists."""
    lines: list[str] = []
    section, code = False, False
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line.strip())
        if heading:
            section, code = True, False
            lines += [*([""] if lines and lines[-1] else []), f"{heading[1]}:", ""]
        elif section and (item := re.match(r"(?:  |    )([\w*][\w*, .]*?): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section and line.startswith("  ") and lines[-1].startswith(("- ", "  ")):
            lines.append("  " + line.strip())
        elif section and line.startswith("  "):
            lines.append(line.strip())
        else:
            section = section and not line
            literal = line.startswith("    ")
            if literal and not code:
                lines += ["```text"]
            if code and not literal and line:
                while lines and not lines[-1]:
                    lines.pop()
                lines += ["```", ""]
            code = literal or (code and not line)
            lines.append(line[4:] if literal else line.removesuffix("::") + (":" if line.endswith("::") else ""))
    if code:
        lines.append("```")
    return lines


def config() -> str:
    """Returns docs/config.md: every key, its default, what it means and takes."""
    from vit_tpu import settings

    notes = comments(ROOT / "vit_tpu" / "settings.py")
    model = inspect.getdoc(importlib.import_module("vit_tpu").ViT) or ""
    meant = dict(re.findall(r"^  (\w+): (.*)$", model, re.MULTILINE))
    meant |= dict.fromkeys(("width", "depth", "mlp_dim", "num_heads", "patch_size"), "null: the variant's own")
    lines = [
        "# Every key of a config", "",
        "Made from `vit_tpu/settings.py` by `python docs/build.py`. A file sets keys of these sections; on the command "
        "line, `--set section.key=value`. A duration is a number of steps or text: `5 epochs`, `10%` or "
        "`50000 examples`.",
        "",
        "A file that does not name a key gets the default below. `python -m vit_tpu.train` without a file trains the "
        "digits of `experiments/digits.yaml`.",
    ]  # fmt: skip
    top = [f for f in dataclasses.fields(settings.Config) if f.name not in settings.SECTIONS]
    for title, kind, fields in [
        *((name, kind, dataclasses.fields(kind)) for name, kind in settings.SECTIONS.items()),
        ("the run itself", settings.Config, top),
    ]:
        said = "" if kind is settings.Config else f"{inspect.getdoc(kind)}\n\n"
        lines += ["", f"## {title}", "", f"{said}| key | default | |", "|---|---|---|"]
        for field in fields:
            key = field.name if kind is settings.Config else f"{title}.{field.name}"
            notes_of = [notes.get((kind.__name__, field.name), "")]
            if key in settings.CHOICES and not any(c in notes_of[0] for c in settings.CHOICES[key][:1]):
                notes_of.append(" \\| ".join(settings.CHOICES[key]))
            if kind is settings.Model and not any(notes_of):
                notes_of = [meant.get(field.name, "")]
            value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            text = "; ".join(note.replace("|", "\\|") if "\\|" not in note else note for note in notes_of if note)
            lines.append(f"| `{key}` | `{shown(value)}` | {text} |")
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """Returns a default as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def comments(path: pathlib.Path) -> dict[tuple[str, str], str]:
    """Returns (class, field) -> the comment on the line of each annotated field."""
    source = path.read_text()
    rows, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    code, mark, comment = rows[field.end_lineno - 1].partition("  # ")
                    found[node.name, field.target.id] = comment.strip() if mark else ""
    return found


# Errors ------------------------------------------------------------------------------------------------------------

AREAS = [
    ("Commands and flags", ("train", "evaluate", "predict", "plan", "convert", "export", "doctor", "command",
                            "model_flags", "data_service")),
    ("Configs", ("config", "settings", "typed", "errors", "precision", "devices")),
    ("Data", ("data",)),
    ("Models and layers", ("models", "layers")),
    ("Losses and metrics", ("losses", "metrics")),
    ("Optimizers", ("optim",)),
    ("Training and checkpoints", ("training",)),
    ("Weights", ("weights",)),
    ("Evaluation and pictures", ("evaluation", "pictures")),
    ("Export", ("exporting",)),
    ("Planning", ("tpu",)),
    ("Diagnosis", ("diagnose",)),
]  # fmt: skip
# Raised to be caught inside the package, or what Python's own protocols ask for: no user reads them.
INTERNAL = {"AttributeError", "AbandonedError", "EvaluationStoppedError", "KeyboardInterrupt", "StopIteration"}


@dataclasses.dataclass(frozen=True)
class Message:
    """One error of the source: where it is made, its class, and its texts with … where a value is filled in (none: it
    passes on what another one says)."""

    file: str
    line: int
    function: str
    kind: str
    texts: tuple[str, ...]


@functools.cache
def messages() -> list[Message]:
    """Returns every error that the package makes, in the order of files and lines."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "vit_tpu").rglob("*.py"))}
    constants = {
        _target(node): str(node.value.value)
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    functions: dict[tuple[str, str], list[ast.FunctionDef]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault((path.stem, node.name), []).append(node)
    found = []
    for path, tree in trees.items():
        for owner, node in _calls(tree, tree):
            if kind := _error(node):
                texts = Texts(functions, path.stem, owner, constants).of(node.args[0]) if node.args else []
                words = tuple(text for text in texts if re.search(r"\w{3}", text))
                file, function = str(path.relative_to(ROOT)), getattr(owner, "name", "")
                found.append(Message(file, node.lineno, function, kind, words))
    return sorted(found, key=lambda message: (message.file, message.line))


def _calls(tree: ast.AST, owner: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Gives every call with the function that it is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield owner, node
        yield from _calls(node, node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else owner)


def _error(call: ast.Call) -> str | None:
    """Returns the name of an exception that the call makes."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    return name if name.endswith("Error") and name[:1].isupper() and name not in INTERNAL else None


@dataclasses.dataclass
class Texts:
    """Reads texts as they will be printed, with … for what is filled in."""

    functions: dict[tuple[str, str], list[ast.FunctionDef]]  # by module and name
    module: str
    owner: ast.AST
    constants: dict[str | None, str]

    def of(self, node: ast.expr) -> list[str]:
        """Returns what an error may say: a name stands for what its function gave it, a call for what it returns."""
        if isinstance(node, ast.Name) and node.id not in self.constants:
            return [
                text for value in self._given(node.id) if not isinstance(value, ast.Name) for text in self.of(value)
            ]
        if isinstance(node, ast.Call):
            name, module = getattr(node.func, "id", ""), self.module
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                name, module = node.func.attr, node.func.value.id
            made = self.functions.get((module, name), [])
            if made:
                returns = [(f, r.value) for f in made for r in ast.walk(f) if isinstance(r, ast.Return) and r.value]
                texts = [Texts({}, module, f, self.constants).flat(value) for f, value in returns]
                return [text for text in texts if text != "None"]
        return [self.flat(node)]

    def flat(self, node: ast.expr, inside: bool = False) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(
                self.flat(v.value, True) if isinstance(v, ast.FormattedValue) else str(v.value) for v in node.values
            )
        if isinstance(node, ast.IfExp):
            either = [self.flat(node.body, inside), self.flat(node.orelse, inside)]
            return "".join(either) if "" in either else f"({' / '.join(either)})" if either != ["…", "…"] else "…"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.flat(node.left, inside) + self.flat(node.right, inside)
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name.isupper() and name in self.constants:
            return self.constants[name]
        if inside and isinstance(node, ast.Name):  # half a sentence that was put together before
            once = Texts({}, self.module, ast.Module([], []), self.constants)  # a name may be made from itself
            halves = [t for t in map(once.flat, self._given(name)) if len(t.split()) > 3]
            return f"({' / '.join(halves)})" if len(halves) > 1 else (halves or ["…"])[0]
        return "…"

    def _given(self, name: str) -> list[ast.expr]:
        return [
            place.value
            for place in ast.walk(self.owner)
            if isinstance(place, (ast.Assign, ast.AugAssign)) and _target(place) == name and not _number(place.value)
        ]


def _number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _target(place: ast.Assign | ast.AugAssign) -> str | None:
    target = place.targets[0] if isinstance(place, ast.Assign) else place.target
    return target.id if isinstance(target, ast.Name) else None


def listed() -> str:
    """Returns the part of docs/troubleshooting.md that lists the messages."""
    by_area: dict[str, list[str]] = {title: [] for title, _ in AREAS}
    for message in messages():
        owner = message.file.split("/")[1].removesuffix(".py")
        title = next((title for title, owners in AREAS if owner in owners), "Others")
        for text in message.texts:
            by_area.setdefault(title, []).append(f"- {quoted(text)} {message.file.removeprefix('vit_tpu/')}")
    return "\n".join(
        line for title, texts in by_area.items() if texts for line in (f"### {title}", "", *dict.fromkeys(texts), "")
    )


def quoted(text: str) -> str:
    """Returns a message as it stands on the page."""
    text = re.sub(r"(…\s*)+…", "…", " ".join(text.split()))
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def troubleshooting() -> str:
    """Returns docs/troubleshooting.md with its list made anew."""
    page = (DOCS / "troubleshooting.md").read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{listed()}\n{_END}{after}"


def measured() -> str:
    """Returns docs/measured.md with its list of scripts made anew."""
    page = (DOCS / "measured.md").read_text()
    lines = ["| script | |", "|---|---|"]
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
        first = " ".join(said.split())
        lines.append(f"| `benchmarks/{path.name}` | {first} |".replace("  ", " "))
    before, _, rest = page.partition(_SCRIPTS)
    return f"{before}{_SCRIPTS}\n\n" + "\n".join(lines) + f"\n\n{_SCRIPTS_END}{rest.partition(_SCRIPTS_END)[2]}"


PAGES = {"api.md": api, "measured.md": measured, "config.md": config, "troubleshooting.md": troubleshooting}


def stale() -> dict[str, str]:
    """Returns the pages that differ from what the source says now, with their new text."""
    new = {name: make() for name, make in PAGES.items()}
    return {n: text for n, text in new.items() if not (DOCS / n).exists() or (DOCS / n).read_text() != text}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    args = parser.parse_args(arguments)
    found = stale()
    for name, text in found.items():
        if not args.check:
            (DOCS / name).write_text(text)
        print(f"docs/{name} {'is out of date: run python docs/build.py' if args.check else 'written'}")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
