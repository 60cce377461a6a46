"""What a log line says of memory, movement, trust ratios, attention and time is what it should be."""

import contextlib
import json
import time

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from full_run import full_run
from state_model import images, model
from tiny_run import config

import vit_tpu
from vit_tpu import optim
from vit_tpu.models import watch
from vit_tpu.training import build, display, gauges, schedule
from vit_tpu.training import peak as peaks
from vit_tpu.training.logger import Logger
from vit_tpu.training.run import run

MIB = 2**20


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


# What every log line has where the device reports no memory, and what board=watch and full add.
ALWAYS = {
    "loss", "accuracy", "grad_norm", "learning_rate", "skipped_updates", "images_per_second", "mfu", "time/step_ms",
    "time/input_wait_ms", "time/device_ms", "memory/host_gib",
}  # fmt: skip
WATCHED = {
    "update_ratio/body kernels", "update_ratio/head kernels", "trust_ratio/body kernels/min",
    "trust_ratio/body kernels/median", "trust_ratio/body kernels/max", "attention/max_logit", "attention/blocks/0",
    "attention/map",
}  # fmt: skip


def test_a_line_and_tensorboard_have_the_same_scalars():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = full_run()
    last = lines(folder)[-1]
    assert last.keys() >= ALWAYS | WATCHED
    found = EventAccumulator(str(folder / "logs" / "train"), {"tensors": 0})
    found.Reload()
    tags = found.Tags()["tensors"]
    assert set(tags) >= ALWAYS | WATCHED
    for name in ALWAYS | WATCHED:
        event = found.Tensors(name)[-1]
        assert event.step == 64 and tf.make_ndarray(event.tensor_proto) == pytest.approx(last[name], rel=1e-6)


def test_time_of_a_step_is_input_wait_and_the_rest_and_agrees_with_images_per_second():
    for line in lines(full_run()[0])[1:]:
        whole = line["time/step_ms"]
        assert line["time/input_wait_ms"] + line["time/device_ms"] == pytest.approx(whole)
        assert 32e3 / whole == pytest.approx(line["images_per_second"])
        assert 0 < line["time/input_wait_ms"] < whole


def test_ratios_are_ordered_and_small():
    for line in lines(full_run()[0]):
        low, middle, high = (line[f"trust_ratio/body kernels/{name}"] for name in ("min", "median", "max"))
        assert 0 < low < middle < high
        assert 0 < line["update_ratio/body kernels"] < 0.1
        assert line["attention/max_logit"] == max(line["attention/blocks/0"], line["attention/map"])


def test_progress_line_stays_short():
    values = lines(full_run()[0])[-1]
    text = display.figures({name: value for name, value in values.items() if name not in ("step", "seconds", "epoch")})
    assert "/" not in text.replace("img/s", "") and len(text) < 150 and "% of peak" in text


# Movement of the weights.


def test_update_ratio_is_the_length_of_the_last_update_over_that_of_the_weights():
    made = model(scaled=False, run_eagerly=False, record_updates=True)
    made.fit(*images(), batch_size=6, verbose=0)
    old = {p.path: p.variable.numpy() for p in made.parameters()}
    made.fit(*images(), batch_size=6, verbose=0)
    new = {p.path: p.variable.numpy() for p in made.parameters()}
    ratios = made.movement.ratios(made.groups)
    for group in made.groups:
        moved = np.sqrt(sum(np.square(new[path].astype(np.float64) - old[path]).sum() for path in group.paths))
        length = np.sqrt(sum(np.square(new[path].astype(np.float64)).sum() for path in group.paths))
        assert ratios[group.name] == pytest.approx(moved / length, rel=1e-3), group.name


def test_frozen_parameters_have_no_ratio_and_a_skipped_step_changes_none():
    def group(name, *paths):
        return type("Group", (), {"name": name, "paths": paths})()

    updates = watch.Updates(["a", "b"])
    updates.record(
        [tf.constant([3.0]), tf.constant([0.0])], [tf.constant([4.0]), tf.constant([3.0])], tf.constant(True)
    )
    groups = [group("both", "a", "b"), group("a", "a"), group("frozen", "c")]
    expected = {"both": (1 + 9) ** 0.5 / 5, "a": 1 / 4}
    assert updates.ratios(groups) == pytest.approx(expected)
    updates.record([tf.constant([3.0])] * 2, [tf.constant([8.0])] * 2, tf.constant(False))
    assert updates.ratios(groups) == pytest.approx(expected)


