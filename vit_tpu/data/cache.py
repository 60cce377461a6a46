"""Keeping what is read: files as they are, or finished pixels, in memory or on disk, and only where they fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from vit_tpu.data import disk_cache, in_memory
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.decode import Decode
from vit_tpu.data.source import Source, files
from vit_tpu.errors import UserError

PIXELS_LIMIT = 2**30  # bytes of pixels that are kept without being asked
_SHARE = 0.8  # of the free memory that a cache may fill
_SAMPLE = 64


def hold(
    source: Source,
    kind: str,
    size: int | tuple[int, int],
    *,
    channels: int,
    crop: str,
    decode: Decode | None = None,
    broken: BrokenRecords | None = None,
    folder: str | None = None,
) -> tuple[Source, str]:
    """Returns the source with what `kind` says kept, and a sentence about it ("" when there is nothing to say).

    Args:
      source: encoded files; others are in memory already and stay as they are.
      kind: "none"; "files", the encoded bytes in memory; "disk", the same in `folder`; "pixels", decoded
        and resized once, for crop "resize" alone; "auto": pixels if they are fewer than 1 GiB and crop is
        "resize", else none.
      size, channels, crop, decode, broken: as in `pipeline.train_pipeline`.

    Raises:
      UserError: what is asked for does not fit into the memory that is free, or not with `crop`.
    """
    if not source.encoded or kind == "none":
        return source, ""
    if kind == "disk":
        return disk_cache.on_disk(source, folder or "", files_bytes(source))
    if kind == "files":
        sentence = f"{source.name}: {_fits(source, kind, files_bytes(source))}"
        return files_in_memory(source), sentence
    needed = in_memory.memory_bytes(source, size, channels)
    if kind == "auto":
        if crop != "resize":
            return source, ""
        if needed > PIXELS_LIMIT:
            return source, (
                f"{source.name}: {needed / 2**30:.1f} GiB of pixels, more than {PIXELS_LIMIT / 2**30:.0f}, so files "
                "are decoded in every epoch (data.cache=pixels or files keeps them)"
            )
    elif crop != "resize":
        raise UserError(
            f"data.cache=pixels holds finished images, but data.crop={crop} cuts them from the files: "
            "use data.cache=files"
        )
    sentence = f"{source.name}: {_fits(source, 'pixels', needed)}"
    held = in_memory.load_into_memory(source, size, channels=channels, limit=needed, decode=decode, broken=broken)
    return held, sentence


def files_bytes(source: Source) -> int:
    """Returns how many bytes the encoded files take, estimated from 64 of them spread evenly."""
    count = min(source.num_examples, _SAMPLE)
    lengths = []
    with tf.device("CPU:0"):
        for index in np.arange(count, dtype=np.int64) * source.num_examples // count:
            try:
                lengths.append(len(source.get(tf.constant(index))["image"].numpy()))
            except tf.errors.OpError:
                continue  # the pipelines report it
    return int(np.mean(lengths or [0]) * source.num_examples)


def files_in_memory(source: Source) -> Source:
    """Returns `source` with its encoded files in memory; a file that cannot be read stays where it is."""

    count = source.num_examples
    with tf.device("CPU:0"):
        # One batch of everything: its strings are moved into place, not copied.
        encoded, there = files(source).batch(count).get_single_element()
        labels = tf.constant(source.labels)
        ids = tf.constant([source.name_of(i) for i in range(count)])

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        image = tf.cond(tf.gather(there, index), lambda: tf.gather(encoded, index), lambda: source.get(index)["image"])
        return {
            "image": tf.ensure_shape(image, []),
            "label": tf.gather(labels, index),
            "id": tf.gather(ids, index),
        }

    return dataclasses.replace(source, get=get)


def free_bytes() -> int | None:
    """Returns how much memory this process may still take; None where the system does not say."""
    found = []
    try:
        with open("/proc/meminfo") as file:
            found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            found.append(int(limit.read()) - int(used.read()))  # "max", no limit, is no number
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def _fits(source: Source, kind: str, needed: int) -> str:
    """Returns a sentence with the estimate.

    Raises:
      UserError: there is not that much memory.
    """
    free = free_bytes()
    if free is not None and needed > _SHARE * free:
        raise UserError(
            f"data.cache={kind}: {source.name} takes about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free: "
            f"use data.cache={'files or none' if kind == 'pixels' else 'none'}"
        )
    amount = f"{needed / 2**30:.2f} GiB" if needed >= 2**30 else f"{needed / 2**20:.1f} MiB"
    known = "" if free is None else f" of {free / 2**30:.1f} GiB free"
    return f"about {amount} of {kind} in memory{known}"
