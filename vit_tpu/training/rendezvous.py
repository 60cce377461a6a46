"""How the workers of a run find each other before TensorFlow starts, and the connections that stay."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from vit_tpu.cluster import Cluster
from vit_tpu.errors import UserError


class Link:
    """A connection that carries JSON lines."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.file = connection.makefile("rb")
        self.lock = threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        with self.lock, contextlib.suppress(OSError):  # its reader will say that it is gone
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message, or None: closed, or something else speaks there."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.file.readline())
            return found if isinstance(found, dict) else None
        return None

    def lines(self) -> Iterator[dict[str, Any]]:
        while (message := self.receive()) is not None:
            yield message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


def join(cluster: Cluster, facts: Mapping[str, Any], timeout: float) -> dict[int, Link]:
    """Returns the connections of a run's worker once all are here: worker 0 has one to each, the others one to it.

    Args:
      cluster: who takes part and which one this is.
      facts: what has to be the same on all, such as versions and the settings; named when it is not.
      timeout: seconds to wait for the last one.

    Raises:
      UserError: a worker has not come, or has other facts; all that came raise it.
    """
    until = time.monotonic() + timeout
    links = _gather(cluster, facts, until, timeout) if cluster.index == 0 else _go(cluster, facts, until, timeout)
    for link in links.values():
        link.connection.settimeout(None)
    return links


def _gather(cluster: Cluster, facts: Mapping[str, Any], until: float, timeout: float) -> dict[int, Link]:
    links: dict[int, Link] = {}
    came: list[Link] = []
    size = len(cluster.addresses)
    host, port = cluster.place(0)
    server = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if server.family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", port))
        server.listen(size)
    except OSError as error:
        server.close()
        raise UserError(
            f"worker 0 cannot listen at {host}:{port} ({error.strerror}): another process has the port, a second "
            "--worker=0 perhaps; stop it, or name another port on all workers"
        ) from None
    wrong = ""
    with server:
        while len(links) < size - 1 and not wrong:
            missing = [cluster.name(i) for i in range(1, size) if i not in links]
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                link = Link(server.accept()[0])
            except TimeoutError:
                wrong = (
                    f"{', '.join(missing)} did not come within {timeout:g} s: start every worker, each with "
                    "the same commands but for its own --worker, and see that they reach worker 0"
                )
                break
            link.connection.settimeout(5.0)
            hello = link.receive()
            if hello is None or hello.get("kind") != "hello":
                continue  # a port scan, or a probe of the machine room
            worker, theirs = hello.get("worker"), hello.get("facts", {})
            if not isinstance(worker, int) or not 0 < worker < size:
                link.send({"kind": "refused", "text": f"there is no worker {worker} among the {size} of worker 0"})
                continue
            if worker in links:
                wrong = f"two processes say that they are worker {worker}: give each its own --worker"
            links[worker] = link
            came.append(link)
            for key in sorted({*facts, *theirs}):
                if facts.get(key) != theirs.get(key):
                    wrong = (
                        f"{cluster.name(worker)} has {key} {theirs.get(key)} and worker 0 has {facts.get(key)}: start "
                        "all workers with the same configuration and versions"
                    )
    for link in came:
        link.send({"kind": "refused", "text": wrong} if wrong else {"kind": "welcome"})
    if wrong:
        raise UserError(wrong)
    return links


def _go(cluster: Cluster, facts: Mapping[str, Any], until: float, timeout: float) -> dict[int, Link]:
    host, port = cluster.place(0)
    why = "no answer"
    while time.monotonic() < until:
        try:
            link = Link(socket.create_connection((host, port), timeout=5.0))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(0.2)
            continue
        link.send({"kind": "hello", "worker": cluster.index, "facts": facts})
        link.connection.settimeout(max(until - time.monotonic(), 0.01) + 5.0)  # worker 0 waits for the others
        answer = link.receive()
        if answer is not None and answer.get("kind") == "welcome":
            return {0: link}
        if answer is not None and answer.get("kind") == "refused":
            raise UserError(str(answer.get("text")))
        why = "something else answers there"  # such as the worker 0 of a run that is just ending
        time.sleep(0.5)
    raise UserError(
        f"{cluster.name(0)} did not come within {timeout:g} s ({why}): start it with the same commands but for "
        "--worker=0, and see that this machine reaches it"
    )
