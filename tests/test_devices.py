"""Which devices a run takes, what it says of them, and every wrong way to ask; TPUs are stubs."""

import json
import types

import numpy as np
import pytest
import tensorflow as tf

from vit_tpu import cluster, devices, load_config
from vit_tpu.cluster import Cluster
from vit_tpu.data import pipeline
from vit_tpu.data.synthetic import synthetic
from vit_tpu.errors import UserError
from vit_tpu.training import build, remote

PAIR = ("10.0.0.2:12345", "10.0.0.3:12345")


def tf_config(kind="worker", index=1, **jobs):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


# --- the processes of a run


def test_workers_and_worker_make_a_cluster():
    assert cluster.find(PAIR, 1, {}) == Cluster(PAIR, 1)
    assert cluster.find((PAIR[0], f" {PAIR[1]}"), 1, {}) == Cluster(PAIR, 1)
    assert Cluster(PAIR, 1).place(0) == ("10.0.0.2", 12345)


def test_tf_config_says_the_same_and_the_chief_comes_first():
    assert cluster.find((), None, tf_config(worker=PAIR)) == Cluster(PAIR, 1)
    three = tf_config("worker", 1, worker=PAIR, chief=["10.0.0.1:1"])
    assert cluster.find((), None, three) == Cluster(("10.0.0.1:1", *PAIR), 2)
    assert cluster.find((), None, tf_config("chief", 0, worker=PAIR, chief=["10.0.0.1:1"])).index == 0


def test_one_process_is_no_cluster():
    assert cluster.find((), None, {}) is None
    assert cluster.find(PAIR[:1], 0, {}) is None
    assert cluster.find((), None, tf_config("worker", 0, worker=PAIR[:1])) is None
    assert cluster.find((), None, {"TF_CONFIG": "{}"}) is None


@pytest.mark.parametrize(
    ("workers", "worker", "environment", "message"),
    [
        (PAIR, None, {}, "--worker=0 to 1"),
        (PAIR, 2, {}, "no worker 2 among 2"),
        ((), 1, {}, "without workers"),
        (("10.0.0.2", PAIR[1]), 0, {}, 'the address "10.0.0.2": write host:port'),
        (("10.0.0.2:99999", PAIR[1]), 0, {}, "write host:port"),
        ((PAIR[0], PAIR[0]), 0, {}, "names 10.0.0.2:12345 twice"),
        ((), None, {"TF_CONFIG": "not json"}, "TF_CONFIG is not what TensorFlow expects"),
        ((), None, {"TF_CONFIG": '["a"]'}, "TF_CONFIG is not what TensorFlow expects"),
        ((), 0, tf_config(worker=PAIR), "leave one of them out"),
        ((), None, tf_config("ps", 0, worker=PAIR, ps=["10.0.0.9:1"]), 'the role "ps"'),
        ((), None, tf_config("evaluator", 0, worker=PAIR), 'the role "evaluator"'),
        ((), None, tf_config("worker", 5, worker=PAIR), "no worker 5 among 2"),
        ((), None, tf_config("chief", 1, worker=PAIR, chief=["10.0.0.1:1"]), "no chief 1 among 1"),
        ((), None, tf_config("worker", -1, worker=PAIR, chief=["10.0.0.1:1"]), "no worker -1 among 2"),
        ((), None, tf_config("worker", 1.7, worker=PAIR), "TF_CONFIG is not what TensorFlow expects"),
        ((), None, tf_config("worker", 0, worker="a:1"), "TF_CONFIG is not what TensorFlow expects"),
        (("http://10.0.0.2:80", PAIR[1]), 0, {}, "write host:port"),
    ],
)
def test_wrong_workers_are_errors_that_say_what_is_right(workers, worker, environment, message):
    with pytest.raises(UserError, match=message):
        cluster.find(workers, worker, environment)