def test_movement_over_two_replicas_is_that_of_one(mirrored):
    def trained(scope):
        keras.utils.set_random_seed(1)
        with scope:
            made = vit(pool="gap")
            made.compile(optim.SGD(0.1), record_updates=True)  # Adam would make much of what is nearly zero
        made.fit(*images(), batch_size=6, epochs=4, verbose=0)  # the first update is the classifier's alone
        return made.movement.ratios(made.groups)

    one, two = trained(contextlib.nullcontext()), trained(mirrored.scope())
    assert min(one.values()) > 1e-6 and two == pytest.approx(one, rel=1e-3)


def test_trust_ratios_are_gathered_by_group():
    class Model:
        groups = [
            type("Group", (), {"name": "a", "paths": ("x", "y")}), type("Group", (), {"name": "b", "paths": ("z",)})
        ]  # fmt: skip
        inner_optimizer = type("Optimizer", (), {"trust_ratios": lambda self: {"x": 2.0, "y": np.array([1.0, 9.0])}})()

    found = gauges.TrustRatios(Model())(5)
    assert found == {"trust_ratio/a/min": 1.0, "trust_ratio/a/median": 2.0, "trust_ratio/a/max": 9.0}


# Attention logits.


def vit(**settings):
    return vit_tpu.ViT("Ti/4", image_size=8, num_classes=3, width=8, depth=2, mlp_dim=16, num_heads=2, **settings)


def numpy_logits(made, block, x):
    """Largest q k / sqrt(h) of a block over tokens [B, N, D] that the block is given."""
    w = {path: np.asarray(value, np.float64) for path, value in block.params.items()}
    x = x.astype(np.float64)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    normal = normal * w["norm1/scale"] + w["norm1/bias"]
    q, k = (np.einsum("bnd,dhk->bhnk", normal, w[f"attention/{n}/kernel"]) + w[f"attention/{n}/bias"][:, None]
            for n in ("query", "key"))  # fmt: skip
    return np.einsum("bhnk,bhmk->bhnm", q, k).max() / np.sqrt(q.shape[-1])


def test_largest_attention_logit_is_that_of_a_numpy_reference():
    made, inputs = vit(pool="map"), tf.constant(images()[0])
    for parameter in made.parameters():
        parameter.variable.assign_add(tf.random.stateless_normal(parameter.variable.shape, [1, 2]) * 0.3)
    found = watch.max_attention_logits(made, inputs)
    assert list(found) == ["blocks/0/attention", "blocks/1/attention", "map/attention"]
    record = {}
    made.encode(inputs, record=record)
    first = record["with_posemb"].numpy()
    assert float(found["blocks/0/attention"]) == pytest.approx(numpy_logits(made, made.blocks[0], first), rel=1e-4)
    second = record["encoder/block00/+mlp"].numpy()
    assert float(found["blocks/1/attention"]) == pytest.approx(numpy_logits(made, made.blocks[1], second), rel=1e-4)
    probabilities = made.map.probabilities(made.map.params, record["encoded"])
    logits = made.map.logits_of(made.map.params, record["encoded"])
    np.testing.assert_allclose(probabilities, tf.nn.softmax(logits), rtol=1e-6)
    assert float(found["map/attention"]) == pytest.approx(float(tf.reduce_max(logits)), rel=1e-4)


def test_scanned_blocks_have_the_logits_of_unrolled_ones():
    plain, scanned, inputs = vit(pool="gap"), vit(pool="gap", scan=True), tf.constant(images()[0])
    for parameter in scanned.parameters():
        path = parameter.path
        if path.startswith("blocks/"):
            name = path.removeprefix("blocks/")
            parts = [p.variable for i in range(2) for p in plain.parameters() if p.path == f"blocks/{i}/{name}"]
            parameter.variable.assign(tf.stack(parts))
        else:
            parameter.variable.assign(next(p.variable for p in plain.parameters() if p.path == path))
    one, other = (watch.max_attention_logits(made, inputs) for made in (plain, scanned))
    assert {k: float(v) for k, v in other.items()} == pytest.approx({k: float(v) for k, v in one.items()}, rel=1e-5)


