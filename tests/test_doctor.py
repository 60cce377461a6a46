"""`python -m vit_tpu.doctor`: exit codes, JSON, wrong use."""

import json

import pytest

import vit_tpu
from vit_tpu import config as configs
from vit_tpu import doctor


def test_this_machine_and_the_digits_are_healthy(tmp_path, capsys):
    out = tmp_path / "found.json"
    code = doctor.main(["--set=data.source=digits", f"--workdir={tmp_path / 'run'}", f"--json={out}"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "0 to fix" in text
    assert {row["topic"] for row in json.loads(out.read_text())} >= {"versions", "xla", "data", "batch", "disk"}
    assert list(tmp_path.iterdir()) == [out]  # the run's folder is not made


def test_something_to_fix_is_exit_code_1(capsys):
    assert doctor.main(["--set=batch_size=63", "--set=accumulation_steps=2"]) == 1
    assert "FIX " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--hardware=TPUU"], 'did you mean "TPU"'),
        (["--replicas=0"], "give a number above 0"),
        (["--hardware=TPU"], "--hardware is about a run"),
        (["--profile=/nowhere"], "holds no trace"),
        (["--profile=/nowhere", "--config=x.yaml"], "--profile has no use for --config"),
        (["--replay=/nowhere", "--hardware=TPU"], "--replay has no use for --hardware"),
        (["--ranges", "--replicas=2"], "--ranges has no use for --replicas"),
        (["--memory", "--ranges"], "--memory and --ranges are two questions"),
        (["--ranges", "--workdir=/nowhere", "--set=batch_size=8"], "leave --config and --set out"),
        (["--json=no/such/x.json"], "there is no folder no/such"),
        (["--json=/"], "--json=/ is a folder"),
        (["--confg=x"], 'did you mean "config"'),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert doctor.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_folder_of_a_run_is_looked_at_with_its_own_config(tmp_path, capsys):
    config = vit_tpu.load_config(None, {"width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2})
    (tmp_path / "config.yaml").write_text(configs.to_yaml(config))
    out = tmp_path / "memory.json"
    assert doctor.main(["--memory", f"--workdir={tmp_path}", f"--json={out}"]) == 0
    own = json.loads(out.read_text())["parts"]["weights"]
    assert doctor.main(["--memory", f"--workdir={tmp_path}", "--set=model.depth=2", f"--json={out}"]) == 0
    assert 0 < own < json.loads(out.read_text())["parts"]["weights"] / 5
    capsys.readouterr()
    assert doctor.main([f"--workdir={tmp_path}"]) == 0
    assert f"{tmp_path} can be written" in capsys.readouterr().out


def test_folder_with_something_else_in_it_must_be_fixed(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("all of it")
    assert doctor.main([f"--workdir={tmp_path}", "--set=data.source=digits"]) == 1
    assert "holds files that are not a run's" in capsys.readouterr().out
