"""The processes of a run on several machines: from --workers and --worker, or from TF_CONFIG."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

from vit_tpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
      addresses: "host:port" of each, in order; the first is the chief.
      index: which of them this one is.
    """

    addresses: tuple[str, ...]
    index: int

    def name(self, worker: int) -> str:
        return f"worker {worker} ({self.addresses[worker]})"

    def place(self, worker: int) -> tuple[str, int]:
        """Returns host and port of a worker."""
        host, _, port = self.addresses[worker].rpartition(":")
        return host.strip("[]"), int(port)


def find(
    workers: Sequence[str] = (), worker: int | None = None, environment: Mapping[str, str] | None = None
) -> Cluster | None:
    """Returns the processes of a run, from the settings or else from TF_CONFIG; None for a run of one process.

    Args:
      workers: "host:port" of each worker, the same list on all of them.
      worker: which one this is, from 0.
      environment: os.environ if None.

    Raises:
      UserError: an address or number that is none, or a role that this package does not have.
    """
    environment = os.environ if environment is None else environment
    if workers:
        if worker is None and len(workers) > 1:
            raise UserError(
                f"workers names {len(workers)} processes: say which one this is with --worker=0 to {len(workers) - 1}"
            )
        found = Cluster(tuple(address.strip() for address in workers), worker or 0)
        where = "workers"
    elif environment.get("TF_CONFIG"):
        if worker is not None:
            raise UserError("worker is given and TF_CONFIG is set, which says it too: leave one of them out")
        made = _from_tf_config(environment["TF_CONFIG"])
        if made is None:
            return None
        found, where = made, "TF_CONFIG"
    elif worker is not None:
        raise UserError(
            f"worker={worker} is given without workers: name all of them with --workers=host:port,host:port"
        )
    else:
        return None
    for address in found.addresses:
        host, colon, port = address.rpartition(":")
        if not (colon and host and "/" not in host and port.isdigit() and 0 < int(port) < 65536):
            raise UserError(f'{where} has the address "{address}": write host:port, such as 10.0.0.2:12345')
    twice = {a for a in found.addresses if found.addresses.count(a) > 1}
    if twice:
        raise UserError(f"{where} names {min(twice)} twice: give each worker an address of its own")
    if not 0 <= found.index < len(found.addresses):
        raise UserError(f"{where}: there is no worker {found.index} among {len(found.addresses)}: the first is 0")
    return found if len(found.addresses) > 1 else None


def _from_tf_config(text: str) -> Cluster | None:
    try:
        values = json.loads(text)
        jobs, task = values.get("cluster", {}), values.get("task", {})
        kind, index = task.get("type", "worker"), int(str(task.get("index", 0)))
        known = {name: jobs[name] for name in ("chief", "worker") if jobs.get(name)}
        if not all(isinstance(job, list) and all(isinstance(place, str) for place in job) for job in known.values()):
            raise TypeError
    except (ValueError, AttributeError, TypeError):
        raise UserError(
            'TF_CONFIG is not what TensorFlow expects, {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}}: correct it, or unset it and use --workers and --worker'
        ) from None
    if not jobs:
        return None
    if kind not in known or "ps" in jobs:
        role = "ps" if "ps" in jobs else kind
        raise UserError(f'TF_CONFIG has the role "{role}": this package trains with chief and worker only')
    if not 0 <= index < len(known[kind]):
        raise UserError(f"TF_CONFIG: there is no {kind} {index} among {len(known[kind])}: the first is 0")
    before = len(known.get("chief", ())) if kind == "worker" else 0
    return Cluster(tuple(address for name in known for address in known[name]), before + index)
