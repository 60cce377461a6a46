"""The doctor finds each planted fault, says what to do, and is silent where all is well."""

import dataclasses
import os
import socket

import numpy as np
import pytest
from healthy import machine

from vit_tpu import config as configs
from vit_tpu.diagnose import examine, findings, memory
from vit_tpu.settings import CHOICES

DIGITS = ["data.source=digits"]


def diagnose(here=None, overrides=(), **options):
    return examine.examine(None, overrides, machine=here or machine(), **options)


def told(results, level, *words):
    """The one finding of this level whose text or cure has all the words."""
    fits = [f for f in results if f.level == level and all(w in f"{f.topic} {f.text} {f.cure}" for w in words)]
    assert len(fits) == 1, findings.report(results)
    return fits[0]


def test_silent_on_a_healthy_machine_and_run(tmp_path):
    results = diagnose(overrides=DIGITS, workdir=str(tmp_path / "run"))
    assert {f.level for f in results} == {"ok"}, findings.report(results)
    assert not findings.must_be_fixed(results)
    assert "0 to fix, 0 warnings" in findings.report(results)


MACHINES = {
    "old python": (machine(python=(3, 9)), "error", ("Python 3.9", "use Python 3.10")),
    "other tensorflow": (machine({"tensorflow": "2.21.0"}), "error", ("tensorflow 2.21.0", "works with 2.20")),
    "no tf_keras": (machine({"tf_keras": None}), "error", ("tf_keras is not installed", "pip install")),
    "other tf_keras": (machine({"tf_keras": "2.19.0"}), "error", ("tf_keras 2.19.0", "pip install")),
    "other official": (machine({"tf-models-official": "2.19.1"}), "error", ("tf-models-official 2.19.1",)),
    "no profiler plugin": (machine({"tensorboard-plugin-profile": None}), "error", ("no Profile tab", "pip install")),
    "old profiler plugin": (machine({"tensorboard-plugin-profile": "2.9.0"}), "error", ("cannot read traces",)),
    "other tensorboard": (machine({"tensorboard": "2.18.0"}), "warning", ("tensorboard 2.18.0", "2.20.*")),
    "new setuptools": (machine({"setuptools": "82.0.0"}), "error", ("TensorBoard does not start", "setuptools<81")),
    "addons and typeguard": (machine({"tensorflow-addons": "0.23.0"}), "warning", ("typeguard 4.4.0", "typeguard<3")),
    "unused GPU": (machine(nvidia_files=("/dev/nvidia0",)), "error", ("sees no GPU", "and-cuda")),
    "hidden GPU": (
        machine(nvidia_files=("/dev/nvidia0",), environment={"CUDA_VISIBLE_DEVICES": ""}),
        "warning", ("hides all GPUs", "unset"),
    ),
    "broken XLA": (machine(xla_error="libdevice not found"), "error", ("libdevice not found", "--nojit")),
    "auto jit": (machine(environment={"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}), "warning", ("unset TF_XLA_FLAGS",)),
    "slow clock": (machine(now=1.7e9 - 7200), "error", ("at least 2.0 hours behind", "set the clock")),
}  # fmt: skip


@pytest.mark.parametrize("fault", MACHINES)
def test_fault_of_the_machine_is_found(fault):
    here, level, words = MACHINES[fault]
    assert told(diagnose(here), level, *words).cure


PRECISION = [
    ((6, 1), "mixed_float16", "warning", "gains nothing"),
    ((7, 0), "mixed_bfloat16", "warning", "no tensor cores"),
    ((7, 0), "mixed_float16", "ok", "float16 tensor cores"),
    ((8, 0), "mixed_bfloat16", "ok", "bfloat16 tensor cores"),
    ((9, 0), "mixed_float16", "warning", "needs loss scaling"),
    ((9, 0), "float32", "note", "would be faster"),
    (None, "mixed_float16", "warning", "gains nothing"),
    (None, "float32", "ok", "no bfloat16 instructions"),
]


@pytest.mark.parametrize("capability, policy, level, words", PRECISION)
def test_precision_is_judged_by_the_hardware(capability, policy, level, words):
    here = machine(gpus=(capability,) if capability else ())
    results = diagnose(here, [*DIGITS, f"precision={policy}"])
    found = [f for f in results if f.topic == "precision"]
    assert [f.level for f in found] == [level] and words in found[0].text


@pytest.fixture
def pictures(tmp_path):
    """An .npz of twelve images in three classes."""

    def write(labels, **arrays):
        path = tmp_path / "data.npz"
        images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 3), np.uint8)
        np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels, **arrays)
        return ["data.source=npz", f"data.path={path}", "batch_size=4", "epochs=1"]

    return write


