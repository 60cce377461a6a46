"""The checkpoint writer's thread: one job at a time, no error lost."""

import threading

import pytest

from vit_tpu.training.arrays_file import AbandonedError
from vit_tpu.training.background import Background


def test_job_runs_beside_and_the_next_waits_for_it():
    writer, gate, order = Background(), threading.Event(), []

    def first(abandoned):
        gate.wait(5)
        order.append("first")

    writer.submit(first)
    assert writer.busy() and order == []
    writer.poll()  # returns though the job runs
    threading.Timer(0.05, gate.set).start()
    writer.submit(lambda abandoned: order.append("second"))
    writer.wait()
    assert order == ["first", "second"] and not writer.busy()


@pytest.mark.parametrize("call", ["poll", "wait", "submit"])
def test_error_is_raised_by_the_next_call_once(call):
    writer = Background()

    def fail(abandoned):
        raise OSError("disk full")

    writer.submit(fail)
    writer._thread.join()
    with pytest.raises(OSError, match="disk full"):
        writer.submit(fail) if call == "submit" else getattr(writer, call)()
    writer.wait()


def test_job_that_is_taken_over_stops_and_can_be_run_again():
    writer, started = Background(), threading.Event()

    def endless(abandoned):
        started.set()
        while not abandoned():
            pass
        raise AbandonedError

    writer.submit(endless)
    started.wait(5)
    assert writer.take_over() is endless
    assert not writer.busy()
    done = []
    writer.submit(lambda abandoned: done.append(abandoned()))
    writer.wait()
    assert done == [False]  # the next job is not told to give up
    assert writer.take_over() is None
