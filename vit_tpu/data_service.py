"""Reads and decodes training images for a run elsewhere, when one host cannot keep its chips busy.

Examples:
  python -m vit_tpu.data_service --port=5050
      serves a run on this machine
  python -m vit_tpu.data_service --port=5050 --host=10.0.0.7
      serves runs on other machines, which reach this one as 10.0.0.7
  python -m vit_tpu.train --config=... --data_service=10.0.0.7:5050,10.0.0.8:5050
      trains from two of them, in the same order as without

The process sees the same files as the run (the same paths, or gs://). It serves until it is stopped.

Exit codes: 0 stopped, 2 wrong use.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from vit_tpu.command import execute
from vit_tpu.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments)


def _define(flags: Any, values: Any) -> None:
    flags.DEFINE_integer("port", 5050, "port to listen on; 0 for any free one", flag_values=values)
    flags.DEFINE_string(
        "host", "localhost", "name or address under which the run reaches this machine", flag_values=values
    )


def _run(values: Any) -> int:
    if not 0 <= values.port < 65536:
        raise UserError(f"--port={values.port}: use 0 to 65535")
    from vit_tpu.data import service  # TensorFlow loads here

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    servers, address = service.serve(values.port, values.host)
    print(f"serving at {address}: train with --data_service={address}; stop with Ctrl-C", flush=True)
    stopped.wait()
    assert servers  # alive until here
    # A worker in the middle of a batch for a run that is gone would wait for it for ever.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