# --- choosing


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("miror", {}, r'did you mean "mirrored".*multi_worker'),
        ("multi_worker", {}, "--workers=host:port,host:port"),
        ("cpu", {"workers": Cluster(PAIR, 0)}, "strategy=cpu trains in one process, but 2 workers"),
        ("auto", {"workers": Cluster(PAIR, 0), "tpu": "local"}, "tpu=local trains in one process"),
        ("mirrored", {"tpu": "local"}, "strategy=mirrored uses no TPU"),
        ("cpu", {"virtual": 2}, "virtual_devices=2 means nothing with strategy=cpu"),
        ("auto", {"virtual": 2, "workers": Cluster(PAIR, 0)}, "means nothing with several workers"),
        ("auto", {"virtual": 3}, "virtual_devices=3 comes too late: TensorFlow has set up 2 CPU"),
        ("gpu", {}, "sees no GPU here"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(name, options, message):
    tf.config.list_logical_devices()
    with pytest.raises(UserError, match=message):
        devices.choose(name, **options)


def test_virtual_devices_where_there_are_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["a gpu"])
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=-1"):
        devices.choose("mirrored", virtual=2)


@pytest.mark.parametrize("strategy", ["cpu", "tpu"])
def test_dry_run_of_workers_refuses_what_the_run_would(strategy):
    config = load_config(None, {"workers": PAIR, "worker": 0, "strategy": strategy})
    with pytest.raises(UserError, match=f"strategy={strategy} trains in one process, but 2 workers"):
        build.choose_devices(config, Cluster(PAIR, 0), dry=True)


def test_auto_takes_the_cpu_and_says_so():
    here = devices.choose("auto")
    assert here.kind == "CPU" and "one CPU device" in here.line and here.hosts == 1


# --- batches


@pytest.mark.parametrize(
    ("batch", "replicas", "accumulation", "repeats", "near"),
    [
        (30, 4, 2, 1, "a multiple of 8, such as 24 or 32"),
        (6, 4, 1, 1, "a multiple of 4, such as 4 or 8"),
        (3, 8, 1, 1, "a multiple of 8, such as 8$"),
        (16, 2, 4, 3, "a multiple of 24, such as 24$"),
    ],
)
def test_batch_that_does_not_divide_names_sizes_that_do(batch, replicas, accumulation, repeats, near):
    with pytest.raises(UserError, match=near):
        devices.check_batch(batch, replicas, accumulation, repeats)


def test_copies_and_replicas_may_share_factors():
    devices.check_batch(8, 2, 2, 4)  # a multiple of all three is enough, not of their product
    devices.check_batch(32, 4, 2)


# --- TPUs, as stubs


class Pod:
    """A TPUStrategy over `hosts` machines, eight cores each, as far as the input path looks."""

    def __init__(self, hosts):
        self.num_replicas_in_sync = 8 * hosts
        self.extended = types.SimpleNamespace(num_hosts=hosts)

    def distribute_datasets_from_function(self, make):
        hosts = self.extended.num_hosts
        return [make(tf.distribute.InputContext(hosts, host, self.num_replicas_in_sync)) for host in range(hosts)]


@pytest.fixture
def tpu(monkeypatch):
    """Makes TensorFlow find a TPU of so many hosts; returns the calls it got."""

    def put(hosts):
        calls = []
        resolver = tf.distribute.cluster_resolver
        monkeypatch.setattr(resolver, "TPUClusterResolver", lambda tpu: calls.append(tpu) or "resolver")
        monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda r: calls.append("connect"))
        monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda r: calls.append("initialise"))
        monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda *a, **k: Pod(hosts))
        return calls

    return put


def test_auto_with_a_tpu_takes_it_and_says_so(tpu):
    calls = tpu(1)
    here = devices.choose("auto", "local")
    assert calls == ["local", "connect", "initialise"]
    assert (here.kind, here.hosts, here.replicas) == ("TPU", 1, 8) and '8 cores of "local"' in here.line


def test_slice_of_four_hosts_reads_the_global_batch_in_order_each_its_part(tpu):
    tpu(4)
    here = devices.choose("tpu", "slice")
    assert here.hosts == 4 and "32 cores" in here.line and "on 4 hosts" in here.line
    source = synthetic(256, image_size=4, num_classes=3, channels=1)

    def make(hosts, host):
        return pipeline.train_pipeline(source, batch_size=64, image_size=4, seed=1, num_hosts=hosts, host=host)

    parts = here.batches(make, 64)
    assert len(parts) == 4
    whole = next(iter(make(1, 0)))[0].numpy()
    seen = []
    for part in parts:
        assert part.element_spec[0].shape == [2, 4, 4, 1]  # a replica's, static
        seen += [images.numpy() for images, _ in part.take(8)]
    np.testing.assert_array_equal(np.concatenate(seen), whole)