@pytest.mark.parametrize("value, seen", [(1e5, "1e+05"), (float("nan"), "nan")])
def test_large_attention_logit_is_said_once_with_its_layer(value, seen, monkeypatch):
    said = []
    gauge = gauges.AttentionLogits(None, np.zeros([2, 8, 8, 3], np.uint8), said.append)
    values = iter([[1.0, 5000.0, 3.0], [1.0, 2.0, value], [1.0, 2.0, value]])
    gauge.layers = ["blocks/0/attention", "blocks/1/attention", "map/attention"]
    gauge.largest = lambda images: tf.constant(next(values))
    assert gauge(10)["attention/max_logit"] == 5000.0 and not said
    gauge(20)
    gauge(30)
    assert len(said) == 1 and f"step 20: an attention logit of map/attention is {seen} on 2 validation" in said[0]


# Memory.


def test_resident_memory_is_what_the_system_says():
    import psutil

    assert gauges.resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_memory_of_devices_that_report_none_is_left_out():
    assert gauges.device_bytes() is None
    assert list(gauges.Memory()(1)) == ["memory/host_gib"]


def test_memory_of_the_fullest_device_that_reports(monkeypatch):
    devices = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(3)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices if kind == "GPU" else [])

    def info(name):
        if name.endswith("0"):
            raise ValueError("Allocator stats not available")
        return {"current": 2 * 2**30, "peak": (3 if name.endswith("1") else 5) * 2**30}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    values = gauges.Memory(resident=lambda: None)(1)
    assert values == {"memory/device_gib": 2.0, "memory/device_peak_gib": 5.0}


def noisy(levels, seed=0):
    """(step, bytes) of one level a step, in MiB, with noise that only adds."""
    noise = np.random.default_rng(seed).uniform(0, 20, len(levels))
    return [(10 * (i + 1), int((1000 + level + extra) * MIB)) for i, (level, extra) in enumerate(zip(levels, noise))]


def test_steady_growth_is_found_with_its_rate():
    (first, low), rate = gauges.growth(noisy(np.arange(64) * 10))
    assert first >= 160 and low > 1100 * MIB
    assert rate == pytest.approx(1.0 * MIB, rel=0.1)  # 10 MiB every 10 steps


@pytest.mark.parametrize(
    "levels",
    [
        np.zeros(64),
        np.arange(10) * 100,  # too short to judge
        np.minimum(np.arange(64) * 40, 800),  # a buffer that fills
        np.where(np.arange(64) < 40, 0, 900),  # one allocation
        np.tile([0, 300, 600, 900], 16),  # saw teeth
        np.arange(64) * 1.0,  # 48 MiB in all
        640 - np.arange(64) * 10,
    ],
    ids=["flat", "short", "fills", "jump", "teeth", "little", "falls"],
)
def test_what_is_no_leak_is_none(levels):
    assert gauges.growth(noisy(levels)) is None


def test_leak_in_a_run_is_said_loudly_with_its_rate(tmp_path):
    kept, said = [], []
    # Without what this process holds of the tests before: growth counts as a share of what is used.
    before = gauges.resident_bytes()
    memory = gauges.Memory(said.append, total_steps=10_000, resident=lambda: gauges.resident_bytes() - before)
    logger = Logger(
        tmp_path, 2, batch_size=6, gauges=[memory, lambda step: kept.append(np.ones(10 * MIB, np.uint8)) or {}]
    )
    data = tf.data.Dataset.from_tensors(tuple(part[:6] for part in images())).repeat()
    model(run_eagerly=False, steps_per_execution=2).fit(
        data, steps_per_epoch=64, verbose=0, callbacks=[logger], epochs=1
    )
    assert len(said) == 1 and said[0].startswith("WARNING: host memory grows steadily")
    rate = float(said[0].split(" MiB a step")[0].split()[-1])
    assert rate == pytest.approx(5, rel=0.3)  # 10 MiB every two steps
    assert ("full at about step" in said[0]) or ("last to the end" in said[0])


