"""Checks of the settings of a run on several machines, without starting it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from vit_tpu import cluster
from vit_tpu.diagnose.findings import Finding
from vit_tpu.errors import UserError
from vit_tpu.settings import Config


def count(config: Config, environment: Mapping[str, str]) -> int:
    """Returns how many processes train together; 1 also where the settings are wrong."""
    try:
        found = cluster.find(config.workers, config.worker, environment)
    except UserError:
        return 1
    return len(found.addresses) if found else 1


def check(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings on who the workers are, whether they can be found, and whether this one's port is free.

    Args:
      config: of the run.
      environment: with TF_CONFIG, if it is set.
    """
    try:
        found = cluster.find(config.workers, config.worker, environment)
    except UserError as error:
        yield Finding("error", "workers", str(error))
        return
    if found is None:
        return
    good = True
    for number in range(len(found.addresses)):
        host, port = found.place(number)
        try:
            socket.getaddrinfo(host, port)
        except (OSError, UnicodeError):
            good = False
            yield Finding(
                "error", "workers", f"{found.name(number)}: nobody knows a host {host} here",
                "an address that every worker can reach, or an entry in /etc/hosts",
            )  # fmt: skip
    host, port = found.place(found.index)
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except OSError as error:
            good = False
            yield Finding(
                "error", "workers", f"{found.name(found.index)} is this machine, whose port {port} cannot be used "
                f"({error.strerror})", "another port, or end what uses it (ss -ltnp)",
            )  # fmt: skip
    if good:
        yield Finding(
            "ok", "workers", f"{found.name(found.index)} of {len(found.addresses)}; all of them have addresses"
        )
    if config.workdir and "://" not in config.workdir:
        yield Finding(
            "note", "workers", f"workdir={config.workdir} must be one folder that all workers see, such as NFS or gs://"
        )
