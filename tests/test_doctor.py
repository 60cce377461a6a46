"""`python -m vit_tpu.doctor`: exit codes, JSON, wrong use."""

import json

import pytest

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
