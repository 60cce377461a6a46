"""Pages made from the source are as the source is: `python docs/build.py` mends it."""

import importlib.util
import inspect
import re

import pytest
from doc_pages import ROOT

import vit_tpu

SPEC = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
build = importlib.util.module_from_spec(SPEC)
import sys  # noqa: E402

sys.modules["docs_build"] = build  # dataclasses look their module up
SPEC.loader.exec_module(build)

# Errors that pass on what another one, which is in the list, says; _guarded also makes one of lines: where memory went.
PASSED_ON = {
    ("vit_tpu/models/guard.py", "plain_errors"), ("vit_tpu/tpu/pjrt.py", "call"), ("vit_tpu/tpu/tracer.py", "trace"),
    ("vit_tpu/training/checkpoints.py", "verified"), ("vit_tpu/training/rendezvous.py", "_go"),
    ("vit_tpu/training/run.py", "_guarded"), ("vit_tpu/weights/files.py", "opened"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(build.PAGES))
def test_the_page_is_up_to_date(name):
    assert (ROOT / "docs" / name).read_text() == build.PAGES[name](), f"docs/{name} is old: run python docs/build.py"


def test_every_error_of_the_source_can_be_found_by_its_text():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    found = build.messages()
    assert len(found) > 400 and sum(message.kind == "UserError" for message in found) > 400
    for message in found:
        if not message.texts:
            assert (message.file, message.function) in PASSED_ON, message
        for text in message.texts:
            assert build.quoted(text) in page, message


def test_as_many_errors_are_read_as_the_source_raises():
    """Counted by another means: by lines, not by the syntax tree."""
    lines = "".join(path.read_text() for path in (ROOT / "vit_tpu").rglob("*.py"))
    raised = len(re.findall(r"(?<!class )\bUserError\(", lines))
    assert sum(message.kind == "UserError" for message in build.messages()) == raised


def test_texts_are_read_as_they_are_printed():
    import ast

    tree = ast.parse(
        "def f(a):\n    hint = f'; use {a} or more of it'\n"
        "    raise E(f'a is {a}{\"s\" if a else \"\"}{hint}' + ' now')"
    )
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert build.Texts({}, "f", tree.body[0], {}).of(call.args[0]) == ["a is …s; use … or more of it now"]


def test_every_public_name_is_on_the_page_and_has_a_docstring():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = {name for _, _, names in build.API for name in names or ()}
    modules = {module.removeprefix("vit_tpu.") for module, _, _ in build.API}
    for name in vit_tpu.__all__:
        assert name in listed or name in modules or name in ("__version__", "evaluate", "predict"), name
    for package in ("optim", "models", "weights"):
        for name in getattr(vit_tpu, package).__all__ if package != "weights" else []:
            assert name in listed or f"{package}.{name}" in modules, f"{package}.{name}"
    for module, _, names in build.API:
        for name, value in build.public(module, names):
            assert f"\n### {name}\n" in page
            assert not callable(value) or len(inspect.getdoc(value) or "") > 20, f"{module}.{name}"


def test_every_public_function_of_these_modules_is_documented():
    for module, _, names in build.API:
        for name, value in build.public(module, names):
            if inspect.isfunction(value) and not module.startswith("vit_tpu.data."):
                said = inspect.getdoc(value)
                missing = [
                    p for p in inspect.signature(value).parameters if p not in said and p not in ("args", "kwargs")
                ]
                assert "Args:" not in said or not missing, f"{module}.{name} does not say what {missing} are"
