"""Asks the tracing process (`vit_tpu.tpu.trace`) for programs, and keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from importlib import metadata
from types import TracebackType
from typing import Any

from vit_tpu import config as configs
from vit_tpu.errors import UserError
from vit_tpu.settings import Config
from vit_tpu.tpu import cache as caches
from vit_tpu.tpu.compiler import CompilerError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


class Tracer:
    """Traces the steps of one config, each batch size once; the process that does it starts when it is first needed.

    Args:
      config: what to trace.
      replicas: cores over which gradients are summed.
      cache: folder of traces, kept by the contents of config and package; None for the user's own.
    """

    def __init__(self, config: Config, replicas: int = 1, cache: str | os.PathLike[str] | None = None):
        self._request = json.dumps({"config": configs.to_dict(config), "replicas": replicas})
        self._store = pathlib.Path(cache or caches.folder())
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="vit_tpu_trace_")
        self.cpu_seconds = 0.0

    def trace(self, batch: int) -> tuple[bytes, dict[str, Any]]:
        """Returns the HLO for a batch size, and {"arguments", "parameters", "forward_flops", "tokens", ...}.

        Raises:
          UserError: the config or the batch cannot be.
          CompilerError: TensorFlow could not lower the step.
        """
        key = hashlib.sha256(f"{_sources()} {self._request} {batch}".encode()).hexdigest()[:32]
        kept = self._store / f"{key}.trace"
        found = caches.read(kept)
        if found is not None:
            head, _, hlo = found.partition(b"\n")
            return hlo, json.loads(head)
        path = pathlib.Path(self._folder.name) / f"{batch}.hlo"
        answer = self._ask({"batch": batch, "hlo": str(path)})
        if "wrong" in answer:
            raise UserError(answer["wrong"])
        if "error" in answer:
            raise CompilerError(f"TensorFlow could not lower the training step to XLA: {answer['error'][:1500]}")
        self.cpu_seconds += answer["cpu_seconds"]
        hlo = path.read_bytes()
        path.unlink()
        caches.write(kept, json.dumps(answer).encode() + b"\n" + hlo)
        return hlo, answer

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            log = pathlib.Path(self._folder.name) / "log"
            words = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise CompilerError(f"tracing the step ended with code {process.wait()}: {' '.join(words)[:800]}")
        return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        folder = pathlib.Path(self._folder.name)
        (folder / "request.json").write_text(self._request)
        paths = os.pathsep.join(p for p in (str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")) if p)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vit_tpu.tpu.trace", str(folder / "request.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": paths,
                    "CUDA_VISIBLE_DEVICES": "-1",
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    # oneDNN's allocator refuses to reserve more than the machine has; the plain one only reserves.
                    "TF_ENABLE_ONEDNN_OPTS": "0",
                },
            )
        return self._process

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._folder.cleanup()


def _sources() -> str:
    """Returns a hash of what a trace depends on besides the config."""
    files = sorted(_PACKAGE.rglob("*.py"))
    contents = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return contents.hexdigest() + metadata.version("tensorflow")
