"""The command: what it accepts, what it refuses, with one line each."""

import subprocess
import sys

import pytest

from vit_tpu import plan
from vit_tpu.errors import UserError


def test_comparisons_are_every_combination():
    found = plan.variations(["pool=map,gap", "optimizer.name=lamb,adamw"])
    assert found == [
        ["pool=map", "optimizer.name=lamb"],
        ["pool=map", "optimizer.name=adamw"],
        ["pool=gap", "optimizer.name=lamb"],
        ["pool=gap", "optimizer.name=adamw"],
    ]
    assert plan.variations([]) == [[]]


def test_values_in_brackets_keep_their_commas():
    assert plan.variations(["image_size=[224,224],[192,256]"]) == [["image_size=[224,224]"], ["image_size=[192,256]"]]


@pytest.mark.parametrize("text", ["pool", "pool="])
def test_comparison_of_nothing_is_refused(text):
    with pytest.raises(UserError, match="compares nothing"):
        plan.variations([text])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--chip=v99"], 'error: chip "v99"'),
        (["--chip=v3,tpu"], 'error: chip "tpu"'),
        (["--batch_per_core=none"], 'error: batch_per_core is "none": give a number from 1 to 65,536, or auto'),
        (["--model=Q/16"], 'error: unknown model "Q/16"'),
        (["--config=missing.yaml"], "error: config missing.yaml cannot be read"),
        (["--compare", "model.pol=map"], 'error: config: unknown key "model.pol" (did you mean "pool"?)'),
        (["--chip=v3,v4", "--advice"], "error: --advice is for one plan"),
        (["--json=missing/plan.json"], "error: --json=missing/plan.json: there is no folder missing"),
        (["--png=."], "error: --png=. is a folder: name a file"),
        (["--cores=9", "--batch_per_core=1"], "error: 9 cores asked for: plans are for one v3:2x2 slice"),
        (["--compare", "pool=map,gip"], 'error: model.pool is "gip" (did you mean "gap"?)'),
        (["--limit=0"], "error: --limit=0 leaves no time"),
        (["--chop=v3"], 'error: unknown flag --chop (did you mean "chip"?)'),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert plan.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_missing_compiler_is_one_line(monkeypatch, capsys):
    from vit_tpu.tpu import compiler

    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert plan.main([]) == 2
    assert capsys.readouterr().err == (
        'error: planning needs the TPU compiler (libtpu), which is not installed: pip install "vit_tpu[plan]"\n'
    )


def test_help_needs_no_tensorflow():
    code = "import sys; from vit_tpu import plan; plan.main(['--help']); assert 'tensorflow' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--batch_per_core" in shown and "not measured" in shown


def test_plain_config_is_an_imagenet_model_in_bfloat16():
    config = plan._config(None, ["model.variant=L/16", "training.grad_clip_norm=null"])
    assert (config.model.variant, config.model.width, config.model.num_classes) == ("L/16", None, 1000)
    assert config.precision == "mixed_bfloat16" and config.training.grad_clip_norm is None


def test_several_keys_and_chips_are_one_table(monkeypatch, capsys):
    from vit_tpu.tpu import planner, report, topologies

    asked = []

    def make_plans(config, chips, cores, batch, options):
        asked.append((config.model.pool, config.optimizer.name, tuple(chips)))
        parts = dict.fromkeys(report.PARTS, 0) | {"activations": 2**30 * len(asked)}
        memory = report.Memory(2**30 * len(asked), 2**34, True, parts, {}, ())
        return [
            planner.Plan(config, topologies.chip(chip), 1, 8, 1, 1, 1, memory, None, None, (), {"libtpu": "0"}, 0.0, 0)
            for chip in chips
        ]

    monkeypatch.setattr(planner, "make_plans", make_plans)
    assert plan.main(["--compare=pool=map,gap", "--compare=optimizer.name=lamb,adamw", "--chip=v3,v5e"]) == 0
    pairs = [("map", "lamb"), ("map", "adamw"), ("gap", "lamb"), ("gap", "adamw")]
    assert asked == [(*pair, ("v3", "v5e")) for pair in pairs]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pool=")]
    assert [row.split("  ")[0] for row in rows] == [
        f"pool={pool}, optimizer.name={name}, {chip}" for pool, name in pairs for chip in ("v3", "v5e")
    ]
    assert [row.split()[3:6] for row in rows[::2]] == [
        [f"{i}.00", "GiB", f"{100 * (i - 1):+.1f}%"] for i in (1, 2, 3, 4)
    ]
