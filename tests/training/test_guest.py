"""A worker that does not write sees the folder of worker 0, or says that it does not."""

import dataclasses

import pytest

from vit_tpu import load_config
from vit_tpu.cluster import Cluster
from vit_tpu.errors import UserError
from vit_tpu.training import guest
from vit_tpu.training.hosts import Team
from vit_tpu.training.resume import Start
from vit_tpu.training.workdir import Workdir


class Second(Team):
    """Worker 1, to whom worker 0 says what a test wants."""

    def __init__(self, **decided):
        super().__init__(Cluster(("a:1", "b:2"), 1), timeout=0.5)
        self.decided = decided

    def agree(self, what, make):
        return self.decided[what]

    def gather(self, what, value):
        return []

    def meet(self, what):
        pass


@pytest.fixture
def home(tmp_path):
    """The folder that worker 0 writes."""
    folder = Workdir(tmp_path / "run")
    folder.make(load_config())
    yield folder
    folder.release()


def test_guest_reads_checkpoints_there_and_writes_elsewhere(home):
    folder = guest.open_folder(Second(workdir=home.path), lambda: pytest.fail("worker 0 opens it"))
    assert folder.checkpoints == home.checkpoints
    assert folder.path != home.path
    home.write_json("summary.json", {"status": "done"})
    assert folder.summary()["status"] == "done"
    folder.make(load_config())  # must not sweep what worker 0 is writing
    mine = folder.path
    folder.release()
    import os

    assert not os.path.exists(mine) and os.path.exists(home.path)


def test_folder_that_a_worker_does_not_see_is_named_with_what_would_do(home, tmp_path):
    other = guest.Guest(str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"does not see .*elsewhere.*share under one path.*gs://"):
        guest.make_folder(Second(folder="abc"), other, load_config())
    other.release()


def test_folder_of_the_same_name_on_another_disk_is_not_taken_for_it(home):
    home._write(guest._TOKEN, "left by another run")
    other = guest.Guest(home.path)
    with pytest.raises(UserError, match="does not see"):
        guest.make_folder(Second(folder="abc"), other, load_config())
    home._write(guest._TOKEN, "abc")
    guest.make_folder(Second(folder="abc"), other, load_config())
    other.release()


def test_checkpoint_that_a_worker_does_not_see_is_named(tmp_path):
    start = dataclasses.asdict(Start(step=3, path=str(tmp_path / "00000003"), notes=("a",)))
    team = Second(checkpoint={**start, "notes": ["a"]}, **{"newest checkpoint": [start["path"], {"step": 3}]})
    for ask in (lambda: guest.agree_start(team, None), lambda: guest.agree_checkpoint(team, "x")):
        with pytest.raises(UserError, match="does not see .*00000003"):
            ask()
    (tmp_path / "00000003").mkdir()
    (tmp_path / "00000003" / "manifest.json").write_text("{}")
    assert guest.agree_start(team, None) == Start(step=3, path=start["path"], notes=("a",))
    assert guest.agree_checkpoint(team, "x") == (start["path"], {"step": 3})


def test_the_number_of_the_worker_is_not_kept_in_the_run(tmp_path):
    folder = Workdir(tmp_path / "run")
    guest.make_folder(Team(), folder, load_config(None, {"workers": ["a:1", "b:2"], "worker": 0}))
    assert folder.config()["worker"] is None
    folder.release()


def test_alone_the_folder_is_opened_as_it_is(home):
    assert guest.open_folder(Team(), lambda: home) is home