def test_healthy_run_warns_of_nothing():
    assert "WARNING" not in full_run()[1]


# Time.


@pytest.mark.parametrize("each, jit", [(3, False), (4, True)])
def test_input_wait_is_the_time_that_the_data_takes_beyond_the_step(each, jit):
    def slow(index):
        time.sleep(0.03)
        return index

    made, (pictures, labels) = (
        model(run_eagerly=False, steps_per_execution=each, jit_compile=jit, record_updates=jit),
        images(),
    )

    def batch(index):
        index = tf.ensure_shape(tf.numpy_function(slow, [index], tf.int64), [])
        return tf.constant(pictures) + tf.cast(0 * index, tf.float32), tf.constant(labels)

    data = tf.data.Dataset.range(100).map(batch)
    made.fit(data, steps_per_epoch=each, verbose=0)  # compiles
    before, began = made.waiting.seconds(), time.perf_counter()
    made.fit(data, steps_per_epoch=8, verbose=0)
    took, waited = time.perf_counter() - began, made.waiting.seconds() - before
    assert 0.09 < waited < took  # while a step is computed the next batch is made
    fast = tf.data.Dataset.from_tensors((tf.constant(pictures), tf.constant(labels))).repeat()
    before = made.waiting.seconds()
    made.fit(fast, steps_per_epoch=8, verbose=0)
    assert made.waiting.seconds() - before < waited / 3
    assert made.compilations() == 1
    if jit:
        assert 0 < made.movement.ratios(made.groups)["body kernels"] < 1


def test_mfu_is_three_forward_passes_over_the_peak_and_absent_without_one(tmp_path):
    log = Logger(tmp_path, 2, batch_size=10, peak=1e9)
    log.model = type("Model", (), {"flops": lambda self: 1e6})()
    log.clock.seconds = lambda: 2.0
    values = log._speed(4)  # 40 images in 2 s
    assert values["images_per_second"] == 20.0 and values["mfu"] == pytest.approx(3 * 1e6 * 20 / 1e9)
    log.peak, log.clock.seconds = None, lambda: 4.0
    assert "mfu" not in log._speed(8)


@pytest.mark.parametrize(
    "name, peak", [("v3-8", 8 * 61.5e12), ("v5litepod-16", 8 * 197e12), ("v6e-4", 8 * 918e12), ("", None)]
)
def test_peak_of_a_tpu_is_that_of_its_generation(name, peak, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", name)
    found, where = peaks.of_devices("TPU", 8, True)
    assert found == peak and (name in where if name else "no figure" in where)


# From the config.


def test_config_chooses_what_a_run_records(tmp_path, capsys):
    run(
        config(training__board="watch", training__steps=4, steps_per_execution=2, log_every=2), tmp_path / "run",
    )  # fmt: skip
    last = lines(tmp_path / "run")[-1]
    assert "update_ratio/body kernels" in last and "attention/max_logit" in last
    assert not any(name.startswith(("trust_ratio", "moved")) for name in last)  # AdamW has none
    assert not (tmp_path / "run" / "logs" / "projector_config.pbtxt").exists()
    assert "no device reports its memory: n/a" in capsys.readouterr().out


@pytest.mark.parametrize("board", ["scalars", "watch", "full"])
def test_board_switches_the_record_of_trust_ratios(board):
    chosen = config(training__board=board, optimizer__name="lamb")
    made = build.build_optimizer(chosen, schedule.plan(chosen, 1437))
    assert made.record_trust_ratios == (board != "scalars")


def test_default_board_has_the_memory_gauge_alone():
    (gauge,) = gauges.of_run(config(), None, None, print, 10)
    assert isinstance(gauge, gauges.Memory)


def test_recording_changes_no_weight():
    def trained(**more):
        keras.utils.set_random_seed(1)
        made = vit(pool="gap")
        made.compile(optim.LAMB(0.01, record_trust_ratios=bool(more)), **more)
        made.fit(*images(), batch_size=6, epochs=3, verbose=0)
        return [p.variable.numpy() for p in made.parameters()]

    for one, other in zip(trained(), trained(record_updates=True)):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-8)
