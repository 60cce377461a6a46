"""Random numbers without state: each is a function of (seed, epoch, index) and a stream number.

TensorFlow's stateless generators take one seed a call; here every example of a batch has its own.
So the generator is a hash, splitmix64's finaliser (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), which vectorises and gives the same numbers alone, in a
batch, on any host and after a resume.
"""

from __future__ import annotations

import tensorflow as tf

_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def _u64(value: int) -> tf.Tensor:
    return tf.constant(value % 2**64, tf.uint64)


def mix(value: tf.Tensor) -> tf.Tensor:
    """Returns a well mixed uint64 for each uint64 of `value` (a bijection)."""
    shift = tf.bitwise.right_shift
    value = value + _u64(_GOLDEN)
    value = tf.bitwise.bitwise_xor(value, shift(value, _u64(30))) * _u64(_M1)
    value = tf.bitwise.bitwise_xor(value, shift(value, _u64(27))) * _u64(_M2)
    return tf.bitwise.bitwise_xor(value, shift(value, _u64(31)))


def make_key(seed: int, *numbers: tf.Tensor | int) -> tf.Tensor:
    """Returns a uint64 key for `seed` and whole numbers (int64, broadcast), e.g. epoch, index."""
    key = mix(_u64(seed))
    for number in numbers:
        key = mix(key + tf.cast(number, tf.uint64))
    return key


def _of_stream(key: tf.Tensor, stream: tf.Tensor | int) -> tf.Tensor:
    offset = _u64(stream * _M2) if isinstance(stream, int) else tf.cast(stream, tf.uint64) * _u64(_M2)
    return mix(key + offset)


def uniform(key: tf.Tensor, stream: tf.Tensor | int) -> tf.Tensor:
    """Returns float32 in [0, 1), one for each key; each `stream` (0 or more) is an independent number."""
    bits = tf.bitwise.right_shift(_of_stream(key, stream), _u64(40))
    return tf.cast(tf.cast(bits, tf.int32), tf.float32) * 2.0**-24


def integer(key: tf.Tensor, stream: tf.Tensor | int, count: int) -> tf.Tensor:
    """Returns int32 in [0, count), one for each key; count at most 2^24."""
    return tf.minimum(tf.cast(uniform(key, stream) * float(count), tf.int32), count - 1)


def op_seed(key: tf.Tensor, stream: tf.Tensor | int) -> tf.Tensor:
    """Returns int32 [..., 2] for TensorFlow's own stateless ops."""
    bits = _of_stream(key, stream)
    halves = [tf.bitwise.right_shift(bits, _u64(33)), bits & _u64(2**31 - 1)]
    return tf.stack([tf.cast(half, tf.int32) for half in halves], axis=-1)
