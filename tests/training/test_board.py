"""What TensorBoard shows of a run: read back from the event files."""

import os

import numpy as np
import pytest
import tensorflow as tf

import vit_tpu
from vit_tpu import optim
from vit_tpu.training import board, storage
from vit_tpu.training.logger import Logger

NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twelve steps of LAMB; histograms every four."""
    folder = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (12, 8, 8, 3), np.uint8)
    labels = np.arange(12) % 4
    model = vit_tpu.ViT("Ti/4", width=16, depth=1, mlp_dim=32, num_heads=2, image_size=8, num_classes=4, pool="map")
    model.compile(optim.LAMB(0.02, record_trust_ratios=True), "softmax", ["accuracy"], steps_per_execution=2)
    data = tf.data.Dataset.from_tensors((images.astype(np.float32) / 127.5 - 1, labels)).repeat()
    logger = Logger(folder, 4, batch_size=12, total_steps=12)
    start = {p.path: p.variable.numpy().copy() for p in model.parameters()}
    watcher = board.Board(logger, 4, board.Samples(images, labels, NAMES), total_steps=12)
    model.fit(data, steps_per_epoch=12, epochs=1, verbose=0, callbacks=[logger, watcher])
    board.hyperparameters(logger.writers["train"], {"optimizer.name": "lamb", "model.scan": False, "x": None}, "a: 1")
    logger.close()
    return folder, model, start


@pytest.fixture(scope="module")
def events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run[0] / "logs" / "train"), {"tensors": 0})
    found.Reload()
    return found


def steps(events, tag):
    return [event.step for event in events.Tensors(tag)]


def test_histograms_of_every_weight_at_every_interval(run, events):
    tags = events.Tags()["tensors"]
    for parameter in run[1].parameters():
        assert f"weights/{parameter.path}" in tags
    assert steps(events, "weights/head/kernel") == [4, 8, 12]
    assert steps(events, "trust_ratios") == [4, 8, 12]


def test_movement_of_a_group_is_its_change_over_its_length(run, events):
    _, model, start = run
    group = next(g for g in model.groups if g.name == "head kernels")
    assert steps(events, "moved/head kernels") == [4, 8, 12]
    first = float(tf.make_ndarray(events.Tensors("moved/head kernels")[0].tensor_proto))
    assert first == pytest.approx(1.0)  # the classifier starts at zero: all of it is new
    body = [float(tf.make_ndarray(e.tensor_proto)) for e in events.Tensors("moved/body kernels")]
    total = np.sqrt(sum(np.square(model_weight(model, p) - start[p]).sum() for p in paths(model, "body kernels")))
    length = np.sqrt(sum(np.square(model_weight(model, p)).sum() for p in paths(model, "body kernels")))
    assert 0 < body[-1] < total / length < sum(body) * 1.2 and group.paths == ("head/kernel",)


def paths(model, name):
    return next(g for g in model.groups if g.name == name).paths


def model_weight(model, path):
    return next(p.variable.numpy() for p in model.parameters() if p.path == path)


def test_pictures_show_something(events):
    for tag in ("pictures/patch_filters", "pictures/positions", "pictures/validation"):
        width, height, data = tf.make_ndarray(events.Tensors(tag)[-1].tensor_proto)
        picture = tf.io.decode_png(data).numpy()
        assert picture.shape[:2] == (int(height), int(width)) and picture.std() > 10, tag
    assert steps(events, "pictures/validation")[-1] == 12


def test_projector_has_features_names_and_pictures_of_all_samples(run):
    folder, model, _ = run
    logs = folder / "logs"
    features = np.loadtxt(logs / "features.tsv")
    assert features.shape == (12, 16)
    assert (logs / "labels.tsv").read_text().split() == [NAMES[i % 4] for i in range(12)]
    config = (logs / "projector_config.pbtxt").read_text()
    assert 'tensor_path: "features.tsv"' in config and "single_image_dim: 8" in config
    sprite = tf.io.decode_png((logs / "sprite.png").read_bytes())
    assert sprite.shape == (32, 32, 3)  # twelve pictures of 8 in a square of four by four


def test_projector_is_written_to_a_store_as_to_a_disk(run, tmp_path):
    folder, model, _ = run
    store = f"ram://{tmp_path.name}-{os.getpid()}/logs"
    samples = board.Samples(np.zeros((3, 8, 8, 3), np.uint8), np.array([0, 1, 9]), NAMES)
    board.project(model, samples, store)
    board.project(model, samples, tmp_path / "logs")
    assert storage.read_text(f"{store}/labels.tsv") == "ant\nbee\n9\n"
    for name in ("features.tsv", "sprite.png", "projector_config.pbtxt", "labels.tsv"):
        with storage.reading(f"{store}/{name}") as file:
            assert file.read() == (tmp_path / "logs" / name).read_bytes(), name


def test_projector_config_is_read_by_its_own_plugin(run):
    from google.protobuf import text_format
    from tensorboard.plugins.projector import ProjectorConfig

    parsed = text_format.Parse((run[0] / "logs" / "projector_config.pbtxt").read_text(), ProjectorConfig())
    assert list(parsed.embeddings[0].sprite.single_image_dim) == [8, 8]


def test_config_and_hyperparameters_stand_beside_the_results(events):
    from tensorboard.plugins.hparams import plugin_data_pb2

    assert b"a: 1" in events.Tensors("config")[0].tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in events.summary_metadata
    content = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    table = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    assert [info.name.tag for info in table.metric_infos] == ["validation/accuracy", "validation/loss", "loss"]
    assert [info.name for info in table.hparam_infos] == ["optimizer.name"]
