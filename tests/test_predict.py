"""The command line of vit_tpu.predict: rows, files that cannot be read, wrong use, exit codes."""

import csv
import io
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import trained_runs

from vit_tpu import predict


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in")
    rng = np.random.default_rng(0)
    for i in range(100):
        (folder / f"{i:03}.png").write_bytes(tf.io.encode_png(rng.integers(0, 255, (8, 8, 1)).astype(np.uint8)).numpy())
    return folder


@pytest.fixture
def damaged(pictures):
    kept = {name: (pictures / name).read_bytes() for name in ("007.png", "042.png", "099.png")}
    for name, content in zip(kept, (b"", b"<html>", kept["099.png"][:60])):
        (pictures / name).write_bytes(content)
    yield kept
    for name, content in kept.items():
        (pictures / name).write_bytes(content)


def test_help_teaches(capsys):
    assert predict.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "python -m vit_tpu.predict" in out and "standard input" in out and "--sheet" in out


def test_unreadable_files_are_named_and_all_others_done(pictures, damaged, tmp_path, capsys):
    arguments = [f"--workdir={trained_runs.digits()}", str(pictures), f"--out={tmp_path / 'x.csv'}",
                 f"--json={tmp_path / 'x.json'}", "--batch_size=32"]  # fmt: skip
    assert predict.main(arguments) == 1
    captured = capsys.readouterr()
    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 97 and captured.out == ""
    assert [row["file"][-7:] for row in rows] == [f"{i:03}.png" for i in range(100) if i not in (7, 42, 99)]
    named = [line for line in captured.err.splitlines() if line.startswith("unreadable: ")]
    assert len(named) == 3 and all(name in line for name, line in zip(damaged, named))
    assert "97 of 100 files predicted, 3 unreadable" in captured.err
    facts = json.loads((tmp_path / "x.json").read_text())
    assert facts["predicted"] == 97 and [entry["file"][-7:] for entry in facts["unreadable"]] == list(damaged)


def test_a_table_on_the_terminal_and_a_sheet(pictures, tmp_path, capsys):
    arguments = [f"--workdir={trained_runs.digits()}", str(pictures / "00?.png"), str(pictures / "050.png"),
                 f"--sheet={tmp_path / 's.png'}", f"--explain={tmp_path / 'e.png'}", "--sheet_images=6"]  # fmt: skip
    assert predict.main(arguments) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 11 and "000.png" in lines[0] and "050.png" in lines[-1] and "%" in lines[0]
    assert (tmp_path / "s.png").stat().st_size > 5000 and (tmp_path / "e.png").stat().st_size > 5000


