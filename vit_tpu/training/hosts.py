"""Several processes, one run: who is here, what worker 0 decides for all, and how all stop together.

TensorFlow's collectives carry gradients and metrics. All else goes over one plain TCP connection from each worker to
worker 0, at the address that TensorFlow uses too, as JSON lines: who has come, values that worker 0 decides, the step
at which all stop, and why one failed. A worker that dies closes its connection, so the others know at once and by name.
A machine that falls silent is noticed by TensorFlow's own heartbeat.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vit_tpu import config as configs
from vit_tpu.cluster import Cluster
from vit_tpu.errors import UserError, WorkerError
from vit_tpu.models.guard import NonFiniteError
from vit_tpu.settings import Config
from vit_tpu.training import rendezvous

GRACE = 20.0  # seconds for a main thread to notice that the run is over; then the process ends without it
AGAIN = "start all workers again with the same commands: training goes on from the last checkpoint"


class Team:
    """The workers of a run as one of them sees it; alone, everything is decided at once.

    Attributes:
      cluster: addresses and own number, or None. size: number of workers. chief: whether this one writes.
      stop_at: the execution boundary, counted from 1, at which all stop, or None.
    """

    def __init__(self, cluster: Cluster | None = None, timeout: float = 300.0):
        self.cluster, self.timeout = cluster, timeout
        self.size = 1 if cluster is None else len(cluster.addresses)
        self.index = 0 if cluster is None else cluster.index
        self.chief = self.index == 0
        self.stop_at: int | None = None
        self.collectives = False  # whether there are any to abort
        self.error: WorkerError | None = None
        self._noticed = threading.Event()
        self._links: dict[int, rendezvous.Link] = {}
        self._left: set[int] = set()
        self._values: dict[tuple[int, str], Any] = {}
        self._at = 0  # the boundary that this worker has reached
        self._holding = False  # whether it waits at the next one until all know where to stop
        self._heard: dict[int, int] = {}  # on worker 0: where each was when it began to hold
        self._changed = threading.Condition()

        self.say: Callable[[str], None] = functools.partial(print, file=sys.stdout, flush=True)

    def connect(self, facts: Mapping[str, Any]) -> None:
        """Waits for all workers; from then on hears of them, too."""
        assert self.cluster is not None
        everyone = {"workers": list(self.cluster.addresses)}  # TF_CONFIG may name others on each
        self._links = rendezvous.join(self.cluster, {**facts, **everyone}, self.timeout)
        for worker, link in self._links.items():
            threading.Thread(target=self._read, args=(worker, link), name=f"worker-{worker}", daemon=True).start()

    def name(self, worker: int) -> str:
        return self.cluster.name(worker) if self.cluster else "this process"

    def agree(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns on every worker what `make` gives on worker 0: plain values, as JSON holds them."""
        if self.size == 1:
            return make()
        if self.chief:
            value = make()
            self._send_all({"kind": "value", "what": what, "value": value})
            return value
        return self._wait(0, what)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns the values of all workers in order, on worker 0; [] on the others."""
        if self.chief:
            return [value, *(self._wait(worker, what) for worker in range(1, self.size))]
        self._send_all({"kind": "value", "what": what, "value": value})
        return []

    def meet(self, what: str) -> None:
        """Returns once every worker has come to this point."""
        self.gather(what, None)
        self.agree(what, lambda: None)

    def compare(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raises UserError on worker 0, and so ends the run, if a worker has other facts."""
        for worker, theirs in enumerate(self.gather(what, dict(facts))):
            for key, value in facts.items():
                if theirs.get(key) != value:
                    raise UserError(
                        f"{self.name(worker)} has {key} {theirs.get(key)} and worker 0 has {value}: all workers need "
                        f"the same {what}"
                    )

    def reached(self, boundary: int, ask: bool = False) -> bool:
        """Returns whether all workers stop at this boundary between two executions.

        The workers number their boundaries alike but need not be at the same one: batches of an evaluation wait for
        nobody. Once one asks for a stop, each says where it is and passes no further boundary until worker 0 has heard
        from all; they stop one beyond the foremost.

        Args:
          boundary: its number, from 1.
          ask: for a stop.
        """
        with self._changed:
            self._at = boundary
        if ask and self.chief:
            self._hold()
        elif ask and not self._holding:
            self._send_all({"kind": "ask"})
        with self._changed:
            if self._holding or ask:
                self._changed.wait_for(lambda: self.stop_at is not None or self.error, self.timeout)
        self.check()
        return self.stop_at is not None and boundary >= self.stop_at

    def check(self) -> None:
        """Raises WorkerError if another worker has vanished or failed."""
        if self.error is not None:
            self._noticed.set()
            raise self.error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises WorkerError in place of what TensorFlow says in the block when another worker is the cause."""
        try:
            yield
        except WorkerError:
            raise
        except Exception as error:
            if self.size > 1:
                self._noticed.set()  # the main thread is on its way out
                self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        import tensorflow as tf

        lost = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.CancelledError)
        if lost or self.error is not None:
            with self._changed:  # TensorFlow may have noticed first
                self._changed.wait_for(lambda: self.error, 3.0)
        if self.error is None and lost:
            text = str(error)
            gone = next((i for i in range(self.size) if f"task:{i}\n" in text or f"task:{i} " in text), None)
            who = "a worker" if gone is None else self.name(gone)
            self._end(WorkerError(f"{who} does not answer any more; {AGAIN}", 75))
        if self.error is not None:
            raise self.error from None

    def leave(self, error: BaseException | None = None) -> None:
        """Says goodbye, or tells the others that this worker failed and why."""
        self._noticed.set()
        # What all workers find alike needs no telling.
        if error is None or error is self.error or isinstance(error, NonFiniteError):
            message: dict[str, Any] = {"kind": "bye"}
        else:
            text = " ".join((str(error) or type(error).__name__).split())[:500]
            kind = "" if isinstance(error, UserError | RuntimeError) else f"{type(error).__name__}: "
            code = 2 if isinstance(error, UserError) else 1
            if isinstance(error, KeyboardInterrupt):
                kind, text, code = "", f"it was stopped at once; {AGAIN}", 75
            message = {"kind": "failed", "worker": self.index, "text": kind + text, "code": code}
        for worker, link in list(self._links.items()):
            self._left.add(worker)  # whatever they do from here on is their matter
            link.send(message)
            link.close()

    # What follows runs on the threads that read, too.

    def _send_all(self, message: Mapping[str, Any], but: int | None = None) -> None:
        for worker, link in list(self._links.items()):
            if worker != but:
                link.send(message)

    def _wait(self, worker: int, what: str) -> Any:
        with self._changed:
            came = self._changed.wait_for(lambda: (worker, what) in self._values or self.error, self.timeout)
            self.check()
            if not came:
                raise UserError(
                    f'{self.name(worker)} has not come to "{what}" within {self.timeout:g} s, the others wait there: '
                    "look at what it does, or give it longer with worker_timeout"
                )
            return self._values.pop((worker, what))

    def _hold(self) -> None:
        """On worker 0: asks all where they are, once."""
        with self._changed:
            if self._holding:
                return
            self._holding = True
            self._heard[0] = self._at
        self._send_all({"kind": "hold"})

    def _decide(self) -> None:
        """On worker 0: says where all stop, once all that are still here have said where they are."""
        with self._changed:
            if not self._holding or self.stop_at is not None or len({*self._heard, *self._left}) < self.size:
                return
            self.stop_at = max(self._heard.values()) + 1
            self._changed.notify_all()
        self._send_all({"kind": "stop", "at": self.stop_at})

    def _end(self, error: WorkerError) -> None:
        with self._changed:
            if self.error is not None:
                return
            self.error = error
            self._changed.notify_all()
        if self.collectives:
            _abort(str(error))
        threading.Thread(target=self._backstop, name="backstop", daemon=True).start()

    def _backstop(self) -> None:
        if not self._noticed.wait(GRACE) and self.error is not None:
            print(f"stopped: {self.error}", file=sys.stderr, flush=True)
            os._exit(self.error.code)

    def _read(self, worker: int, link: rendezvous.Link) -> None:
        for message in link.lines():
            self._handle(worker, message)
        if worker not in self._left:
            self._gone(worker)

    def _handle(self, worker: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "value":
            with self._changed:
                self._values[worker, message["what"]] = message["value"]
                self._changed.notify_all()
        elif kind == "ask":
            self._hold()
        elif kind == "hold":
            with self._changed:
                self._holding = True
                at = self._at
            self._links[0].send({"kind": "at", "boundary": at})
        elif kind == "at":
            with self._changed:
                self._heard[worker] = message["boundary"]
            self._decide()
        elif kind == "stop":
            with self._changed:
                self.stop_at = message["at"]
                self._changed.notify_all()
        elif kind in ("failed", "lost"):
            self._left.add(worker if kind == "failed" else message["worker"])
            self._send_all(message, but=worker)
            if kind == "failed":
                self._end(WorkerError(f"{self.name(message['worker'])} failed: {message['text']}", message["code"]))
            else:
                self._end(WorkerError(f"{self.name(message['worker'])} is gone; {AGAIN}", 75))
        elif kind == "bye":
            self._left.add(worker)
            if self.chief:
                self._decide()

    def _gone(self, worker: int) -> None:
        self._send_all({"kind": "lost", "worker": worker}, but=worker)
        self._end(WorkerError(f"{self.name(worker)} is gone; {AGAIN}", 75))


def _abort(text: str) -> None:
    """Makes collectives that wait for the lost worker raise, in whatever thread they are."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import errors

    with contextlib.suppress(Exception):
        context.context().abort_collective_ops(errors.UNAVAILABLE, text)


