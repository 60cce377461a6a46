"""Compiles HLO for a TPU on a machine without one, in a process of its own, and keeps the answers.

Two stages. "memory": the compiler writes its buffer assignment early on; as soon as it is there the process is ended,
which saves the minutes of code generation. "cycles": the finished program with the compiler's estimates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from vit_tpu.errors import UserError
from vit_tpu.tpu import cache as caches
from vit_tpu.tpu import program
from vit_tpu.tpu.topologies import Chip

TESTED_LIBTPU = "0.0.52"
_INSTALL = 'pip install "vit_tpu[plan]"'
_OOM = re.compile(r"total memory required[^(]*\(([\d.]+)([KMGT]?)\)[^(]*available HBM \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_CACHE_FORMAT = 1


class CompilerError(RuntimeError):
    """The compiler failed, was ended, or gave an answer not understood here; the message holds its words."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said of one program on one core.

    Attributes:
      fits: False when the compiler ran out of memory.
      stated: {"needed", "available"} bytes from its out-of-memory message, or {}.
      assignment, live_ranges, optimized: texts of its buffer assignment, live ranges and optimised program.
      stats: {"argument", "output", "alias", "temp", "generated_code", "peak"} bytes of the finished program, or {}.
      finished: text of the finished program with cycle estimates, or "".
      versions: {"libtpu", "pjrt", "platform"}.
      cpu_seconds: that the compiling process took.
    """

    fits: bool
    stated: dict[str, int]
    assignment: str
    live_ranges: str
    optimized: str
    stats: dict[str, int]
    finished: str
    versions: dict[str, str]
    cpu_seconds: float

    def program(self) -> program.Program:
        return program.parse(self.finished or self.optimized)


def library() -> str:
    """Returns the path of libtpu.so.

    Raises:
      UserError: the extra is not installed.
    """
    spec = importlib.util.find_spec("libtpu")
    folder = pathlib.Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / "libtpu.so").exists():
        raise UserError(f"planning needs the TPU compiler (libtpu), which is not installed: {_INSTALL}")
    return str(folder / "libtpu.so")


def version() -> str:
    """Returns the installed libtpu's version, or "none"."""
    from importlib import metadata

    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return "none"


def check_cores(chip: Chip, cores: int) -> None:
    """Raises UserError if the slice that plans are made for has fewer cores."""
    if cores > chip.cores:
        raise UserError(f"{cores} cores asked for: plans are for one {chip.topology} slice, which has {chip.cores}")


def compile_hlo(
    hlo: bytes,
    chip: Chip,
    *,
    replicas: int = 1,
    partitions: int = 1,
    stage: str = "memory",
    limit: float = 1800.0,
    cache: str | os.PathLike[str] | None = None,
) -> Compiled:
    """Compiles a program for one chip generation.

    Args:
      hlo: a serialized HloModuleProto.
      chip: from `topologies.chip`.
      replicas: cores that run a copy each.
      partitions: cores over which each copy is divided.
      stage: "memory" (seconds) or "cycles" (minutes).
      limit: seconds of wall time after which the compiler is ended.
      cache: folder of answers; None for the user's cache folder.

    Raises:
      UserError: libtpu is not installed, or the slice has too few cores.
      CompilerError: the compiler crashed, took too long or was not understood. Out of memory is no error.
    """
    path = library()
    check_cores(chip, replicas * partitions)
    key = hashlib.sha256(
        hlo + repr((_CACHE_FORMAT, chip.topology, replicas, partitions, version())).encode()
    ).hexdigest()[:32]
    store = pathlib.Path(cache or caches.folder())
    for kept in ("cycles", "memory") if stage == "memory" else ("cycles",):
        found = _read(store / f"{key}.{kept}.json")
        if found is not None:
            return found
    with tempfile.TemporaryDirectory(prefix="vit_tpu_plan_") as folder:
        compiled = _run(pathlib.Path(folder), path, hlo, chip, replicas, partitions, stage, limit)
    caches.write(store / f"{key}.{stage}.json", json.dumps(dataclasses.asdict(compiled)).encode())
    return compiled


def _read(path: pathlib.Path) -> Compiled | None:
    found = caches.read(path)
    try:
        return None if found is None else Compiled(**json.loads(found))
    except (ValueError, TypeError):
        return None