def test_names_on_standard_input(pictures, tmp_path, monkeypatch, capsys):
    names = [str(pictures / "003.png"), str(pictures / "gone.png"), str(pictures / "001.png")]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(names)))
    assert predict.main([f"--workdir={trained_runs.digits()}", "-", f"--out={tmp_path / 'x.jsonl'}", "--top=2"]) == 1
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [names[0], names[2]] and len(rows[0]["top"]) == 2
    assert f"unreadable: {names[1]}: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.jpg"], "give --workdir=RUN or --weights=FILE"),
        (["--workdir=RUN"], "no images: name files"),
        (["--workdir=RUN", "*.gif"], 'no image matches "*.gif"'),
        (["--workdir=RUN", "nope.jpg"], "there is no file nope.jpg"),
        (["--workdir=nowhere", "PICTURES"], "nowhere is not the folder of a run"),
        (["--workdir=RUN", "PICTURES", "--out=x.txt"], "neither .csv nor .jsonl"),
        (["--workdir=RUN", "PICTURES", "--out=no/x.csv"], "there is no folder no"),
        (["--workdir=RUN", "PICTURES", "--sheet=no/x.png"], "there is no folder no"),
        (["--workdir=RUN", "PICTURES", "--sheet=x.xyz"], "end the name in .png"),
        (["--workdir=RUN", "PICTURES", "--explain=x.png", "--attention=map"], "it has no MAP head"),
        (["--workdir=RUN", "PICTURES", "--top=0"], "--top=0"),
        (["--workdir=", "PICTURES"], "give --workdir=RUN or --weights=FILE"),
        (["--workdir=RUN", ""], "there is no file with an empty name"),
        (["--workdir=RUN", "PICTURES", "--normalize=imagenet"], "--normalize goes with --weights"),
        (["--workdir=RUN", "PICTURES", "--sheet=FOLDER.png"], "--sheet=FOLDER.png is a folder"),
        (["--workdir=RUN", "PICTURES", "--out=FOLDER.csv"], "FOLDER.csv is a folder"),
        (["--workdir=RUN", "PICTURES", "--json=FOLDER.csv"], "--json=FOLDER.csv is a folder"),
        (["--workdir=RUN", "PICTURES", "--out=x.csv", "--json=./x.csv"], "--out and --json would both write ./x.csv"),
        (["--workdir=RUN", "PICTURES", "--sheet=x.png", "--explain=x.png"], "--sheet and --explain would both write"),
        (["--workdir=RUN", "PICTURES", "--sheet=PICTURES/003.png"], "would overwrite one of the images"),
        (["--workdir=RUN", "PICTURES", "--out=x.csv", "--batch_size=-3"], "batch_size is -3"),
        (["--workdir=RUN", "PICTURES", "--shet=x.png"], 'did you mean "sheet"'),
        (["--workdir=RUN", "PICTURES", "--class_names=x.txt"], "--class_names goes with --weights"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, pictures, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(trained_runs.digits())
    (tmp_path / "PICTURES").symlink_to(pictures)
    for name in ("FOLDER.png", "FOLDER.csv"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    assert predict.main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.filterwarnings("error::UserWarning")  # such as of a script that the sheet's font lacks
def test_pipes_and_names_that_are_not_utf8(pictures, tmp_path, capsys):
    import os

    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder)
    os.mkfifo(tmp_path / "in" / "pipe.png")
    os.mkfifo(tmp_path / "pipe.png")
    odd = folder + b"/r\xe9sum\xe9 $_$.png"
    (tmp_path / "in" / "日本.png").write_bytes((pictures / "000.png").read_bytes())
    try:
        with open(odd, "wb") as file:
            file.write((pictures / "001.png").read_bytes())
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    arguments = [f"--workdir={trained_runs.digits()}", str(tmp_path / "in")]
    drawn = [f"--sheet={tmp_path / 's.png'}", f"--explain={tmp_path / 'e.png'}"]
    assert predict.main([*arguments, *drawn]) == 0
    captured = capsys.readouterr()
    assert (
        "r\\udce9sum\\udce9 $_$.png" in captured.out and "1 file(s) without an image's ending left out" in captured.err
    )
    assert (tmp_path / "s.png").exists() and (tmp_path / "e.png").exists()
    out = tmp_path / "x.csv"  # a pipe named by itself is not waited for
    assert predict.main([*arguments, str(tmp_path / "pipe.png"), "/dev/null", f"--out={out}"]) == 1
    assert capsys.readouterr().err.count("it is no regular file") == 2
    assert odd in out.read_bytes()  # the name's own bytes: what reads the table finds the file


@pytest.mark.parametrize("flag", ["out", "sheet", "explain", "json"])
def test_full_disk_is_one_line(flag, pictures, tmp_path, capsys):
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / ("x.csv" if flag == "out" else "x.png")
    path.symlink_to("/dev/full")
    assert predict.main([f"--workdir={trained_runs.digits()}", str(pictures / "001.png"), f"--{flag}={path}"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "cannot be written (No space left on device)" in lines[0]


def test_a_misspelt_file_is_guessed_by_its_name_alone(tmp_path, capsys):
    (tmp_path / "kitten.png").write_bytes(b"x")
    (tmp_path / ".hidden.png").write_bytes(b"x")
    for given, words in (("kiten.png", 'did you mean "kitten.png"'), ("0815", "there is no file")):
        assert predict.main([f"--workdir={trained_runs.digits()}", str(tmp_path / given)]) == 2
        error = capsys.readouterr().err
        assert words in error and ("did you mean" in error) == (given == "kiten.png")
