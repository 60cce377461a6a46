"""Every experiment file loads, its header's commands are understood, it dry-runs in small, and small ones run."""

import contextlib
import io
import pathlib
import re
import shlex

import pytest

from vit_tpu import config, evaluate, train
from vit_tpu.models import variants

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))
SMALL = ("digits", "few_shot")  # need nothing but the package
TINY = {"width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2}


def header(file):
    return "".join(line[1:] for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))


def commands(file, name):
    """The arguments of every `python -m vit_tpu.NAME` in the header."""
    found = re.findall(rf"python -m vit_tpu\.{name} ((?:.*\\\n)*.*)", header(file))
    return [shlex.split(command.replace("\\\n", " ")) for command in found]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_experiment_loads_strictly(file):
    config.load_config(file, {} if file.stem in SMALL else {"data.path": "/data"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_headers_commands_are_understood(file, monkeypatch):
    from absl import flags

    from vit_tpu import plan

    monkeypatch.chdir(FOLDER.parent)
    assert commands(file, "train") and f"experiments/{file.name}" in " ".join(commands(file, "train")[0])
    for command in commands(file, "train"):
        values = flags.FlagValues()
        train._define(flags, values)
        assert values(["train", *command])[1:] == []
        config.load_config(values.config, train.overrides(values))
    for command in commands(file, "plan"):
        values = flags.FlagValues()
        plan._define(flags, values)
        assert values(["plan", *command])[1:] == []
        plan._config(values.config, values.set)
    for command in commands(file, "evaluate"):
        values = flags.FlagValues()
        evaluate._define(flags, values)
        assert values(["evaluate", *command])[1:] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_header_says_what_to_expect(file):
    text = header(file)
    assert re.search(r"Measured:|Expected:|Planned:|Not run: needs", text), file.name
    assert "Not run" not in text or "needs" in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_step_of_the_experiment_has_its_examples(file):
    loaded = config.load_config(file, {} if file.stem in SMALL else {"data.path": "/data"})
    if loaded.data.source == "synthetic":  # the only source whose size a file decides
        assert loaded.training.batch_size <= loaded.data.size


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_experiment_dry_runs_in_small(file, tmp_path, monkeypatch):
    """Everything of the experiment but the size of the model, the batch and the data."""
    from vit_tpu.training.run import dry_run

    loaded = config.load_config(file, {} if file.stem in SMALL else {"data.path": "/data"})
    patch = loaded.model.patch_size or variants.variant(loaded.model.variant).patch_size
    batch = 8 * loaded.training.accumulation_steps
    settings = {f"model.{name}": value for name, value in TINY.items()} | {"training.batch_size": batch}
    if file.stem not in SMALL:
        settings |= {"model.image_size": 2 * patch, "model.num_classes": 10, "data.source": "synthetic"}
        settings |= {"data.size": 1_281_167, "data.classes": 10, "data.path": None}
        settings |= {name: None for name in ("data.name", "data.split", "data.validation_split")}
    small = config.load_config(file, settings)
    with contextlib.redirect_stdout(io.StringIO()):
        text = dry_run(small)
    assert loaded.optimizer.name in text and loaded.precision in text and f"pool {loaded.model.pool}" in text


def test_the_digits_file_is_the_run_without_a_file():
    assert config.load_config(FOLDER / "digits.yaml") == config.Config()


@pytest.mark.parametrize("name", ("jft", "lamb"))
def test_the_two_giants_differ_in_nothing_but_shape_and_batch(name):
    small, large = (config.load_config(FOLDER / f"vit_{v}14_{name}.yaml") for v in "gG")
    keys = {line.split(":")[0] for line in config.differences(small, large)}
    assert keys - {"training.batch_size"} == {"model.variant"}


def test_the_lamb_files_are_the_flags_in_their_header():
    """--model --image_size --optimizer --weight_decay ... over the paper's file give the same as the file."""
    from absl import flags

    for variant in "gG":
        file = FOLDER / f"vit_{variant}14_lamb.yaml"
        named = re.findall(r"--(model|image_size|optimizer|weight_decay|head_weight_decay|gradient_clipping|batch_size|"
                           r"loss_scale|accumulation_steps)=(\S+)", header(file))  # fmt: skip
        values = flags.FlagValues()
        train._define(flags, values)
        values(["train", *(f"--{key}={value}" for key, value in named)])
        loaded = config.load_config(file)
        assert len({key for key, _ in named}) == 9
        for text in train.overrides(values):
            key, _, value = text.partition("=")
            if value == "null":  # what another --model leaves to the variant
                continue
            assert str(config.get(loaded, key)) == str(config.get(config.load_config(file, [text]), key)), text


def test_imagenet_decay_is_the_published_one():
    """1e-4 beside the rate is 0.1 of the rate 1e-3; four files, two shapes, two lengths, nothing else."""
    for file in FOLDER.glob("imagenet_*.yaml"):
        loaded = config.load_config(file, {"data.path": "/d"})
        assert loaded.optimizer.weight_decay * loaded.optimizer.learning_rate == pytest.approx(1e-4)
        assert loaded.training.batch_size == 1024 and loaded.schedule.warmup == 10_000
        assert (loaded.model.pool, loaded.model.posemb, loaded.data.mixup) == ("gap", "sincos2d", 0.2)
    first, *others = sorted(FOLDER.glob("imagenet_*.yaml"))
    first = config.load_config(first, {"data.path": "/d"})
    for other in others:
        changed = config.differences(first, config.load_config(other, {"data.path": "/d"}))
        assert {line.split(":")[0] for line in changed} <= {"model.variant", "training.epochs"}


@pytest.mark.parametrize("name", SMALL)
def test_the_small_experiments_run_for_a_few_steps(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER.parent)
    file, run = FOLDER / f"{name}.yaml", tmp_path / name
    few = ["--steps=4", "--steps_per_execution=2", *(f"--set=model.{key}={value}" for key, value in TINY.items())]
    (command,) = commands(file, "train")[:1]
    command = [word for word in command if not word.startswith("--workdir")]
    assert train.main([*command, *few, f"--workdir={run}"]) == 0
    for command in commands(file, "evaluate"):
        command = [word for word in command if not word.startswith("--workdir")]
        assert evaluate.main([*command, f"--workdir={run}"]) == 0
        assert "few-shot" in capsys.readouterr().out
