"""On loopback with two processes: they share neither Python nor memory with the test."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from vit_tpu import data_service
from vit_tpu.data import service
from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.folders import from_folders
from vit_tpu.data.pipeline import train_pipeline
from vit_tpu.errors import UserError

OPTIONS = {"batch_size": 4, "image_size": 8, "crop": "inception", "flip": True, "erasing": 0.5, "cutmix": 1.0,
           "label_format": "onehot", "seed": 3}  # fmt: skip


@pytest.fixture(scope="module")
def addresses():
    command = [sys.executable, "-m", "vit_tpu.data_service", "--port=0"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        # "serving at localhost:PORT: train with ..."
        yield [process.stdout.readline().split()[2].rstrip(":") for process in processes]
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(20) for process in processes]
        for process in processes:
            process.stdout.close()
    assert codes == [0, 0]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Ten images; the GIF needs Python, which the processes do not have, and one file is cut short."""
    root = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(0)
    for i in range(10):
        folder = root / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{i}.img"
        Image.fromarray(rng.integers(0, 256, (10 + i, 12, 3), np.uint8)).save(path, "GIF" if i == 3 else "PNG")
        if i == 5:
            path.write_bytes(path.read_bytes()[:-40])
    return from_folders(root, validation_share=1e-12)


def _take(source, count, **options):
    broken = BrokenRecords(1)
    dataset = train_pipeline(source, broken=broken, **OPTIONS | options)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    batches = [tuple(part.numpy() for part in batch) for batch in dataset.take(count)]
    assert set(broken.reasons) <= {"b/5.img"}
    return batches, broken


def _assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_two_processes_give_the_stream_of_one(addresses, source):
    expected, broken = _take(source, 7)
    found, found_broken = _take(source, 7, services=addresses)
    _assert_same(found, expected)
    assert found_broken.reasons == broken.reasons and list(broken.reasons) == ["b/5.img"]
    _assert_same(_take(source, 3, start_step=3, services=addresses)[0], expected[3:6])


def test_a_step_that_was_not_due_is_an_error(addresses):
    """As it comes from a service with two workers, each of which sends every step."""

    def make(first, stride):
        return tf.data.Dataset.counter(first, stride).map(lambda step: (tf.maximum(step // 2, first), step))

    with pytest.raises(tf.errors.InvalidArgumentError, match="must have one worker of its own"):
        list(service.load(make, addresses[:1], 4).take(20))


def test_wrong_addresses_and_sources_are_one_line_of_error(source):
    for addresses, message in (
        (["localhost:1"], "no data service answers at localhost:1 .*vit_tpu.data_service --port=1"),
        (["localhost"], "write host:port"),
        (["a:1", "a:1"], "names a process twice"),
    ):
        with pytest.raises(UserError, match=message):
            service.check(source, addresses)
    with pytest.raises(UserError, match="in memory here"):
        service.check(from_arrays(np.zeros((2, 4, 4, 3), np.uint8), np.arange(2)), ["localhost:1"])


def test_a_source_read_by_python_is_refused(source):
    import dataclasses

    def get(index):
        image = tf.numpy_function(lambda i: b"", [index], tf.string)
        return {"image": tf.ensure_shape(image, []), "label": tf.constant(0), "id": tf.constant("")}

    with pytest.raises(UserError, match="is read by Python"):
        service.check(dataclasses.replace(source, get=get), ["localhost:1"])


def test_the_command_refuses_a_port_that_is_none(capsys):
    assert data_service.main(["--port=70000"]) == 2
    assert "--port=70000" in capsys.readouterr().err