def test_config_that_does_not_load_is_the_finding():
    told(diagnose(overrides=["learning_rte=1"]), "error", 'unknown key "learning_rte"', "learning_rate")


def test_missing_data_is_found():
    results = diagnose(overrides=["data.source=folder", "data.path=/no/such/folder"])
    told(results, "error", "no folder /no/such/folder")  # once, not for each split


def test_unreadable_records_are_named(tmp_path):
    from PIL import Image

    for split in ("train", "val"):
        for name in "ab":
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
    (tmp_path / "data" / "train" / "b" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "data" / "train" / "a" / "0.png").write_bytes(b"")
    overrides = ["data.source=folder", f"data.path={tmp_path / 'data'}", "batch_size=4"]
    found = told(diagnose(overrides=overrides), "error", "2 of 8 train records", "cannot be read")
    assert "a/0.png" in found.text and "b/3.png" in found.text and found.cure


def test_labels_that_do_not_fit_the_head_are_found(pictures):
    results = diagnose(overrides=[*pictures(np.arange(12) % 3), "num_classes=2"])
    assert any(f.topic == "labels" and f.level == "error" and "2 classes" in f.text for f in results)


def test_a_single_class_is_found(pictures):
    results = diagnose(overrides=[*pictures(np.zeros(12, int)), "num_classes=1"])
    assert any("of one class" in f.text and f.level == "error" for f in results)


def test_a_class_without_examples_is_found(pictures):
    results = diagnose(overrides=pictures(np.array([0, 1, 3] * 4)))
    assert any("1 classes have no train example: 2" in f.text for f in results), findings.report(results)


def test_batch_that_does_not_divide_names_sizes_that_do():
    results = diagnose(overrides=[*DIGITS, "batch_size=60", "accumulation_steps=4"], replicas=4)
    assert told(results, "error", "60 examples do not divide", "4 replicas").cure == "training.batch_size 48 or 64"


def test_batch_larger_than_the_data_is_found():
    told(diagnose(overrides=[*DIGITS, "batch_size=4096"]), "error", "4,096 is larger than the 1,437")


def test_warm_up_longer_than_the_run_is_found():
    results = diagnose(overrides=[*DIGITS, "training.epochs=null", "training.steps=10", "schedule.warmup=500"])
    told(results, "error", "warm-up (500)", "do not fit into 10 steps")


def test_class_token_that_opens_a_tile_is_found_on_a_tpu():
    model = ["model.variant=L/14", "model.image_size=224", "model.pool=tok", "model.num_classes=10"]
    shape = [f"model.{name}=null" for name in ("width", "depth", "mlp_dim", "num_heads")]
    results = diagnose(overrides=[*DIGITS, *model, *shape, "precision=mixed_bfloat16"], hardware="TPU")
    found = told(results, "warning", "257 tokens fill 384 lanes")
    # 64 images x 16 heads x 257 rows x 127 columns of padding x 2 bytes x 24 blocks
    assert "1,530 MiB" in found.text and "256 tokens fill their tiles" in found.cure


def test_memory_that_the_host_does_not_have_is_found():
    shape = [f"model.{name}=null" for name in ("width", "depth", "mlp_dim", "num_heads")]
    overrides = [*DIGITS, "model.variant=G/14", "model.image_size=224", *shape]
    told(diagnose(overrides=overrides), "error", "this host has 16.00 GiB", "larger host")


LARGE = [f"model.{name}=null" for name in ("width", "depth", "mlp_dim", "num_heads")] + ["model.image_size=224"]


