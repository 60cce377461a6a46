"""A profile holds the steps that were asked for, planned or on demand, whatever steps_per_execution is."""

import functools
import os
import shutil
import signal

import pytest
import tensorflow as tf
import tf_keras as keras
from full_run import full_run
from state_model import images, model

from vit_tpu.diagnose import profile
from vit_tpu.errors import UserError
from vit_tpu.training import profiling, traces


def traces_of(folder):
    return sorted(folder.glob("logs/plugins/profile/*/*.xplane.pb"))


def profiler(folder, window=None, each=4, start=0, total=24, **more):
    return profiling.Profiler(folder, window, steps_per_execution=each, start=start, total_steps=total, **more)


def test_window_10_to_20_of_executions_of_8_holds_steps_9_to_24():
    folder, printed = full_run()
    assert "profile: steps 10 to 20 are recorded as 9 to 24, whole executions of 8" in printed
    assert "profile: steps 9 to 24 in 2 execution(s) of 8" in printed and "NOT" not in printed
    assert f"tensorboard --logdir {folder}/logs  (tab Profile)" in printed
    assert f"python -m vit_tpu.doctor --profile={folder}" in printed
    (trace,) = traces_of(folder)
    assert traces.finish(str(trace)) == [8, 16]  # the first steps of the executions, from 0


def test_xprof_finds_both_executions_and_no_evaluation(tmp_path):
    (trace,) = traces_of(full_run()[0])
    shutil.copy(trace, tmp_path)  # xprof keeps its own files beside a trace
    found = profile.read(tmp_path)
    assert found.steps == 2 and found.step_ms > 1
    assert found.layers["attention"] > 0 and "2 executions" in str(found)
    assert "holds no step" not in found.advice()


def test_turns_of_the_loop_hide_the_executions_from_xprof(tmp_path):
    """What `finish` is for: should xprof learn to see marked executions beside loops, it can go."""
    for name in ("before", "after"):  # xprof keeps its own files beside a trace
        (tmp_path / name).mkdir()
        shutil.copy(full_run()[0] / "as_written.xplane.pb", tmp_path / name / "host.xplane.pb")
    assert profile.read(tmp_path / "before").steps == 0
    assert traces.finish(str(tmp_path / "after" / "host.xplane.pb")) == [8, 16]
    assert profile.read(tmp_path / "after").steps == 2


@functools.cache
def compiled():
    return model(steps_per_execution=4, run_eagerly=False)


def fit(watcher, steps, actions=()):
    data = tf.data.Dataset.from_tensors(tuple(part[:6] for part in images())).repeat()
    compiled().fit(data, steps_per_epoch=steps, verbose=0, callbacks=[AtStep(actions), watcher])


