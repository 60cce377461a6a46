"""Evaluating and saving during `fit`, with the callbacks driven by hand."""

import json
import threading
import types

import numpy as np
import pytest
import tensorflow as tf
from state_model import images, model

from vit_tpu import UserError
from vit_tpu.training import checkpoints, state, storage
from vit_tpu.training.callbacks import Checkpointer, Evaluator, callbacks
from vit_tpu.training.checkpoints import Keep
from vit_tpu.training.logger import Logger
from vit_tpu.training.stopping import StopOnRequest


@pytest.fixture(scope="module")
def trained():
    made = model()
    made.fit(*images(), batch_size=6, epochs=1, verbose=0)
    return made


def started(callback, made):
    callback.set_model(made)
    callback.set_params({"steps": 1000, "epochs": 1})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(trained, tmp_path, monkeypatch):
    gate, written = threading.Event(), []
    original = checkpoints.write

    def slow(root, step, *rest):
        gate.wait(10)
        written.append(step)
        return original(root, step, *rest)

    monkeypatch.setattr(checkpoints, "write", slow)
    saver = started(Checkpointer(tmp_path, 2), trained)
    saver.on_train_batch_end(1)
    saver.on_train_batch_end(2)
    assert written == [] and saver.writer.busy()
    threading.Timer(0.1, gate.set).start()
    saver.on_train_batch_end(3)  # step 4 is due: waits for step 2
    assert written[:1] == [2]
    saver.writer.wait()
    saver.on_train_batch_end(4)
    saver.on_train_end()
    assert written == [2, 4, 5] and checkpoints.steps(str(tmp_path)) == [5, 4]


@pytest.mark.parametrize("best", [None, 2])
def test_at_the_end_the_last_state_goes_first_and_only_the_best_is_not_given_up(best, trained, tmp_path, monkeypatch):
    begun, written, original = threading.Event(), [], checkpoints.write

    def slow(root, step, arrays, extra, abandoned, header):
        begun.set()
        while threading.current_thread() is not threading.main_thread():
            if abandoned():
                raise checkpoints.arrays_file.AbandonedError
        written.append(step)
        return original(root, step, arrays, extra, abandoned, header)

    monkeypatch.setattr(checkpoints, "write", slow)
    evaluator = types.SimpleNamespace(best={"step": best} if best else {})
    saver = started(Checkpointer(tmp_path, 2, keep=Keep(2, 0, True), evaluator=evaluator), trained)
    saver.on_train_batch_end(1)
    saver.on_train_batch_end(2)
    begun.wait(5)
    saver.on_train_end()
    assert written == ([2, 3] if best else [3]) and checkpoints.steps(str(tmp_path)) == written[::-1]


def test_damaged_checkpoint_that_was_passed_over_does_not_push_out_a_whole_one(trained, tmp_path):
    for step in (2, 3):
        checkpoints.write(str(tmp_path), step, {}, {})
    (tmp_path / "00000003/manifest.json").write_text("damaged")
    saver = started(Checkpointer(tmp_path, 2, start=2), trained)
    for batch in (0, 1):  # steps 3, which is not saved, and 4
        saver.on_train_batch_end(batch)
    saver.writer.wait()
    assert checkpoints.steps(str(tmp_path)) == [4, 3, 2]
    saver.on_train_batch_end(2)
    saver.on_train_batch_end(3)
    saver.writer.wait()
    assert checkpoints.steps(str(tmp_path)) == [6, 4, 3]


def test_what_is_written_is_the_state_of_its_step(trained, tmp_path, monkeypatch):
    gate = threading.Event()
    original = checkpoints.write
    monkeypatch.setattr(checkpoints, "write", lambda *a: (gate.wait(10), original(*a))[1])
    before = {n: np.array(a) for n, (a, _) in state.snapshot(trained).items()}
    saver = started(Checkpointer(tmp_path, 2), trained)
    saver.on_train_batch_end(1)
    trained.fit(*images(), batch_size=6, epochs=2, verbose=0)
    gate.set()
    saver.writer.wait()
    found = state.newest(tmp_path)
    got = {name: array for name, array, _ in checkpoints.read(*found)}
    assert all(np.array_equal(before[name], got[name]) for name in before)


