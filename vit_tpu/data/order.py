"""Order as a function: which record stands at position p is known without reading the others.

Training is one endless stream of positions. Position p belongs to epoch p // n and holds record
`permutation(seed, epoch)[p % n]`, so every record comes once in each n positions, batches run on
across the epoch border (nothing is dropped), and starting at step s is a multiplication.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from vit_tpu.data import keys
from vit_tpu.errors import UserError

# TensorFlow's own default, 4 rounds, is the smallest the cipher allows; 8 cost 0.8 us an index.
_ROUNDS = 8


def shuffled(offset: tf.Tensor, epoch: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
    """Returns int64 record indices for `offset` (0..n-1) within `epoch`, both int64 [b].

    A block cipher over 0..n-1 (tf.random.experimental.index_shuffle's op): no memory, no state.
    Its seeds are hashed first: with consecutive numbers as seeds, TensorFlow's op gives visibly
    related permutations for consecutive epochs.
    """
    key = keys.make_key(seed, epoch)
    halves = [keys.op_seed(key, 0), keys.op_seed(key, 1)[..., :1]]
    return tf.raw_ops.RandomIndexShuffle(
        index=offset,
        seed=tf.concat(halves, axis=-1),
        max_index=tf.constant(num_examples - 1, tf.int64),
        rounds=_ROUNDS,
    )


def locate(position: tf.Tensor, num_examples: int, seed: int, shuffle: bool = True) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (epoch, record index), int64 [b], for int64 stream positions [b]."""
    epoch = position // num_examples
    offset = position - epoch * num_examples
    if not shuffle:
        return epoch, offset
    return epoch, shuffled(offset, epoch, num_examples, seed)


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns int64 [n]: the records of `epoch` in the order in which training reads them."""
    offset = tf.range(num_examples, dtype=tf.int64)
    with tf.device("CPU:0"):
        return shuffled(offset, tf.fill([num_examples], np.int64(epoch)), num_examples, seed).numpy()


def repeated(position: tf.Tensor, batch_size: int, repeats: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (position among distinct examples, number of the copy), int64 [b], for stream positions [b].

    Repeated augmentation (Hoffer et al., "Augment your batch", arXiv:1901.09335): a global batch
    holds batch_size / repeats examples, each `repeats` times. The copies stand batch_size / repeats
    apart, so that mixup does not meet an example with itself and hosts share them as they fall.
    Distinct examples are counted through: each comes `repeats` times in every n x repeats positions.
    """
    distinct = batch_size // repeats
    step, slot = position // batch_size, position % batch_size
    return step * distinct + slot % distinct, slot // distinct


def host_positions(step: tf.Tensor, batch_size: int, num_hosts: int = 1, host: int = 0) -> tf.Tensor:
    """Returns int64 [batch_size / num_hosts]: the stream positions of `host` in step `step`.

    Host h takes the h-th slice of each global batch, so the global batch, hosts laid end to end,
    is the same for every number of hosts.
    """
    share = host_share(batch_size, num_hosts, host)
    first = tf.cast(step, tf.int64) * batch_size + host * share
    return first + tf.range(share, dtype=tf.int64)


def host_share(batch_size: int, num_hosts: int, host: int) -> int:
    """Returns how many examples of each global batch one host reads; checks the three numbers."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: use 1 or more")
    if num_hosts < 1 or batch_size % num_hosts:
        lower = max(batch_size // max(num_hosts, 1), 1) * max(num_hosts, 1)
        raise UserError(
            f"batch_size {batch_size} does not divide among {num_hosts} hosts: "
            f"use {lower} or {lower + max(num_hosts, 1)}"
        )
    if not 0 <= host < num_hosts:
        raise UserError(f"host {host} is not one of 0..{num_hosts - 1}: number hosts from 0")
    return batch_size // num_hosts


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns how many full batches fit in one epoch (at least 1), the same on every host."""
    return max(num_examples // batch_size, 1)