# What may differ between the workers of a run: the folder is worker 0's, and the rest says who is who.
_OWN = ("worker", "workdir", "resume", "allow_config_change")


def facts(config: Config) -> dict[str, Any]:
    """Returns what has to be the same on all workers."""
    import vit_tpu

    values = {key: configs.get(config, key) for key in configs.all_keys() if key not in _OWN}
    versions = {"vit_tpu": vit_tpu.__version__, "tensorflow": importlib.metadata.version("tensorflow")}
    return json.loads(json.dumps(values | versions))


@contextlib.contextmanager
def together(cluster: Cluster | None, facts: Mapping[str, Any], timeout: float) -> Iterator[Team]:
    """Gives the block the team of its run; whatever ends the block ends it on all workers, each knowing why.

    Args:
      cluster, facts, timeout: as `rendezvous.join` takes them.

    Raises:
      UserError: a worker did not come or does not fit.
      WorkerError: another worker vanished or failed.
    """
    team = Team(cluster, timeout)
    if cluster is not None:
        team.connect(facts)
    with contextlib.ExitStack() as stack:
        if not team.chief:
            print(f"{team.name(team.index)} of {team.size}: worker 0 prints and writes for all", flush=True)
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            with team.explained():
                yield team
        except BaseException as error:
            team.leave(error)
            raise
        team.leave()
