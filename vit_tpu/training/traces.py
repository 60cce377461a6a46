"""Looks into a profiler trace after it was written: which steps it holds, and whether xprof will find them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vit_tpu.training import storage

MARK = "train"  # what Keras calls the mark of an execution
OTHER_MARKS = ("test", "predict")  # and those of an evaluation's and a prediction's batches


def finish(trace: str) -> list[int]:
    """Makes a trace readable by steps, and returns the numbers of its marked executions.

    An execution of several steps, or of several micro-batches, is a loop of TensorFlow. xprof then takes the turns of
    the loop for the steps, which works with the timeline of a device; a CPU has none, and xprof finds no step at all.
    In the trace of a CPU the numbers of the turns are therefore left out, so that the marked executions are the steps.
    Batches of an evaluation between two executions are marked by Keras as well: those marks are made plain events.

    Args:
      trace: an .xplane.pb file.

    Returns:
      The first step of each execution, from 0, counted from where the `fit` began.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with storage.reading(trace) as file:
        space = xplane_pb2.XSpace.FromString(file.read())
    dropped = sum(_drop(plane, OTHER_MARKS, ("step_num", "_r")) for plane in space.planes)
    if not any(plane.name.startswith("/device:") for plane in space.planes):
        dropped += sum(_drop(plane, ("ExecutorState::Process",), ("iter_num",)) for plane in space.planes)
    if dropped:
        with storage.writing(trace) as file:
            file.write(space.SerializeToString())
    return sorted(set().union(*(_marks(plane) for plane in space.planes)))


def _drop(plane: Any, names: Collection[str], stats: Collection[str]) -> int:
    """Removes figures, such as the number of the turn, from the events of these names; returns how many."""
    events = {key for key, event in plane.event_metadata.items() if event.name in names}
    numbers = {key for key, stat in plane.stat_metadata.items() if stat.name in stats}
    dropped = 0
    for line in plane.lines:
        for event in line.events:
            if event.metadata_id in events:
                for i in reversed(range(len(event.stats))):
                    if event.stats[i].metadata_id in numbers:
                        del event.stats[i]
                        dropped += 1
    return dropped


def _marks(plane: Any) -> set[int]:
    events = {key for key, event in plane.event_metadata.items() if event.name == MARK}
    numbers = {key for key, stat in plane.stat_metadata.items() if stat.name == "step_num"}
    return {
        stat.int64_value or stat.uint64_value
        for line in plane.lines
        for event in line.events
        if event.metadata_id in events
        for stat in event.stats
        if stat.metadata_id in numbers
    }