def test_step_that_does_not_fit_is_found_with_what_is_enough():
    found = told(
        diagnose(overrides=[*DIGITS, *LARGE, "model.variant=S/16", "batch_size=512"]), "error", "a step needs about",
        "activations", "has 16.00 GiB",
    )  # fmt: skip
    assert "training.accumulation_steps=" in found.cure and "leaves" in found.cure
    overrides = [*DIGITS, *LARGE, "model.variant=S/16", "batch_size=256", "precision=mixed_bfloat16"]
    needs = memory.breakdown(configs.load_config(None, overrides), 10, 1, hardware="GPU").total
    for size, level in ((needs - 2**20, "error"), (needs + 2**20, "ok")):
        card = machine(gpus=[(8, 0)])
        card = dataclasses.replace(card, gpus=(dataclasses.replace(card.gpus[0], memory=size),))
        told(diagnose(card, overrides), level, "a step needs about", memory.size_text(size))


def test_micro_batches_that_cost_memory_are_found():
    results = diagnose(overrides=[*DIGITS, *LARGE, "model.variant=B/16", "batch_size=4", "accumulation_steps=2"])
    told(results, "warning", "2 micro-batches cost more memory than they free", "accumulation_steps=1")


def test_large_activations_are_noted():
    results = diagnose(overrides=[*DIGITS, *LARGE, "model.variant=S/16", "batch_size=160"])
    found = told(results, "note", "activations take", "of 16.00 GiB")
    assert "model.remat=block saves" in found.cure


def test_state_that_every_core_holds_whole_is_noted():
    overrides = [*DIGITS, *LARGE, "model.variant=L/16", "strategy=tpu", "tpu=local"]
    found = told(diagnose(overrides=overrides, hardware="TPU", replicas=8), "note", "each of 8 cores holds the whole")
    assert "mesh=data=8 shard=state leaves" in found.cure
    less = diagnose(overrides=[*overrides, "mesh=data=8", "shard=state"], hardware="TPU", replicas=8)
    assert not any("holds the whole" in f.text for f in less)


def workers(here=None, **changes):
    results = diagnose(here, [*DIGITS, *(f"{key}={value}" for key, value in changes.items())])
    return [f for f in results if f.topic in ("workers", "config")]


def test_workers_that_cannot_be_are_found():
    several = machine(environment={"TF_CONFIG": "{cluster"})
    assert "TF_CONFIG is not what TensorFlow expects" in workers(several)[0].text
    lost = workers(workers="[nowhere.invalid:2222,localhost:2223]", worker=1)
    assert [f.level for f in lost] == ["error"] and "nobody knows a host nowhere.invalid" in lost[0].text
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        used = workers(workers=f"[localhost:{port},localhost:1]", worker=0)
    assert [f.level for f in used] == ["error"] and f"port {port} cannot be used" in used[0].text


def test_workers_that_can_be_are_healthy_and_share_the_batch():
    found = workers(workers="[localhost:29871,localhost:29872]", worker=1)
    assert [f.level for f in found] == ["ok"] and "worker 1 (localhost:29872) of 2" in found[0].text
    results = diagnose(overrides=[*DIGITS, "workers=[localhost:29871,localhost:29872]", "worker=0", "batch_size=63"])
    told(results, "error", "63 examples do not divide", "2 replicas")


def test_full_disk_is_found(tmp_path, monkeypatch):
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 1000))
    told(diagnose(overrides=DIGITS, workdir=str(tmp_path / "run")), "error", "three checkpoints", "free space")


def test_folder_that_cannot_be_used_is_found(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    told(diagnose(overrides=DIGITS, workdir=str(tmp_path / "file")), "error", "is a file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told(diagnose(overrides=DIGITS, workdir=str(tmp_path / "run")), "error", "cannot be written to")


def test_local_paths_on_a_remote_tpu_are_found():
    overrides = ["data.source=npz", "data.path=/data/x.npz", "tpu=my-tpu", "strategy=tpu"]
    told(diagnose(overrides=overrides, workdir="/runs/x"), "error", "data.path=/data/x.npz", "gs://")
    local = diagnose(overrides=[*DIGITS, "tpu=local", "strategy=tpu"], workdir="/tmp/x")
    assert not any(f.topic == "paths" for f in local)


def test_every_source_can_be_looked_at():
    assert set(CHOICES["data.source"]) >= {"digits", "folder", "npz", "synthetic"}
    assert not findings.must_be_fixed(diagnose(overrides=["data.source=synthetic", "image_size=8"]))