class AtStep(keras.callbacks.Callback):
    """Does something before the execution that begins with a step."""

    def __init__(self, actions):
        super().__init__()
        self._supports_tf_logs = True
        self.actions = dict(actions)

    def on_train_batch_begin(self, batch, logs=None):
        self.actions.pop(batch + 1, lambda: None)()


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run in which a signal asks for a capture before step 5, a file for one of 3 steps before 17, and nonsense
    before steps 29 and 33."""
    folder = tmp_path_factory.mktemp("asked")
    said = []
    request = folder / profiling.REQUEST
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "POLL_SECONDS", 0.0)
        watcher = profiler(folder, total=40, say=said.append)
        actions = {
            5: lambda: os.kill(os.getpid(), signal.SIGUSR1),
            17: lambda: request.write_text("3\n"),
            29: lambda: request.write_text("soon"),
            33: lambda: request.write_text("\N{SUPERSCRIPT TWO}"),
        }
        before = signal.getsignal(signal.SIGUSR1)
        with watcher.request.on_signal():
            fit(watcher, 40, actions)
        assert signal.getsignal(signal.SIGUSR1) == before
    return folder, said


def test_signal_records_the_next_steps_and_a_file_as_many_as_it_says(asked):
    folder, said = asked
    assert "profile: recording steps 5 to 24" in said and "profile: recording steps 25 to 28" in said
    assert [traces.finish(str(trace)) for trace in traces_of(folder)] == [[4, 8, 12, 16, 20], [24]]
    told = [line for line in said if "execution(s)" in line]
    assert "steps 5 to 24 in 5 execution(s) of 4" in told[0] and "steps 25 to 28 in 1 execution(s) of 4" in told[1]
    assert all(f"tensorboard --logdir {folder}/logs" in line for line in told)


def test_a_request_is_removed_and_one_that_says_nothing_sensible_is_named(asked):
    folder, said = asked
    assert not (folder / profiling.REQUEST).exists()
    for text in ("soon", "\N{SUPERSCRIPT TWO}"):
        assert any(f'holds "{text}": write a number of steps, or nothing for 20' in line for line in said)


def test_signal_that_somebody_else_handles_stays_theirs(tmp_path):
    def theirs(number, frame):
        pass

    before = signal.signal(signal.SIGUSR1, theirs)
    try:
        with profiling.Request().on_signal():
            assert signal.getsignal(signal.SIGUSR1) is theirs
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "window, words",
    [
        ((20, 10), "is empty"),
        ((20, 30), "outside this run's steps 1 to 24"),
        ((30, 40), "outside this run's steps 1 to 24"),
        ((0, 4), "outside this run's steps 1 to 24"),
    ],
)
def test_empty_and_outside_windows_are_errors(tmp_path, window, words):
    with pytest.raises(UserError, match=words):
        profiler(tmp_path, window)


def test_a_continued_run_records_what_is_left_of_its_window(tmp_path):
    said = []
    assert profiler(tmp_path, (3, 10), start=4, say=said.append).window == (5, 12)
    assert profiler(tmp_path, (1, 4), start=4, say=said.append).window is None
    assert "recorded as 5 to 12" in said[0] and "were taken before step 4" in said[1]


@pytest.mark.parametrize(
    "window, each, start, total, whole",
    [
        ((10, 20), 8, 0, 64, (9, 24)),
        ((9, 24), 8, 0, 64, (9, 24)),
        ((8, 9), 8, 0, 64, (1, 16)),
        ((60, 62), 8, 0, 62, (57, 62)),  # the last execution is short
        ((10, 12), 8, 3, 64, (4, 19)),  # executions of a continued run begin elsewhere: 4-11, 12-19
        ((5, 5), 1, 0, 64, (5, 5)),
    ],
)
def test_window_is_widened_to_executions(tmp_path, window, each, start, total, whole):
    said = []
    found = profiler(tmp_path, window, each=each, start=start, total=total, say=said.append)
    assert found.window == whole
    assert len(said) == (whole != window)


def test_window_follows_a_run_that_goes_back(tmp_path):
    found = profiler(tmp_path, (10, 20), each=8, total=64, say=lambda line: None)
    found.rewind(6)
    assert found.window == (7, 30)  # executions now begin at 7, 15, 23
    found.rewind(40)
    assert found.window is None


def test_a_capture_that_leaves_no_trace_is_said_and_stops_nothing(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda folder: None)
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: None)
    watcher = profiler(tmp_path, (1, 4), total=8, say=said.append)
    fit(watcher, 8)
    assert len(said) == 1 and "NOT recorded, the profiler wrote no trace" in said[0]


def test_a_profiler_that_is_busy_is_said_and_stops_nothing(tmp_path):
    said = []
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        watcher = profiler(tmp_path, (1, 4), total=8, say=said.append)
        fit(watcher, 8)
    finally:
        tf.profiler.experimental.stop()
    assert len(said) == 1 and "NOT recorded, the profiler does not start" in said[0]


def test_a_capture_on_demand_comes_before_one_that_is_planned_for_later(tmp_path, monkeypatch):
    said, began = [], []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda folder: began.append(watcher.step + 1))
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: None)
    watcher = profiler(tmp_path, (17, 20), total=24, say=said.append)

    def ask(steps):
        watcher.request.steps = steps

    fit(watcher, 24, {5: lambda: ask(3), 13: lambda: ask(5)})
    assert began == [5, 17]
    assert said[0] == "profile: recording steps 5 to 8"
    assert said[2] == "profile: steps 17 to 20 are recorded anyway: nothing else until then"


def test_a_damaged_trace_is_said_and_stops_nothing(tmp_path, monkeypatch):
    said, found = [], iter([set(), {str(tmp_path / "host.xplane.pb")}])
    (tmp_path / "host.xplane.pb").write_bytes(b"\xff\xff")
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda folder: None)
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: None)
    watcher = profiler(tmp_path, (1, 4), total=8, say=said.append)
    monkeypatch.setattr(watcher, "_traces", lambda: next(found))
    fit(watcher, 8)
    assert len(said) == 1 and "host.xplane.pb cannot be read" in said[0]


def test_a_folder_that_cannot_be_written_to_stops_no_training(tmp_path, monkeypatch):
    def denied(folder):
        raise PermissionError(13, "Permission denied")

    said = []
    monkeypatch.setattr(tf.profiler.experimental, "start", denied)
    fit(profiler(tmp_path, (1, 4), total=8, say=said.append), 8)
    assert said == ["profile: NOT recorded, the profiler does not start (Permission denied)"]
