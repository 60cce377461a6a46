"""The workers of a run find each other, agree, and end together; here as threads, without TensorFlow."""

import concurrent.futures
import socket
import threading
import time

import pytest
import worker_runs

from vit_tpu.cluster import Cluster
from vit_tpu.errors import UserError, WorkerError
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.training import hosts, rendezvous
from vit_tpu.training.hosts import Team


@pytest.fixture
def addresses():
    return tuple(f"127.0.0.1:{port}" for port in worker_runs.free_ports(3))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(Team, "_backstop", lambda self: None)  # a thread of this test must not end the tests


def together(addresses, work, timeout=5.0, facts=lambda i: {"training.batch_size": 32}, count=None):
    """Runs work(team) on every worker at once; returns what each returned or raised."""

    def one(index):
        team = Team(Cluster(addresses, index), timeout)
        try:
            team.connect(facts(index))
            result = work(team)
        except BaseException as error:
            team.leave(error)
            return error
        team.leave()
        return result

    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(one, range(count or len(addresses))))


def test_all_get_what_the_first_decides_and_it_gets_what_all_have(addresses, quick):
    def work(team):
        value = team.agree("start", lambda: {"step": 7, "path": None})
        gathered = team.gather("place", team.index * 10)
        team.meet("end")
        return value, gathered

    assert together(addresses, work) == [
        ({"step": 7, "path": None}, [0, 10, 20]), ({"step": 7, "path": None}, []), ({"step": 7, "path": None}, []),
    ]  # fmt: skip


def test_alone_everything_is_decided_at_once():
    team = Team()
    assert team.chief and team.agree("x", lambda: 3) == 3 and team.gather("x", 4) == [4]
    team.meet("end")
    team.check()


def test_missing_worker_is_named_by_all_that_came(addresses):
    began = time.monotonic()
    first, second = together(addresses, lambda team: None, timeout=1.5, count=2)
    assert isinstance(first, UserError) and isinstance(second, UserError)
    assert f"worker 2 ({addresses[2]}) did not come within 1.5 s" in str(first)
    assert str(second) == str(first)
    assert time.monotonic() - began < 10


def test_missing_first_worker_is_named(addresses):
    with pytest.raises(UserError, match=rf"worker 0 \({addresses[0]}\) did not come within 1 s.*refused"):
        rendezvous.join(Cluster(addresses, 1), {}, 1.0)


def test_another_setting_is_named_with_both_values(addresses):
    found = together(addresses[:2], lambda team: None, facts=lambda i: {"training.batch_size": 32 * (i + 1)})
    for error in found:
        assert isinstance(error, UserError)
        assert "training.batch_size 64 and worker 0 has 32" in str(error)


def test_another_list_of_workers_is_named(addresses):
    """As TF_CONFIG may have it, which is no setting."""
    lists = [addresses[:2], (addresses[0], "127.0.0.1:1")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(Team(Cluster(lists[i], i), 5.0).connect, {}) for i in range(2)]
        for job in jobs:
            assert "worker 1" in str(job.exception()) and f"['{addresses[0]}', '127.0.0.1:1']" in str(job.exception())


def test_two_that_say_they_are_the_same_worker_are_refused(addresses):
    pairs = [Cluster(addresses, 0), Cluster(addresses, 1), Cluster(addresses, 1)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(rendezvous.join, pair, {}, 5.0) for pair in pairs]
        errors = [str(job.exception()) for job in jobs]
    assert all("two processes say that they are worker 1" in error for error in errors)


def test_port_in_use_is_an_error_that_names_it(addresses):
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(addresses[0].rpartition(":")[2])))
        other.listen()
        with pytest.raises(UserError, match="worker 0 cannot listen at 127.0.0.1:.*another process has the port"):
            rendezvous.join(Cluster(addresses[:2], 0), {}, 1.0)


def test_stranger_at_the_port_does_no_harm(addresses, quick):
    def knock():
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", int(addresses[0].rpartition(":")[2]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            time.sleep(0.2)

    def late(index):
        if index:
            time.sleep(0.8)
        return {}

    thread = threading.Thread(target=knock)
    thread.start()
    assert together(addresses[:2], lambda team: team.agree("x", lambda: 1), facts=late) == [1, 1]
    thread.join()


@pytest.mark.parametrize("gone", [0, 1])
def test_worker_that_vanishes_is_named_to_all_with_code_75(addresses, quick, gone):
    def work(team):
        team.meet("start")
        if team.index == gone:
            team._left.update(team._links)  # a process that dies tells nobody
            for link in team._links.values():  # as the system does for it
                link.connection.shutdown(socket.SHUT_RDWR)
            return "gone"
        team.meet("never")

    found = together(addresses, work)
    for index, error in enumerate(found):
        if index != gone:
            assert isinstance(error, WorkerError) and error.code == 75
            assert f"worker {gone} ({addresses[gone]}) is gone" in str(error) and "same commands" in str(error)