def test_error_of_the_writer_stops_training_at_the_next_boundary(trained, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    saver = started(Checkpointer(tmp_path, 2), trained)
    monkeypatch.setattr(storage, "writing", full)
    saver.on_train_batch_end(1)
    saver.writer._thread.join()
    with pytest.raises(UserError, match="step 2 cannot be written .*No space left"):
        saver.on_train_batch_end(2)


def test_state_gone_wrong_is_not_written(trained, tmp_path):
    saver = started(Checkpointer(tmp_path, 2), trained)
    trained.counters.bad_step.assign(2)
    try:
        with pytest.raises(FloatingPointError, match="step 2"):
            saver.on_train_batch_end(1)
    finally:
        trained.counters.bad_step.assign(0)
    assert not checkpoints.steps(str(tmp_path))


def test_best_evaluation_is_saved_at_its_step_and_kept_with_its_weights(trained, tmp_path):
    evaluator = types.SimpleNamespace(best={})
    saver = started(
        Checkpointer(
            tmp_path / "c", 4, keep=Keep(1, 0, True), evaluator=evaluator, weights=str(tmp_path / "w"), averaged=True
        ),
        trained,
    )
    for step in range(1, 13):
        if step == 3:
            evaluator.best = {"step": 3, "accuracy": 0.5}
        saver.on_train_batch_end(step - 1)
    saver.writer.wait()
    assert checkpoints.steps(str(tmp_path / "c")) == [12, 3]
    assert storage.names(str(tmp_path / "w")) == ["00000003", "00000012"]
    stored = dict(checkpoints.arrays_file.read(str(tmp_path / "w/00000012/model.safetensors")))
    average = dict(zip([p.path for p in trained.trained], trained.averages.averages))
    np.testing.assert_array_equal(stored["head/kernel"], average["head/kernel"].numpy())


def test_run_whose_folder_in_a_store_was_taken_over_saves_no_more(trained, tmp_path):
    def taken():
        raise UserError("workdir was taken over")

    saver = started(Checkpointer(tmp_path, 2, owned=taken), trained)
    saver.on_train_batch_end(1)
    with pytest.raises(UserError, match="taken over"):
        saver.writer.wait()
    assert not checkpoints.steps(str(tmp_path))


def evaluating(made, tmp_path, batches=3, **more):
    x, y = images()
    data = tf.data.Dataset.from_tensor_slices((x, y, np.ones(6, np.float32))).batch(6 // batches, drop_remainder=True)
    logger = started(Logger(tmp_path, 100, batch_size=6), made)
    return started(Evaluator(data, 4, logger, **more), made)


def test_stop_during_an_evaluation_leaves_it_and_its_figures(trained, tmp_path):
    stop = StopOnRequest()
    seen = []

    class Request(StopOnRequest):
        def on_test_batch_end(self, batch, logs=None):
            seen.append((batch, stop.doing, self.doing))
            self.requested = True
            super().on_test_batch_end(batch, logs)

    request = Request()
    evaluator = evaluating(trained, tmp_path, stop=request)
    evaluator.on_train_batch_end(3)
    assert [s[0] for s in seen] == [0] and seen[0][2] == "evaluating"  # one of three batches
    assert evaluator.result == {} and evaluator.best == {} and evaluator.evaluated == 0
    assert request.doing == "starting"
    evaluator.on_train_batch_end(7)
    assert len(seen) == 1  # none is begun once a stop is requested


def test_several_workers_agree_on_a_stop_before_any_begins_an_evaluation(trained, tmp_path):
    asked = []
    team = types.SimpleNamespace(size=2, check=lambda: None)
    stop = StopOnRequest(team=team)
    team.reached = lambda boundary, ask: not asked.append((boundary, stop.doing))
    evaluator = evaluating(trained, tmp_path, stop=stop)
    evaluator.on_train_batch_end(3)
    assert stop.requested and asked == [(1, "starting")] and evaluator.result == {}


def test_evaluation_that_was_left_is_made_up_for_at_the_start(trained, tmp_path):
    late = evaluating(trained, tmp_path, start=4, metrics={"evaluated": 0, "best": {"step": 2, "accuracy": 2.0}})
    assert late.evaluated == 4 and late.result["count"] == 6
    assert late.best["step"] == 2  # better than what came now
    done = evaluating(trained, tmp_path, start=4, metrics={"evaluated": 4, "validation": {"accuracy": 0.25}})
    assert done.result == {"accuracy": 0.25}


def test_best_and_last_evaluation_go_through_the_checkpoint(trained, tmp_path):
    evaluator = evaluating(trained, tmp_path)
    evaluator.on_train_batch_end(3)
    again = Evaluator(None, 4, None, start=4, metrics=evaluator.state())
    assert again.best == evaluator.best and again.best["step"] == 4 and again.result == evaluator.result


def test_second_fit_in_a_notebook_goes_on_counting_with_old_and_new_callbacks(tmp_path):
    made, options = model(), {"batch_size": 1, "every": 2, "checkpoint_every": 2}
    watchers = callbacks(tmp_path, **options)
    for chosen in (watchers, watchers, callbacks(tmp_path, **options)):
        made.fit(*images(), batch_size=1, epochs=1, verbose=0, callbacks=chosen)
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(2, 20, 2))
    found = checkpoints.steps(str(tmp_path / "checkpoints"))
    assert found == [18, 16] and checkpoints.read_manifest(str(tmp_path / "checkpoints/00000018"))["step"] == 18
