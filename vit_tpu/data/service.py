"""Reading and decoding in other processes, through tf.data service, in exact order.

tf.data service deals elements to its workers as they ask, so a stream over several of them has no
order. Here a batch is a function of its step: each address is a service of one worker, worker w of
W is sent the pipeline of the steps w, w + W, w + 2 W, ... and the batches are taken in turn. The
stream is the one a single process would give, bit for bit, and resumes at any step. Each batch
brings its step, which is checked.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from vit_tpu.data.source import Source
from vit_tpu.errors import UserError

_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def load(make: Callable[[int, int], tf.data.Dataset], addresses: Sequence[str], start: int) -> tf.data.Dataset:
    """Returns what `make(start, 1)` gives, made by the processes at `addresses`.

    Args:
      make: (first step, stride) -> endless dataset of (step, ...).
      addresses: "host:port", one for each process.
      start: the first step.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # Odd formats are decoded by Python, which only this process has: there such a record fails and
    # is read again here. The warning that Python does not travel would come once a run.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    parts = [
        make(start + number, len(addresses))
        .with_options(options)
        .apply(
            tf.data.experimental.service.distribute(
                processing_mode=tf.data.experimental.service.ShardingPolicy.OFF,
                service=f"grpc://{address}",
                compression=None,  # finished pixels compress badly
            )
        )
        for number, address in enumerate(addresses)
    ]
    turns = tf.data.Dataset.range(len(parts)).repeat()
    joined = parts[0] if len(parts) == 1 else tf.data.Dataset.choose_from_datasets(parts, turns)

    def checked(due: tf.Tensor, record: tuple[Any, ...]) -> tuple[Any, ...]:
        message = "a data service sent another step than was due: it must have one worker of its own"
        with tf.control_dependencies([tf.debugging.assert_equal(record[0], due, message)]):
            return tf.identity(record[0]), *record[1:]

    zipped = tf.data.Dataset.zip((tf.data.Dataset.counter(start), joined))
    return zipped.map(checked).apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def needs_python(source: Source) -> bool:
    """Whether reading a record takes this process's Python, which does not travel to others."""
    spec = tf.TensorSpec([], tf.int64)
    graph = tf.function(source.get, autograph=False).get_concrete_function(spec).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return any(node.op in _PYTHON for node in nodes)


def check(source: Source, addresses: Sequence[str]) -> None:
    """Raises a UserError for a source that a service cannot read, or an address where none answers."""
    if not source.encoded:
        raise UserError(f"{source.name} is in memory here: a data service reads files, leave data_service out")
    if needs_python(source):
        raise UserError(f"{source.name} is read by Python, which a data service does not have: leave data_service out")
    if len(set(addresses)) < len(addresses):
        raise UserError(f"data_service names a process twice ({', '.join(addresses)}): give each once")
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise UserError(f'data_service has the address "{address}": write host:port, such as localhost:5050')
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise UserError(
                f"no data service answers at {address} ({error.strerror or error}): start one there with "
                f"python -m vit_tpu.data_service --port={port}"
            ) from None


def serve(port: int, host: str = "localhost") -> tuple[Any, str]:
    """Starts a service with one worker in this process.

    Args:
      port: to listen on; 0 for any free one.
      host: the name or address under which the training process reaches this machine.

    Returns:
      The running servers, which stop when they are garbage collected, and the address "host:port".
    """
    service = tf.data.experimental.service
    try:
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    except tf.errors.OpError as error:
        raise UserError(f"port {port} cannot be used ({str(error).splitlines()[0]}): choose another") from None
    address = dispatcher.target.removeprefix("grpc://").rpartition(":")[2]
    config = service.WorkerConfig(dispatcher_address=f"localhost:{address}", worker_address=f"{host}:%port%", port=0)
    return (dispatcher, service.WorkerServer(config)), f"{host}:{address}"
