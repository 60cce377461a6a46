"""Traces are read through xprof: steps, times, layers, one advice."""

import os
import pathlib
import time

import pytest
import tensorflow as tf

from vit_tpu.diagnose import profile
from vit_tpu.errors import UserError
from vit_tpu.training import storage, traces


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Five marked steps of a product in attention and a smaller one in mlp, the second with a pause for Python."""
    folder = tmp_path_factory.mktemp("trace")

    @tf.function
    def step(x):
        with tf.name_scope("blocks/0/attention"):
            x = tf.matmul(x, x) * 1e-3
        with tf.name_scope("blocks/0/mlp"):
            return tf.matmul(x[:100], x) * 1e-3

    x = tf.random.normal([600, 600])
    step(x)
    tf.profiler.experimental.start(str(folder))
    for number in range(5):
        with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
            step(x).numpy()
    tf.profiler.experimental.stop()
    return folder


def test_steps_and_layers_of_a_real_trace(trace):
    found = profile.read(trace)
    assert found.steps == 5 and found.step_ms > 0
    assert found.layers["attention"] > found.layers["mlp"] > 0
    assert sum(found.layers.values()) == pytest.approx(1.0)
    assert found.operations[0][0].startswith("blocks/0/attention")
    assert not found.memory
    text = str(found)
    assert "5 executions" in text and "no device memory events" in text and "advice: " in text


def test_a_trace_without_marked_steps_says_so(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    tf.matmul(tf.ones([64, 64]), tf.ones([64, 64])).numpy()
    time.sleep(0.05)
    tf.profiler.experimental.stop()
    found = profile.read(tmp_path)
    assert found.steps == 0 and "holds no step" in found.advice()


def made(**times):
    whole = sum(times.values())
    shares = {"compute": "device compute", "input": "waiting for input", "compile": "compilation",
              "python": "other (Python, I/O)", "collectives": "collectives"}  # fmt: skip
    return profile.Profile("t", "GPU", 3, whole, {shares[k]: v for k, v in times.items()}, [], {"mlp": 0.6}, True)


@pytest.mark.parametrize(
    "found, words",
    [
        (made(compute=80.0, input=20.0), "20% of a step waits for input"),
        (made(compute=80.0, compile=20.0), "holds a compilation"),
        (made(compute=70.0, python=30.0), "raise training.steps_per_execution"),
        (made(compute=70.0, collectives=30.0), "larger batch per device"),
        (made(compute=99.0, input=1.0), "most of it mlp (60%)"),
    ],
)
def test_advice_follows_what_dominates(found, words):
    assert words in found.advice()


@pytest.mark.parametrize(
    "operation, kind",
    [
        ("blocks/3/attention/softmax/Exp", "softmax"),
        ("gradient_tape/blocks/11/mlp/MatMul_1", "mlp"),
        ("blocks/0/norm1/mul", "norm"),
        ("AdamW/add_38", "optimizer"),
        ("StatefulPartitionedCall/Identity", "other"),
    ],
)
def test_operations_belong_to_the_layer_in_their_name(operation, kind):
    assert profile.kind_of(operation) == kind


def test_missing_and_broken_traces_are_named(tmp_path):
    with pytest.raises(UserError, match="holds no trace.*--profile=START,STOP"):
        profile.read(tmp_path)
    (tmp_path / "host.xplane.pb").write_bytes(b"not a trace")
    with pytest.raises(UserError, match="cannot be read by xprof"):
        profile.read(tmp_path)


def test_batches_of_an_evaluation_between_two_executions_are_no_steps(tmp_path):
    square = tf.function(lambda x: tf.matmul(x, x))
    square(tf.ones([200, 200]))
    tf.profiler.experimental.start(str(tmp_path))
    for name, number in (("train", 0), ("test", 0), ("test", 1), ("predict", 0), ("train", 8)):
        with tf.profiler.experimental.Trace(name, step_num=number, _r=1):
            square(tf.ones([200, 200])).numpy()
    tf.profiler.experimental.stop()
    assert traces.finish(profile.find_trace(tmp_path)) == [0, 8]
    assert profile.read(tmp_path).steps == 2


def test_trace_in_a_store_is_found_and_read(trace, tmp_path):
    root = f"ram://{tmp_path.name}-{os.getpid()}/run"
    with pytest.raises(UserError, match="holds no trace"):
        profile.find_trace(root)
    content = pathlib.Path(profile.find_trace(trace)).read_bytes()
    for moment in ("2026_01_02", "2026_01_01"):
        folder = storage.join(root, "logs", "plugins", "profile", moment)
        storage.make_folder(folder)
        with storage.writing(storage.join(folder, "host.xplane.pb")) as file:
            file.write(content)
    newest = f"{root}/logs/plugins/profile/2026_01_02/host.xplane.pb"
    assert profile.find_trace(root) == profile.find_trace(f"{root}/logs") == profile.find_trace(newest) == newest
    found = profile.read(root)
    assert found.trace == newest and found.steps == 5
