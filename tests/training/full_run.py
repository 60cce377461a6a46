"""One run on the digits with everything on, made once a session for the tests that look at what it left."""

import contextlib
import functools
import io
import pathlib
import shutil
import tempfile
import unittest.mock

import trained_runs
from tiny_run import config

from vit_tpu.training import traces
from vit_tpu.training.run import run

STEPS, EXECUTION = 64, 8


@functools.cache
def full_run() -> tuple[pathlib.Path, str]:
    """Its folder, and what it printed; the trace as the profiler wrote it is beside, as as_written.xplane.pb."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="full_", dir=trained_runs.folder())) / "run"
    printed, finish = io.StringIO(), traces.finish

    def keep(trace):
        shutil.copy(trace, folder / "as_written.xplane.pb")
        return finish(trace)

    with contextlib.redirect_stdout(printed), unittest.mock.patch.object(traces, "finish", keep):
        run(
            config(
                training__steps=STEPS, steps_per_execution=EXECUTION, log_every=EXECUTION, evaluate_every=24,
                training__board="full", training__profile=(10, 20), optimizer__name="lamb", pool="map",
            ),
            folder,
        )  # fmt: skip
    return folder, printed.getvalue()
