"""Every command and code block of the README and the pages in docs/ runs, or says why not and is checked as far as it
can be."""

import configparser
import contextlib
import doctest
import importlib
import io
import os
import pathlib
import re

import doc_place
import pytest
from doc_pages import PAGES, ROOT, blocks

COMMANDS = ("train", "evaluate", "predict", "plan", "convert", "export", "doctor", "data_service")
ALL = [block for page in PAGES if page.name not in ("api.md",) for block in blocks(page)]
# Their sessions are run by tests of their own.
SESSIONS_TESTED = {
    "optimizers.md": "tests/optim/test_optimizers_page.py",
    "precision.md": "tests/models/test_precision_page.py",
}
# Programs of others: what a page asks them to do is not run, and needs no remark.
OTHERS = {
    "docker": "needs Docker", "gcloud": "needs an account", "gsutil": "needs an account",
    "ssh": "needs another machine",
    "tfds": "downloads data", "source": "changes the shell", "git": "downloads", "cd": "changes the shell",
    "export": "changes the shell",
    "kill": "needs a process", "echo": "is about a run that is going on",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    with contextlib.redirect_stdout(io.StringIO()):
        doc_place.make(folder)
    return folder


@pytest.fixture(scope="module")
def spaces():
    """The names that a page's Python blocks share."""
    return {}


def shells():
    return [b for b in ALL if b.language in ("bash", "sh", "") and b.mark != "not run" and starts_with_a_program(b)]


def starts_with_a_program(block):
    return block.program() in ("python", "make", "pip", "tensorboard", *OTHERS)


@pytest.mark.parametrize("block", shells(), ids=str)
def test_the_commands_of_a_block_work(block, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for words in block.commands:
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word) or "DIR" in word]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif words[0] == "pip" or words[:3] == ["python", "-m", "pip"]:
            check_pip(words)
        elif words[0] == "tensorboard":
            importlib.import_module("tensorboard")
            assert words[1].startswith("--logdir")
        elif words[0] in OTHERS:
            assert block.mark or OTHERS[words[0]]
        elif words[:2] == ["python", "-m"] and words[2].startswith("vit_tpu."):
            call(words[2].removeprefix("vit_tpu."), words[3:], block)
        else:
            check_script(words)
    err = capsys.readouterr().err
    assert not [line for line in err.splitlines() if line.startswith("error:")], err


def call(name, arguments, block):
    """Runs a command of the package in this process, small; or checks its flags and its config.

    Plans are not made (minutes of the compiler; tests/tpu makes some), nor are the data service's processes started.
    """
    assert name in COMMANDS, name
    module = importlib.import_module(f"vit_tpu.{name}")
    arguments = [*stand_ins(name, arguments)]
    if block.mark or name in ("plan", "data_service") or needs_more(arguments):
        check_flags(module, name, arguments)
    elif name == "train":
        short = list(doc_place.SHORT if "data.path=DIR" in " ".join(arguments) else doc_place.SHORT[1:])
        if any(argument.startswith("--epochs") for argument in arguments):
            short.remove("--steps=12")
        assert module.main([*arguments, *doc_place.SMALL, *short, "--dry_run"]) == 0, arguments
    else:
        # The doctor's 1 is a finding.
        assert module.main(arguments) in ((0, 1) if name == "doctor" else (0,)), arguments


def needs_more(arguments):
    """Whether the words themselves say that this machine is not enough: a TPU, several hosts."""
    return any(re.match(r"--(strategy=tpu|tpu=|workers=)", argument) for argument in arguments)


def stand_ins(name, arguments):
    replaced = {"long.yaml": "FILE.yaml"}
    found = []
    for argument in arguments:
        for old, new in replaced.items():
            argument = argument.replace(f"={old}", f"={new}")
        if argument != "...":
            found.append(argument)
    if name == "export" or (name == "convert" and len(arguments) > 1):  # nothing is written over
        for target in ("exported/", "dinov2_224.npz"):
            if target in found and os.path.exists(target):
                os.rename(target, f"{target.rstrip('/')}_{len(os.listdir('.'))}")
    return found


def check_flags(module, name, arguments):
    """Flags exist and have values they can have, and the config that they make is one."""
    from absl import flags

    values = flags.FlagValues()
    module._define(flags, values)
    values([name, *arguments])
    if name == "train":
        from vit_tpu.config import load_config

        load_config(values.config, module.overrides(values))
    if name == "plan":
        given = [f"{key}={values[n].value}" for n, (key, _) in module.SHORTCUTS.items() if values[n].value is not None]
        for settings in module.variations(values.compare):
            module._config(values.config, [*values.set, *given, *settings])


def check_pip(words):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extras in re.findall(r"(?:vit_tpu|\.)\[([\w,]+)\]", " ".join(words)):
        for extra in extras.split(","):
            assert extra in setup["options.extras_require"], words


def check_script(words):
    """A script of the project: it is there and knows the flags."""
    assert words[0] == "python", words
    path = ROOT / words[1]
    assert path.is_file(), words
    text = path.read_text()
    for flag in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
        assert f'"{flag}"' in text, f"{words[1]} has no {flag}"


PYTHONS = [b for b in ALL if b.language == "python" and b.mark != "not run" and ">>>" not in b.text]


@pytest.mark.parametrize("block", PYTHONS, ids=str)
def test_the_python_of_a_block_runs(block, place, spaces, monkeypatch, capsys):
    import tensorflow as tf

    import vit_tpu

    real = vit_tpu.ViT
    monkeypatch.chdir(place)
    monkeypatch.setattr(vit_tpu, "ViT", lambda variant, **given: real(variant, **doc_place.SHAPE | given))
    space = spaces.setdefault(block.page, {})
    if block.page == "README.md":
        batch = tf.zeros([8, 224, 224, 3]), tf.zeros([8], tf.int32)
        space |= {"train": tf.data.Dataset.from_tensors(batch).repeat(2)}
        space |= {"valid": tf.data.Dataset.from_tensors(batch)}
    if "old/*" in block.text:
        old = pathlib.Path("old")
        old.mkdir()
        pathlib.Path("new").mkdir()
        with tf.io.TFRecordWriter(str(old / "a.tfrecord.gz"), "GZIP") as writer:
            writer.write(b"x")
    text = block.text.replace("epochs=10", "epochs=1").replace("steps_per_execution=50", "steps_per_execution=2")
    exec(compile(text, str(block), "exec"), space)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if ">>> " in p.read_text() and p.name not in SESSIONS_TESTED], ids=str
)
def test_the_sessions_of_a_page_give_what_it_shows(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_pages_whose_sessions_are_tested_elsewhere_are():
    for page, test in SESSIONS_TESTED.items():
        assert f'"{page}"' in (ROOT / test).read_text()


def test_a_block_that_does_not_run_says_why():
    for block in ALL:
        assert block.mark is None or len(block.reason.split()) > 2, str(block)


def test_every_block_is_of_a_kind_that_is_looked_at():
    for block in ALL:
        known = block.language in ("bash", "python", "text", "yaml", "json", "csv")
        assert known or starts_with_a_program(block), f"{block}: name its language"
