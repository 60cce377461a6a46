"""Every experiment file loads, and its header's command is one that the trainer takes."""

import pathlib
import re
import shlex

import pytest

from vit_tpu import config, train

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_experiment_loads_strictly(file):
    config.load_config(file, {"data.path": "/data"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_headers_commands_are_understood(file, monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    header = "".join(line[1:] for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
    commands = re.findall(r"python -m vit_tpu\.train ((?:.*\\\n)*.*)", header)
    assert commands and f"experiments/{file.name}" in commands[0]
    seen = []

    def execute(define, run, doc, arguments):
        from absl import flags

        values = flags.FlagValues()
        define(flags, values)
        values(["train", *arguments])
        seen.append(config.load_config(values.config, train.overrides(values)))

    monkeypatch.setattr(train, "execute", execute)
    for command in commands:
        train.main(shlex.split(command.replace("\\\n", " ")))
    assert len(seen) == len(commands)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_step_of_the_experiment_has_its_examples(file):
    loaded = config.load_config(file, {"data.path": "/data"})
    if loaded.data.source == "synthetic":  # the only source whose size a file decides
        assert loaded.training.batch_size <= loaded.data.size