@pytest.mark.parametrize("bad", [0, 2])
def test_failure_of_one_ends_all_with_its_message_and_code(addresses, quick, bad):
    def work(team):
        team.meet("start")
        if team.index == bad:
            raise UserError("data.path is missing")
        team.meet("never")

    for index, error in enumerate(together(addresses, work)):
        if index != bad:
            assert isinstance(error, WorkerError) and error.code == 2
            assert f"worker {bad} ({addresses[bad]}) failed: data.path is missing" in str(error)


def test_what_all_find_alike_is_raised_by_each_as_its_own(addresses, quick):
    def work(team):
        team.meet("start")
        with team.explained():
            raise NonFiniteError("the loss of step 3 is not finite")

    assert all(isinstance(error, NonFiniteError) for error in together(addresses, work))


def test_worker_that_never_comes_to_a_meeting_is_named(addresses, quick):
    def work(team):
        if team.index == 1:
            time.sleep(2.5)
            return None
        return team.gather("the checkpoint", 0)

    first, *_ = together(addresses[:2], work, timeout=1.0)
    assert isinstance(first, UserError)
    assert f'worker 1 ({addresses[1]}) has not come to "the checkpoint" within 1 s' in str(first)


def test_other_data_is_named_with_its_worker(addresses, quick):
    first, *_ = together(addresses, lambda team: team.compare("data", {"training examples": 100 + (team.index == 2)}))
    assert f"worker 2 ({addresses[2]}) has training examples 101 and worker 0 has 100" in str(first)


def stops(team, first=1, last=20, ask_at=None):
    """Goes from boundary to boundary, as between executions; returns the one it stops at."""
    for boundary in range(first, last + 1):
        if team.reached(boundary, ask=ask_at is not None and boundary >= ask_at):
            return boundary
    return None


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_all_stop_one_boundary_beyond_the_one_where_a_worker_asks(addresses, quick, asking):
    step = threading.Barrier(3)  # as collectives hold workers together

    def work(team):
        team.meet("start")
        for boundary in range(1, 20):
            step.wait(5)
            if team.reached(boundary, ask=team.index == asking and boundary >= 5):
                return boundary
        return None

    assert together(addresses, work) == [6, 6, 6]


@pytest.mark.parametrize("asking", [0, 1])
def test_worker_ahead_in_an_evaluation_is_caught_up_with_before_all_stop(addresses, quick, asking):
    arrived, done = threading.Event(), threading.Event()

    def work(team):
        team.meet("start")
        if team.index != asking:  # its batches are done: it waits for the other in the sum over all
            assert stops(team, last=7) is None
            arrived.set()
            assert done.wait(5)
            return stops(team, first=8)
        assert stops(team, last=3) is None
        arrived.wait(5)
        found = [team.reached(boundary, ask=True) for boundary in range(4, 8)]
        done.set()
        return found, stops(team, first=8)

    found = together(addresses[:2], work)
    assert found[asking] == ([False] * 4, 8) and found[1 - asking] == 8


@pytest.mark.parametrize("size", [2, 4])
def test_several_that_ask_at_once_agree_and_do_not_wait_for_each_other(quick, size):
    def work(team):
        team.meet("start")
        return stops(team, ask_at=3 + team.index)

    for _ in range(5):
        ports = worker_runs.free_ports(size)
        found = together(tuple(f"127.0.0.1:{port}" for port in ports), work, timeout=30.0)
        assert len(set(found)) == 1 and 4 <= found[0] <= 20


def test_worker_that_has_left_is_not_waited_for_when_one_asks_to_stop(addresses, quick):
    gone = threading.Barrier(2)

    def work(team):
        team.meet("start")
        if team.index == 2:
            return None
        time.sleep(0.3)
        gone.wait(5)
        began = time.monotonic()
        return team.reached(1, ask=True), time.monotonic() - began < 2

    assert together(addresses, work)[:2] == [(False, True)] * 2


def test_main_thread_that_does_not_notice_is_ended_with_the_message(addresses, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(hosts, "GRACE", 0.1)
    monkeypatch.setattr(hosts.os, "_exit", ended.append)
    team = Team(Cluster(addresses, 1))
    team._end(WorkerError("worker 0 is gone", 75))
    time.sleep(0.5)
    assert ended == [75] and "stopped: worker 0 is gone" in capsys.readouterr().err


def test_error_of_tensorflow_becomes_the_worker_that_caused_it(addresses):
    import tensorflow as tf

    team = Team(Cluster(addresses, 0))
    message = "The following tasks are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:2\nmore"
    with (
        pytest.raises(WorkerError, match=r"worker 2 \(127.0.0.1:\d+\) does not answer any more") as caught,
        team.explained(),
    ):
        raise tf.errors.UnavailableError(None, None, message)
    assert caught.value.code == 75