@pytest.mark.parametrize("kind", [ValueError, OSError])  # the second: the cloud's metadata server is not there
def test_no_tpu_is_an_error_that_says_what_to_install(monkeypatch, kind):
    def fail(tpu):
        raise kind("Please provide a TPU Name to connect to.")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", fail)
    with pytest.raises(UserError, match="install tensorflow-tpu and use tpu=local"):
        devices.choose("tpu")


def test_data_of_unknown_shape_is_refused():
    here = devices.choose("cpu")
    data = tf.data.Dataset.range(10).batch(4)
    with pytest.raises(UserError, match="drop_remainder=True"):
        here.batches(lambda hosts, host: data, 4)


def on_tpu(tpu="my-slice", **changes):
    return load_config(None, {"tpu": tpu, **{key.replace("__", "."): value for key, value in changes.items()}})


@pytest.mark.parametrize(
    ("changes", "workdir", "named"),
    [
        ({"data__source": "folder", "data__path": "/data"}, "gs://b/run", "data.path=/data"),
        ({}, "/runs/a", "workdir=/runs/a"),
        ({}, None, "workdir=runs/digits"),
        ({"init_from": "/w/a.npz"}, "gs://b/run", "init_from=/w/a.npz"),
        ({"resume": "/runs/a"}, "gs://b/run", "resume=/runs/a"),
        ({"data__cache": "disk", "data__cache_dir": "/scratch"}, "gs://b/run", "data.cache_dir=/scratch"),
    ],
)
def test_local_path_on_a_remote_tpu_is_refused_before_anything_connects(monkeypatch, changes, workdir, named):
    from vit_tpu.training.run import run

    monkeypatch.setattr(devices, "choose", lambda *a, **k: pytest.fail("it went on"))
    with pytest.raises(UserError, match=named) as caught:
        run(on_tpu(**changes), workdir)
    assert "gs://" in str(caught.value) and "tpu=local" in str(caught.value)


def test_local_paths_on_the_tpu_vm_itself_and_stores_on_a_remote_one_are_right():
    remote.check_paths(on_tpu("local", data__source="folder", data__path="/data", init_from="/w"), "/runs/a")
    remote.check_paths(on_tpu(data__source="folder", data__path="gs://b/data"), "gs://b/run")
    remote.check_paths(load_config(None, {"data.source": "folder", "data.path": "/data"}), "/runs/a")


def test_number_formats_of_a_tpu():
    here = devices.Devices(Pod(1), "", "TPU")
    assert any("mixed_bfloat16 is recommended" in note for note in remote.check(on_tpu("local"), here))
    assert remote.check(on_tpu("local", precision="mixed_bfloat16"), here) == []
    assert remote.check(load_config(), devices.choose("cpu")) == []
    with pytest.raises(UserError, match="no float16"):
        remote.check(on_tpu("local", precision="mixed_float16"), here)
    slow = on_tpu("local", precision="mixed_bfloat16", training__steps_per_execution=1)
    assert "steps_per_execution=1" in remote.check(slow, here)[0]


@pytest.mark.parametrize(("tpu", "python", "refused"), [
    ("my-slice", True, True), ("my-slice", False, False), ("local", True, False),
])  # fmt: skip
def test_source_that_python_reads_is_refused_where_the_hosts_are_others(tpu, python, refused, monkeypatch):
    monkeypatch.setattr(remote.service, "needs_python", lambda source: python)
    source = types.SimpleNamespace(name="array records in gs://b", encoded=True)
    config, here = on_tpu(tpu, precision="mixed_bfloat16"), devices.Devices(Pod(1), "", "TPU")
    if refused:
        with pytest.raises(UserError, match="array records in gs://b is read by Python.*write it as TFRecords"):
            remote.check(config, here, source)
    else:
        assert remote.check(config, here, source) == []
