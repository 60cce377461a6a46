"""The pages hang together: links and pictures exist, flags and keys that they name exist, each page is in the index."""

import configparser
import functools
import importlib
import re

import pytest
from doc_pages import PAGES, ROOT, anchors, flags_named, links

from vit_tpu import config

COMMANDS = ("train", "evaluate", "predict", "plan", "convert", "export", "doctor", "data_service")
# Flags of other programs that pages mention.
FOREIGN = {
    "logdir", "format", "check", "help", "bucket", "zone", "project", "version", "worker", "command", "network", "name",
    "accelerator", "type", "recursive", "constraint", "editable", "port", "host", "load_fast",
    "data_dir", "spot", "yes", "quiet", "file_format",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    for text, target in links(page):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: [{text}]({target})"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name}: [{text}]({target})"


@functools.cache
def known_flags():
    from absl import flags

    known = set(FOREIGN)
    for name in COMMANDS:
        module, values = importlib.import_module(f"vit_tpu.{name}"), flags.FlagValues()
        module._define(flags, values)
        known |= {form for flag in values for form in (flag, f"no{flag}")}
    for script in [*(ROOT / "benchmarks").glob("*.py"), ROOT / "docs" / "build.py"]:
        known |= set(re.findall(r'add_argument\("--([a-z_]+)"', script.read_text()))
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_exists(page):
    named = flags_named(page) if page.name != "names.md" else ours_in_names(page)
    known = known_flags()
    assert not {flag for flag in named if flag not in known and "xla_" not in flag}, page.name


def ours_in_names(page):
    """Of the page that translates names: the flags in the last column, which are ours."""
    rows = [line.rstrip("|").rpartition("|")[2] for line in page.read_text().splitlines() if line.startswith("|")]
    return set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]*)", " ".join(rows)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_config_key_that_a_page_names_exists(page):
    import vit_tpu

    known = {*config.all_keys(), *METHODS}
    pattern = r"(?<![\w./])((?:model|data|optimizer|schedule|loss_scale|training)\.[a-z_0-9]+)(?![\w(/.]|\.py)"
    for key in re.findall(pattern, page.read_text()):
        section, name = key.split(".")
        elsewhere = name in ("md", "py", "npz") or (section == "model" and hasattr(vit_tpu.ViT, name))
        assert key in known or elsewhere, f"{page.name}: {key}"


# Files, and attributes of objects in examples.
METHODS = {
    "optimizer.trust_ratios", "optimizer.loss_scale", "optimizer.skipped", "optimizer.skipped_in_a_row",
    "model.onnx", "model.tflite", "model.safetensors", "training.safetensors",
    "optimizer.iterations", "model.counters", "model.index",
}  # fmt: skip


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, f"docs/README.md does not name {page.name}"


def test_every_experiment_benchmark_and_notebook_is_named_by_a_page():
    text = "".join(page.read_text() for page in PAGES)
    for path in [*(ROOT / "experiments").glob("*.yaml"), *(ROOT / "benchmarks").glob("*.py")]:
        assert path.name in text, path
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert path.name in text, path


def test_the_version_and_licence_are_the_same_everywhere():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    cff = (ROOT / "CITATION.cff").read_text()
    from vit_tpu import __version__

    assert f"version: {__version__}" in cff and f"license: {setup['metadata']['license']}" in cff
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
