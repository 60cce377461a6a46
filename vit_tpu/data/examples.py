"""Records that hold a `tf.train.Example`: labels read without the images, images read inside the graph."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from vit_tpu.data import class_names
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest

IMAGE_KEY, LABEL_KEY, TEXT_KEY = "image/encoded", "image/class/label", "image/class/text"  # ImageNet's


@dataclass(frozen=True)
class Keys:
    """Under which keys an Example holds the encoded image, its label and (if it does) the name of its class."""

    image: str = IMAGE_KEY
    label: str = LABEL_KEY
    text: str | None = None


@dataclass(frozen=True)
class Records:
    """Where records lie and what their labels are.

    Attributes:
      paths: the shards.
      shard: int32 [n], index of the shard of each record.
      position: int64 [n], its number within the shard.
      labels: for each a whole number, text, or a list of them.
      texts: {label: class name} where the records tell.
      read: int64 index -> the serialised Example, inside a graph.
    """

    paths: tuple[str, ...]
    shard: np.ndarray
    position: np.ndarray
    labels: list[Any]
    texts: Mapping[Any, str]
    read: Callable[[tf.Tensor], tf.Tensor]

    def name_of(self, i: int) -> str:
        return f"{_basename(self.paths[self.shard[i]])}#{self.position[i]}"


def to_source(
    records: Records,
    keys: Keys,
    name: str,
    *,
    names: tuple[str, ...] | None = None,
    multi_label: bool = False,
    label_offset: int = 0,
) -> Source:
    """Returns the records as a source; a record's id is "<shard>#<number>".

    Args:
      names: class names; None: the records' own texts if complete, else numbers.
      multi_label, label_offset: see `class_names.number`.
    """
    labels, classes = class_names.number(
        records.labels, name=name, name_of=records.name_of, names=names, multi_label=multi_label,
        offset=label_offset, collect=False,
    )  # fmt: skip
    if names is None and records.texts:
        own = [records.texts.get(i - label_offset) for i in range(len(classes))]
        if all(own) and len(set(own)) == len(own):
            classes = tuple(map(str, own))
    with tf.device("CPU:0"):
        label_tensor, shards = tf.constant(labels), tf.constant(records.shard)
        positions = tf.constant(records.position)
        stems = tf.constant([_basename(path) for path in records.paths])

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        image = tf.io.FixedLenFeature([], tf.string)
        number = tf.strings.as_string(tf.gather(positions, index))
        return {
            "image": tf.io.parse_single_example(records.read(index), {keys.image: image})[keys.image],
            "label": tf.gather(label_tensor, index),
            "id": tf.strings.join([tf.gather(stems, tf.gather(shards, index)), "#", number]),
        }

    return Source(
        name=name,
        num_examples=len(records.shard),
        num_classes=len(classes),
        class_names=classes,
        labels=labels,
        get=get,
        image_shape=None,
        name_of=records.name_of,
    )


def look(buffer: Any, start: int, end: int, keys: Keys, where: str) -> tuple[Any, str | None]:
    """Reads label and class text of the Example in buffer[start:end] and steps over everything large.

    Args:
      buffer: bytes, or anything that gives an int for an index and bytes for a slice, such as a memory map.
      where: the record's id, for messages.

    Returns:
      The label (int, str, or a list unless there is exactly one) and the class text or None.

    Raises:
      UserError: not an Example, no image or no label under the keys.
    """
    wanted = {keys.label.encode(): "label"}
    if keys.text:
        wanted[keys.text.encode()] = "text"
    image = keys.image.encode()
    seen: list[bytes] = []
    got: dict[str, list[Any]] = {}
    try:
        for key, value_start, value_end in _entries(buffer, start, end):
            if key in wanted:
                got[wanted[key]] = _values(bytes(buffer[value_start:value_end]))
            elif key == image and _is_bytes(buffer, value_start, value_end):
                got["image"] = []
            seen.append(key)
    except (IndexError, ValueError):
        raise UserError(f"{where} is not a tf.train.Example, or is damaged: write the shard again") from None
    for part, name, option in (("image", keys.image, "data.image_key"), ("label", keys.label, "data.label_key")):
        if part not in got:
            have = sorted(key.decode(errors="replace") for key in seen)
            text = f'as bytes under "{name}"' if part == "image" else f'under "{name}"'
            raise UserError(
                f"{where} has no {part} {text}{nearest(name, have)}; it has {', '.join(have) or 'nothing'}: "
                f"set {option}"
            )
    labels = got["label"]
    texts = got.get("text")
    return (labels[0] if len(labels) == 1 else labels), (texts[0] if texts else None)


def _entries(buffer: Any, start: int, end: int) -> Iterable[tuple[bytes, int, int]]:
    """Yields (key, start, end of the Feature) for each entry of an Example's map, by the protocol buffer wire format.

    Example {1: Features {1: repeated entry {1: key, 2: Feature}}}; all of them length-delimited (tag 8 * field + 2).
    """
    for features, features_end in _fields(buffer, start, end, 0x0A):
        for entry, entry_end in _fields(buffer, features, features_end, 0x0A):
            key_start, key_end = _field(buffer, entry, entry_end, 0x0A)
            key = bytes(buffer[key_start:key_end])
            # A Feature without any value may be left out of the entry.
            yield (key, *(_field(buffer, key_end, entry_end, 0x12) if key_end < entry_end else (entry_end, entry_end)))


def _fields(buffer: Any, start: int, end: int, tag: int) -> Iterable[tuple[int, int]]:
    while start < end:
        first, start = _field(buffer, start, end, tag)
        yield first, start


def _field(buffer: Any, start: int, end: int, tag: int) -> tuple[int, int]:
    if buffer[start] != tag:
        raise ValueError("another field")
    size, shift, at = 0, 0, start + 1
    while True:
        byte = buffer[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if at + size > end:
        raise ValueError("longer than its parent")
    return at, at + size


def _is_bytes(buffer: Any, start: int, end: int) -> bool:
    return end > start + 2 and buffer[start] == 0x0A  # Feature {1: bytes_list}, not an empty one


def _values(data: bytes) -> list[Any]:
    try:
        feature = tf.train.Feature.FromString(data)
    except Exception:  # protobuf's DecodeError lives in a module of its own
        raise ValueError("not a Feature") from None
    kind = feature.WhichOneof("kind")
    if kind is None:
        return []
    values = list(getattr(feature, kind).value)
    if kind == "bytes_list":
        return [value.decode() for value in values]
    return [int(value) if kind == "float_list" and value == int(value) else value for value in values]


_latest: tuple[Any, Records] | None = None


def once(kind: str, paths: tuple[str, ...], keys: Keys, make: Callable[[], Records]) -> Records:
    """Returns `make()`, or what it gave the last time for the same shards: two splits often lie in one set of them.

    Shards that have changed since are read again.
    """
    global _latest
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        stats = [(stat.length, stat.mtime_nsec) for stat in pool.map(tf.io.gfile.stat, paths)]
    key = kind, paths, keys, tuple(stats)
    if _latest is None or _latest[0] != key:
        _latest = key, make()
    return _latest[1]


class Progress:
    """Says every few seconds how far a long reading of shards is; silent when it is short. Threads may share it."""

    def __init__(self, what: str, total: int, every: float = 5.0) -> None:
        self.what, self.total, self.every = what, total, every
        self.done, self.began = 0.0, time.monotonic()
        self.next = self.began + every
        self._lock = threading.Lock()

    def step(self, share: float) -> None:
        """Counts a share of one shard."""
        with self._lock:
            self.done += share
            now = time.monotonic()
            if now >= self.next:
                self.next = now + self.every
                left = (now - self.began) / self.done * (self.total - self.done)
                logging.info("%s: %.1f of %d shards, about %.0f s left.", self.what, self.done, self.total, left)

    def end(self) -> None:
        seconds = time.monotonic() - self.began
        if seconds >= self.every:
            logging.info("%s: %d shards in %.0f s.", self.what, self.total, seconds)


def check_count(paths: Sequence[str], counts: Sequence[int]) -> None:
    """Raises a UserError that names the first shard without a record."""
    empty = [path for path, count in zip(paths, counts) if not count]
    if empty:
        raise UserError(f"{empty[0]} holds no images, or was cut short: remove it, or copy it again")


def _basename(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
