"""Keeping encoded files on a local disk: one record file beside its index, written once and used by later runs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import shutil

import numpy as np
import tensorflow as tf

from vit_tpu.data import tfrecords
from vit_tpu.data.source import Source, files
from vit_tpu.errors import UserError

_HEAD, _FOOT = 12, 4  # of a TFRecord: length and its checksum before the data, the data's checksum behind
_SHARE = 0.9  # of the free disk that a cache may fill


def on_disk(source: Source, folder: str | os.PathLike[str], needed: int) -> tuple[Source, str]:
    """Returns `source` with its encoded files read from a copy in `folder`, and a sentence about it.

    The copy is found again by the source's name, ids and labels. It does not notice files that changed under the
    same names: delete it then. A file that cannot be read is not copied, and stays where it is.

    Args:
      source: encoded files.
      folder: on a local disk; made if missing.
      needed: estimated bytes of all files.

    Raises:
      UserError: the folder is remote, cannot be written to or has not enough room.
    """
    if "://" in os.fspath(folder):
        raise UserError(f"data.cache_dir={folder} is not on a local disk: give a local folder")
    place = pathlib.Path(folder)
    name = _fingerprint(source)
    records, index = place / f"{name}.tfrecord", place / f"{name}.npz"
    if not (records.exists() and index.exists() and _whole(records, index)):
        try:
            place.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(place).free
            if needed > _SHARE * free:
                raise UserError(
                    f"data.cache=disk: {source.name} takes about {_gib(needed)} and {place} has {_gib(free)} free: "
                    "free space, or use another data.cache_dir or data.cache=none"
                )
            _write(source, records, index)
        except (OSError, tf.errors.ResourceExhaustedError) as error:
            raise UserError(
                f"data.cache_dir={place} cannot be written to ({getattr(error, 'strerror', None) or 'disk full'}): "
                "free space or choose another folder"
            ) from None
        sentence = f"{source.name}: copied {_gib(records.stat().st_size)} to {records}"
    else:
        sentence = f"{source.name}: read from {records}, {_gib(records.stat().st_size)}"
    with np.load(index) as arrays:
        offsets, lengths = arrays["offsets"], arrays["lengths"]
    return dataclasses.replace(source, get=_getter(source, str(records), offsets, lengths)), sentence


def _fingerprint(source: Source) -> str:
    digest = hashlib.sha256(f"{source.name}\n{source.num_examples}\n".encode())
    digest.update(np.ascontiguousarray(source.labels).tobytes())
    for i in range(source.num_examples):
        digest.update(source.name_of(i).encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()[:24]


def _whole(records: pathlib.Path, index: pathlib.Path) -> bool:
    try:
        with np.load(index) as arrays:
            return records.stat().st_size == int(arrays["size"])
    except (OSError, ValueError, KeyError):
        return False


def _write(source: Source, records: pathlib.Path, index: pathlib.Path) -> None:
    """Copies all readable files; both names appear only when everything is on the disk."""
    count, at = source.num_examples, 0
    offsets, lengths = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in (records, index)]
    try:
        with tf.device("CPU:0"), tf.io.TFRecordWriter(str(temporary[0])) as writer:
            for i, (data, there) in enumerate(files(source).prefetch(64).as_numpy_iterator()):
                if there:
                    writer.write(data)
                    offsets[i], lengths[i] = at, len(data)
                    at += _HEAD + len(data) + _FOOT
        with open(temporary[1], "wb") as file:
            np.savez(file, offsets=offsets, lengths=lengths, size=at)
        for path in temporary:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        os.replace(temporary[0], records)
        os.replace(temporary[1], index)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _getter(source: Source, path: str, offsets: np.ndarray, lengths: np.ndarray):
    read = tfrecords.reader((path,), np.zeros(len(offsets), np.int64), np.maximum(offsets, 0), lengths)
    with tf.device("CPU:0"):
        there, labels = tf.constant(offsets >= 0), tf.constant(source.labels)
        ids = tf.constant([source.name_of(i) for i in range(source.num_examples)])

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        image = tf.cond(tf.gather(there, index), lambda: read(index), lambda: source.get(index)["image"])
        return {"image": tf.ensure_shape(image, []), "label": tf.gather(labels, index), "id": tf.gather(ids, index)}

    return get


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
