"""ArrayRecord files: records by number is what the format is for."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data import examples, shards, splits
from vit_tpu.data.examples import Keys, Progress, Records
from vit_tpu.data.source import Source, why
from vit_tpu.errors import UserError

_OPEN = 256  # files kept open
_BLOCK = 256  # records read together when labels are collected
_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # a Riegeli file's first bytes
# The default reads ahead and keeps the index on disk: right for sequential reading.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0,index_storage_option:in_memory"


def from_array_records(
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
    """Returns the `split` of ArrayRecord files of `tf.train.Example`; the arguments are `from_tfrecords`'s.

    Raises:
      UserError: as there; and for an address that is not local, which the format's library cannot read, or without
        that library.
    """
    splits.check_split(split, validation_share)
    paths, hashed = shards.find(os.fspath(path), split, train_name, validation_name)
    source = examples.to_source(
        index(paths, keys), keys, shards.label_of(paths), names=names, multi_label=multi_label,
        label_offset=label_offset,
    )  # fmt: skip
    return splits.by_hash(source, split, validation_share) if hashed else source


def index(paths: tuple[str, ...], keys: Keys) -> Records:
    """Counts the records of the files and reads their labels, for which whole records have to be decompressed.

    Raises:
      UserError: as `from_array_records`, naming the file.
    """
    remote = next((path for path in paths if "://" in path), None)
    if remote:
        raise UserError(f"{remote}: ArrayRecord files are read from local disks only: copy them, or use TFRecord")
    return examples.once("array_record", paths, keys, lambda: _index(paths, keys))


def _index(paths: tuple[str, ...], keys: Keys) -> Records:
    files = _Files(paths)
    progress = Progress("Reading labels", len(paths))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: _index_one(files, number, keys, progress), range(len(paths))))
    progress.end()
    counts = [len(labels) for labels, _ in found]
    examples.check_count(paths, counts)
    shard = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
    position = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])

    def read(index: tf.Tensor) -> tf.Tensor:
        def one(i: np.ndarray) -> bytes:
            return files.read(int(shard[i]), int(position[i]))

        return tf.ensure_shape(tf.numpy_function(one, [index], tf.string), [])

    return Records(
        paths=paths,
        shard=shard,
        position=position,
        labels=[label for labels, _ in found for label in labels],
        texts={label: text for _, texts in found for label, text in texts.items()},
        read=read,
    )


def _index_one(files: _Files, number: int, keys: Keys, progress: Progress) -> tuple[list[Any], dict[Any, str]]:
    labels: list[Any] = []
    texts: dict[Any, str] = {}
    name = files.paths[number].rpartition("/")[2]
    count = files.count(number)
    for first in range(0, count, _BLOCK):
        for record in files.block(number, first, _BLOCK):
            label, text = examples.look(record, 0, len(record), keys, f"{name}#{len(labels)}")
            labels.append(label)
            if text is not None and isinstance(label, int) and label not in texts:
                texts[label] = text
        progress.step(min(_BLOCK, count - first) / count)
    return labels, texts


class _Files:
    """Readers that are opened when needed, the latest kept; each used by one thread at a time."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths
        self._readers: OrderedDict[int, tuple[Any, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def count(self, number: int) -> int:
        return self._reader(number)[0].num_records()

    def block(self, number: int, first: int, size: int) -> list[bytes]:
        reader, lock = self._reader(number)
        try:
            with lock:
                return reader.read(first, min(first + size, reader.num_records()))
        except Exception as error:  # pybind turns every C++ status into some exception
            raise UserError(f"{self.paths[number]} is damaged ({why(error)}): copy it again") from None

    def read(self, number: int, position: int) -> bytes:
        reader, lock = self._reader(number)
        with lock:
            return reader.read([position])[0]

    def _reader(self, number: int) -> tuple[Any, threading.Lock]:
        with self._lock:
            if number in self._readers:
                self._readers.move_to_end(number)
            else:
                self._readers[number] = _open(self.paths[number]), threading.Lock()
                if len(self._readers) > _OPEN:
                    self._readers.popitem(last=False)  # closes itself when its last reading ends
            return self._readers[number]


def _open(path: str) -> Any:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise UserError(f"ArrayRecord files need array_record ({error}): pip install 'vit_tpu[data]'") from None
    try:
        with open(path, "rb") as file:  # the library takes any file for one without records
            start = file.read(len(_SIGNATURE))
        if start != _SIGNATURE:
            raise UserError(f"{path} is not an ArrayRecord file: check data.path and data.source")
        return ArrayRecordReader(path, options=_OPTIONS)
    except UserError:
        raise
    except Exception as error:  # pybind turns every C++ status into some exception
        raise UserError(
            f"{path} is not a readable ArrayRecord file ({why(error)}): check data.path, copy it again"
        ) from None
