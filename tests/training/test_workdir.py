"""A run's folder whose files were damaged, lost or left by an earlier part of the run."""

import pytest
from tiny_run import config

from vit_tpu import UserError
from vit_tpu import config as configs
from vit_tpu.training import checkpoints, storage
from vit_tpu.training.logger import Logger
from vit_tpu.training.workdir import Workdir


def put(folder, settings):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(configs.to_yaml(settings))
    checkpoints.write(str(folder / "checkpoints"), 4, {}, {"config": configs.to_dict(settings)})


@pytest.mark.parametrize("text", ["a: [", "", "- 1\n", "\x00"])
def test_damaged_config_is_one_sentence_that_says_what_to_do(text, tmp_path):
    put(tmp_path / "run", config())
    (tmp_path / "run/config.yaml").write_text(text)
    with pytest.raises(UserError, match="config.yaml is damaged: delete it"):
        Workdir.open(tmp_path / "run", config())
    (tmp_path / "run/config.yaml").unlink()
    Workdir.open(tmp_path / "run", config()).release()  # the checkpoints hold it, too


@pytest.mark.parametrize("text", ['{"status": "do', "[]"])
def test_damaged_summary_is_one_sentence(text, tmp_path):
    put(tmp_path / "run", config())
    (tmp_path / "run/summary.json").write_text(text)
    with pytest.raises(UserError, match="summary.json is damaged: delete it"):
        Workdir(tmp_path / "run").summary()


@pytest.mark.parametrize("text", ["a: [", "optimizer:\n  name: gone\n"])
def test_another_runs_odd_config_does_not_stop_a_new_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "runs/digits", config())
    (tmp_path / "runs/digits/config.yaml").write_text(text)
    assert Workdir.open(None, config()).path == "runs/digits-2"


def test_longer_run_that_is_killed_is_no_finished_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "runs/digits", config())
    (tmp_path / "runs/digits/summary.json").write_text('{"status": "done"}')
    longer = config(training__steps=99)
    folder = Workdir.open("runs/digits", longer)
    folder.make(longer)
    folder.release()  # killed: no summary was written
    again = Workdir.open(None, longer)
    assert again.path == "runs/digits" and again.summary() == {}
    again.release()


def test_full_disk_is_one_sentence_for_logs_and_summary_too(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    logger = Logger(tmp_path, 2, batch_size=8)
    logger.open()
    monkeypatch.setattr(storage, "append_text", full)
    with pytest.raises(UserError, match=r"log of step 2 .*No space left on device.*run the same command again"):
        logger.validation(2, {"loss": 1.0})
    monkeypatch.setattr(storage, "write_text", full)
    with pytest.raises(UserError, match=r"summary.json cannot be written \(No space left"):
        Workdir(tmp_path).write_json("summary.json", {})
    logger.close()