def _run(
    folder: pathlib.Path, path: str, hlo: bytes, chip: Chip, replicas: int, partitions: int, stage: str, limit: float
) -> Compiled:
    dump = folder / "dump"
    (folder / "step.hlo").write_bytes(hlo)
    request = {
        "library": path,
        "topology": chip.topology,
        "hlo": str(folder / "step.hlo"),
        "replicas": replicas,
        "partitions": partitions,
        "dump": str(dump),
    }
    (folder / "step.json").write_text(json.dumps(request))
    answer_path, log = folder / "step.answer", folder / "log"
    with log.open("wb") as errors:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(
            [sys.executable, "-m", "vit_tpu.tpu.pjrt", str(folder / "step.json")],
            stdout=errors,
            stderr=errors,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            began = time.monotonic()
            while process.poll() is None:
                if stage == "memory" and _assigned(dump):
                    break
                if time.monotonic() - began > limit:
                    raise CompilerError(
                        f"the TPU compiler was ended after {limit:.0f} s: give it longer (--limit) or plan less"
                    )
                time.sleep(0.1)
            ended = process.poll() is None
        finally:
            seconds = _end(process, spent)
    answer = _answer(answer_path)
    error = answer.get("error", "")
    stated = _out_of_memory(error)
    if error and not stated:
        raise CompilerError(_what_failed(error, chip))
    if not answer_path.exists() and not ended:
        raise CompilerError(f"the TPU compiler stopped with code {process.returncode}: {_last_words(log)}")
    texts = {
        name: _dumped(dump, name)
        for name in ("buffer-assignment", "live-range", "after_optimizations", "after_codegen")
    }
    if not texts["buffer-assignment"] or not texts["after_optimizations"]:
        raise CompilerError(
            f"libtpu {version()} wrote no buffer assignment; {TESTED_LIBTPU} is the version that was tested"
        )
    versions = {
        "libtpu": version(),
        "pjrt": answer.get("pjrt", ""),
        "platform": answer.get("platform", "").partition("\n")[0],
    }
    return Compiled(
        fits=not stated,
        stated=stated,
        assignment=texts["buffer-assignment"],
        live_ranges=texts["live-range"],
        optimized=texts["after_optimizations"],
        stats=answer.get("stats", {}),
        finished=texts["after_codegen"],
        versions=versions,
        cpu_seconds=seconds,
    )


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """No metadata server, no lock shared with other processes, no logs outside the folder."""
    package = str(pathlib.Path(__file__).resolve().parents[2])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_ACCELERATOR_TYPE": "v3-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }


def _assigned(dump: pathlib.Path) -> bool:
    """Whether the buffer assignment was accepted and its files are complete (the options are written after them)."""
    return any(dump.glob("*.after_optimizations_after_buffer_assignment.txt")) and any(dump.glob("*.debug_options"))


def _answer(path: pathlib.Path) -> dict[str, Any]:
    """What the compiling process wrote: its answer, or, if it was ended, who it was."""
    for found in (path, path.with_suffix(".started")):
        if found.exists():
            return json.loads(found.read_text())
    return {}


def _end(process: subprocess.Popen[bytes], before: resource.struct_rusage) -> float:
    """Ends the compiler and returns the CPU seconds it took."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _out_of_memory(error: str) -> dict[str, int]:
    """Returns {"needed", "available"} bytes of an out-of-memory message, {} for any other."""
    found = _OOM.search(error)
    if not found:
        return {}
    needed, unit, available, available_unit = found.groups()
    return {"needed": int(float(needed) * _UNITS[unit]), "available": int(float(available) * _UNITS[available_unit])}


def _what_failed(error: str, chip: Chip) -> str:
    text = " ".join(error.split())
    if "TPU external name" in text or "topology" in text.lower():
        return f"libtpu {version()} does not know {chip.topology} (tested with {TESTED_LIBTPU}): {text}"
    return f"the TPU compiler failed: {text[:1500]}"


def _last_words(log: pathlib.Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"F\d{4}|.*(Check failed|Error|abort)", line)]
    return " ".join(" ".join((telling or lines)[:3]).split())[:800] or "it said nothing"


def _dumped(dump: pathlib.Path, name: str) -> str:
    suffix = {
        "buffer-assignment": ".after_optimizations-buffer-assignment.txt",
        "live-range": ".after_optimizations-live-range.txt",
        "after_optimizations": ".after_optimizations.txt",
        "after_codegen": ".after_codegen.txt",
    }[name]
    files = sorted(
        dump.glob(f"*{suffix}"), key=lambda file: file.stat().st_size
    )  # helpers are compiled too: the step is largest
    return files[-1].read_text(errors="replace") if files else ""
