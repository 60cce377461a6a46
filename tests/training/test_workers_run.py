"""Two processes on this machine train as one does: killed, stopped, and continued by another number of them."""

import signal
import time

import numpy as np
import pytest
import tiny_run
import worker_runs
import yaml

from vit_tpu import config as configs
from vit_tpu.training import checkpoints
from vit_tpu.training.run import run

pytestmark = pytest.mark.slow

STEPS = 400
SETTINGS = {
    "batch_size": 8, "accumulation_steps": 2, "training.steps": STEPS, "loss_scale.mode": "dynamic",
    "loss_scale.growth_steps": 100, "training.ema": 0.9, "evaluate_ema": True, "mixup": 0.2, "log_every": 20,
    "evaluate_every": 100, "checkpoint_every": 40, "strategy": "auto", "worker_timeout": 60.0,
    # A key's bias has no gradient but rounding noise, of which Adam would make steps of any size.
    "optimizer.freeze": ("blocks/*/attention/key/bias",),
}  # fmt: skip


def settings(**changes):
    return tiny_run.config(**SETTINGS, **changes)


def state_of(folder):
    """Returns step and arrays of a run's newest checkpoint."""
    path, manifest = checkpoints.newest(f"{folder}/checkpoints")
    return manifest["step"], {name: array for name, array, _ in checkpoints.read(path, manifest)}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """One process throughout; and a run that two begin (one is killed), one goes on with, two go on with (one gets a
    SIGTERM), and one ends."""
    place = tmp_path_factory.mktemp("workers")
    file = place / "tiny.yaml"
    file.write_text(yaml.safe_dump(configs.to_dict(settings())))
    found = {"alone": run(settings(), place / "alone"), "place": place}
    folder = found["folder"] = place / "shared"
    with worker_runs.workers(folder, f"--config={file}") as pair:
        pair.wait_for_step(60)
        pair.send(1, signal.SIGKILL)
        at = time.monotonic()
        found["killed"] = pair.codes(), pair.said(0), time.monotonic() - at
    found["after_kill"] = checkpoints.steps(f"{folder}/checkpoints")[0]
    with worker_runs.workers(folder, f"--config={file}") as pair:
        pair.wait_for_step(260)
        pair.send(1, signal.SIGTERM)
        found["stopped"] = pair.codes(), pair.said(0), pair.said(1)
    found["after_stop"], _ = state_of(folder)
    found["end"] = run(settings(), folder)
    return found


def test_killed_worker_stops_the_other_in_bounded_time_with_one_clear_message(story):
    codes, said, seconds = story["killed"]
    assert codes == [75, -signal.SIGKILL]
    assert seconds < 30
    ending = said[said.index("stopped:") :]
    assert "worker 1 (127.0.0.1:" in ending and "is gone" in ending and "same commands" in ending
    assert "Traceback" not in said
    assert 40 <= story["after_kill"] < STEPS


def test_sigterm_to_one_worker_saves_the_same_step_and_ends_all_with_75(story):
    codes, chief, other = story["stopped"]
    assert codes == [75, 75], chief + other
    assert "SIGTERM" in other and "stops with all other workers" in other
    assert "Traceback" not in chief + other
    assert 260 <= story["after_stop"] < STEPS and story["after_stop"] % 2 == 0


def test_worker_that_is_not_the_first_prints_a_line_and_writes_nothing(story):
    _, chief, other = story["stopped"]
    ours = [line for line in other.splitlines() if "SIGTERM" not in line and "absl" not in line and "grpc" not in line]
    assert len(ours) == 1 and "worker 0 prints and writes" in ours[0]
    assert "continued from step" in chief
    steps = [line["step"] for line in worker_runs.lines(story["folder"]) if "loss" in line]
    assert steps == sorted(set(steps))


def test_numbers_of_processes_change_and_the_end_is_that_of_one(story):
    (step, one), (same, several) = state_of(story["place"] / "alone"), state_of(story["folder"])
    assert step == same == STEPS and one.keys() == several.keys()
    for name, array in one.items():
        np.testing.assert_allclose(several[name], array, rtol=0, atol=2e-6, err_msg=name)
    assert story["end"].applied_updates == story["alone"].applied_updates == STEPS
    assert story["end"].compilations == 1


def test_evaluation_shared_by_two_counts_every_example_once(story):
    ours = {x["step"]: x["validation"] for x in worker_runs.lines(story["folder"]) if "validation" in x}
    theirs = {x["step"]: x["validation"] for x in worker_runs.lines(story["place"] / "alone") if "validation" in x}
    assert ours.keys() == theirs.keys() == {100, 200, 300, 400}
    for step, values in theirs.items():
        assert ours[step]["count"] == 360
        assert ours[step]["accuracy"] == values["accuracy"]
        assert ours[step]["loss"] == pytest.approx(values["loss"], abs=1e-5)
