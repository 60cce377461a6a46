"""TFRecord shards, read at any position.

A TFRecord is: length (uint64), masked CRC-32C of these 8 bytes, data, masked CRC-32C of the data. An index of where
each record starts takes 12 bytes a record to make; with it, TensorFlow's own reader starts at any record.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data import examples, shards, splits
from vit_tpu.data.examples import Keys, Progress, Records
from vit_tpu.data.source import Source, why
from vit_tpu.errors import UserError

_HEAD, _FOOT = 12, 4
_THREADS = 16
_TELL = 10_000  # records between two looks at the clock


def from_tfrecords(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    train_name: str | None = None,
    validation_name: str | None = None,
    validation_share: float = 0.1,
    keys: Keys = Keys(text=examples.TEXT_KEY),  # noqa: B008  frozen
    names: tuple[str, ...] | None = None,
    label_offset: int = 0,
    multi_label: bool = False,
) -> Source:
    """Returns the `split` ("train" or "validation") of TFRecord shards of `tf.train.Example`.

    Args:
      path, train_name, validation_name: where, see `shards.find`; without a validation split, records are dealt out
        by a hash of their id, `validation_share` of them to validation.
      keys: under which keys image and label lie; ImageNet's by default.
      names, label_offset, multi_label: see `class_names.number`.

    Raises:
      UserError: no or missing shards, a shard that is empty, compressed, cut short or not of Examples with these
        keys, labels that make no sense.
    """
    splits.check_split(split, validation_share)
    paths, hashed = shards.find(os.fspath(path), split, train_name, validation_name)
    source = examples.to_source(
        index(paths, keys), keys, shards.label_of(paths), names=names, multi_label=multi_label,
        label_offset=label_offset,
    )  # fmt: skip
    return splits.by_hash(source, split, validation_share) if hashed else source


def index(paths: tuple[str, ...], keys: Keys) -> Records:
    """Finds every record of the shards and reads its label; of images, only where they are.

    Raises:
      UserError: as `from_tfrecords`, naming the shard.
    """
    return examples.once("tfrecord", paths, keys, lambda: _index(paths, keys))


def _index(paths: tuple[str, ...], keys: Keys) -> Records:
    progress = Progress("Reading labels", len(paths))
    found: list[tuple[np.ndarray, np.ndarray, list[Any], dict[Any, str]]] = []
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        try:
            found += pool.map(lambda path: _index_one(path, keys, progress), paths)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    progress.end()
    counts = [len(offsets) for offsets, _, _, _ in found]
    examples.check_count(paths, counts)
    offsets = np.concatenate([part for part, _, _, _ in found])
    lengths = np.concatenate([part for _, part, _, _ in found])
    shard = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
    return Records(
        paths=paths,
        shard=shard,
        position=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        labels=[label for _, _, labels, _ in found for label in labels],
        texts={label: text for _, _, _, texts in found for label, text in texts.items()},
        read=reader(paths, shard, offsets, lengths),
    )


def reader(paths: tuple[str, ...], shard: np.ndarray, offsets: np.ndarray, lengths: np.ndarray):
    """Returns the function int64 index -> the record's data, a scalar string, for use inside a graph."""
    with tf.device("CPU:0"):
        path_table, shard_table = tf.constant(list(paths)), tf.constant(shard)
        offset_table, length_table = tf.constant(offsets), tf.constant(lengths)

    def read(index: tf.Tensor) -> tf.Tensor:
        # One dataset for each record: it opens the shard, reads what one record needs and checks both checksums.
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.reshape(tf.gather(path_table, tf.gather(shard_table, index)), [1]),
            compression_type="",
            buffer_size=tf.gather(length_table, index) + _HEAD + _FOOT,
            byte_offsets=tf.reshape(tf.gather(offset_table, index), [1]),
        )
        one = tf.raw_ops.TakeDataset(
            input_dataset=variant, count=tf.constant(1, tf.int64), output_types=[tf.string], output_shapes=[[]]
        )
        return tf.raw_ops.DatasetToSingleElement(dataset=one, output_types=[tf.string], output_shapes=[[]])[0]

    return read


def _index_one(path: str, keys: Keys, progress: Progress) -> tuple[np.ndarray, np.ndarray, list[Any], dict[Any, str]]:
    offsets, lengths, labels = [], [], []
    texts: dict[Any, str] = {}
    name = path.rpartition("/")[2]
    told, size = 0, max(tf.io.gfile.stat(path).length, 1)
    for number, (offset, buffer, start, end) in enumerate(_records(path)):
        if number % _TELL == _TELL - 1:
            progress.step((offset - told) / size)
            told = offset
        label, text = examples.look(buffer, start, end, keys, f"{name}#{number}")
        offsets.append(offset)
        lengths.append(end - start)
        labels.append(label)
        if text is not None and isinstance(label, int) and label not in texts:
            texts[label] = text
    progress.step((size - told) / size)
    return np.array(offsets, np.int64), np.array(lengths, np.int64), labels, texts


def _records(path: str) -> Iterator[tuple[int, Any, int, int]]:
    """Yields (offset of the record, buffer, start and end of its data in the buffer)."""
    try:
        if "://" in path:  # remote systems read ahead: the way through is sequential
            yield from _remote_records(path)
            return
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                if hasattr(mmap, "MADV_RANDOM"):
                    buffer.madvise(mmap.MADV_RANDOM)  # images are stepped over, not read
                at, size = 0, len(buffer)
                while at < size:
                    end = at + _HEAD + _length(buffer[at : at + _HEAD], path, at, size)
                    yield at, buffer, at + _HEAD, end
                    at = end + _FOOT
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"{path} cannot be read ({why(error)}): check data.path and access rights") from None


def _remote_records(path: str) -> Iterator[tuple[int, Any, int, int]]:
    size, at = tf.io.gfile.stat(path).length, 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while at < size:
            data = _length(file.read(_HEAD), path, at, size)
            buffer = file.read(data + _FOOT)
            yield at, buffer, 0, data
            at += _HEAD + data + _FOOT


def _length(head: bytes, path: str, at: int, size: int) -> int:
    """Returns the length in a record's header, having checked its checksum and that the file is long enough."""
    if at == 0 and head[:2] in (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda"):
        raise UserError(f"{path} {shards.COMPRESSED}")
    if len(head) < _HEAD:
        raise UserError(f"{path} ends in the middle of a record at byte {at}: copy it again")
    length, checksum = struct.unpack("<QI", head)
    if masked_crc32c(head[:8]) != checksum:
        raise UserError(
            f"{path} is not a TFRecord file: check data.path and data.source"
            if at == 0
            else f"{path} is damaged at byte {at} (wrong checksum of a length): copy it again"
        )
    if at + _HEAD + length + _FOOT > size:
        raise UserError(f"{path} ends in the middle of the record at byte {at}: copy it again")
    return length


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) of `data`, rotated and shifted as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
