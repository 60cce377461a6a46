"""What holds for each source: every record once an epoch, wherever the run stops and however many hosts go on."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from shard_files import CLASSES, array_record, imagenet, picture, shards, tfds_folder, tfrecord

from vit_tpu import config as configs
from vit_tpu.data import order, pipeline
from vit_tpu.training import inputs

COUNT = 12


def _npz(root):
    images = np.zeros((COUNT, 6, 6, 3), np.uint8)
    images[..., 0] = 7 * np.arange(COUNT)[:, None, None]
    np.savez(root / "d.npz", train_images=images, train_labels=np.arange(COUNT) % 3,
             test_images=images[:4], test_labels=np.arange(4) % 3)  # fmt: skip
    return {"source": "npz", "path": str(root / "d.npz")}


def _npz_by_hash(root):
    np.savez(root / "h.npz", images=np.zeros((30, 6, 6, 3), np.uint8), labels=np.arange(30) % 3)
    return {"source": "npz", "path": str(root / "h.npz"), "validation_fraction": 0.3}


def _folder(root):
    for split, count in (("train", COUNT), ("test", 3)):
        for i in range(count):
            path = root / split / CLASSES[i % 3] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(i))
    return {"source": "folder", "path": str(root)}


def _shards(kind, write):
    def make(root):
        records = [imagenet(i, i % 3) for i in range(COUNT)]
        shards(root, write, records, 3, "train")
        shards(root, write, records[:4], 1, "validation")
        return {"source": kind, "path": str(root)}

    return make


def _tfds(root):
    tfds_folder(root, {"train": COUNT, "test": 4}, count=3)
    return {"source": "tfds", "path": str(root), "name": "insects"}


def _manifest(root):
    lines = [f"{i}.png,{CLASSES[i % 3]},{'train' if i < COUNT else 'test'}" for i in range(COUNT + 3)]
    (root / "list.csv").write_text("\n".join(["image,label,split", *lines]))
    for i in range(COUNT + 3):
        (root / f"{i}.png").write_bytes(picture(i))
    return {"source": "manifest", "path": str(root / "list.csv")}


SOURCES = {
    "digits": lambda root: {"source": "digits"},
    "synthetic": lambda root: {"source": "synthetic", "size": COUNT, "classes": 3},
    "npz": _npz,
    "npz-by-hash": _npz_by_hash,
    "folder": _folder,
    "tfrecord": _shards("tfrecord", tfrecord),
    "array_record": _shards("array_record", array_record),
    "tfds": _tfds,
    "manifest": _manifest,
}


@pytest.fixture(params=list(SOURCES))
def opened(request, tmp_path):
    values = {f"data.{key}": value for key, value in SOURCES[request.param](tmp_path).items()}
    config = configs.load_config(None, {"model.image_size": 6, "model.variant": "Ti/2", "data.mixup": 0.0, **values})
    return config, inputs.open_source(config, "train"), inputs.open_source(config, "validation")


def test_splits_are_disjoint_and_labels_follow_the_records(opened):
    config, train, validation = opened
    names = [train.name_of(i) for i in range(train.num_examples)]
    assert len(set(names)) == train.num_examples
    if train.name != validation.name and config.data.source != "folder":  # ids of folders count from the split's own
        assert not set(names) & {validation.name_of(i) for i in range(validation.num_examples)}
    assert train.num_classes == validation.num_classes and train.class_names == validation.class_names
    for i in (train.num_examples - 1, 0):
        record = train.get(tf.constant(i, tf.int64))
        assert record["id"].numpy().decode() == names[i]
        assert int(record["label"]) == train.labels[i]
    assert inputs.num_classes(config, train) == train.num_classes


def test_interrupted_anywhere_an_epoch_holds_every_record_once(opened):
    """Stops after a step that depends on the source, as one host; goes on as two."""
    _, source, _ = opened
    count = source.num_examples
    size = next(size for size in (4, 3, 2, 479, 7, 5) if count % size == 0 and count > size)
    steps = count // size
    stop = 1 + len(source.name) % (steps - 1)
    # The label tells which record was read; the image of files goes through their decoding.
    numbered = dataclasses.replace(
        source,
        labels=np.arange(count, dtype=np.int32),
        num_classes=count,
        class_names=tuple(map(str, range(count))),
        get=lambda index: source.get(index) | {"label": tf.cast(index, tf.int32)},
    )

    def read(start, end, hosts):
        parts = []
        for host in range(hosts):
            data = pipeline.train_pipeline(
                numbered, batch_size=size * hosts, image_size=6, seed=5, start_step=start // hosts, num_hosts=hosts,
                host=host,
            )  # fmt: skip
            parts.append([(image, label) for image, label in data.take(-(-(end - start) // hosts)).as_numpy_iterator()])
        return [part[i] for i in range(len(parts[0])) for part in parts]

    stop -= stop % 2 if steps > 2 else 0  # two hosts share batches of twice the size
    batches = read(0, stop, 1) + read(stop, steps, 2)
    found = np.concatenate([labels for _, labels in batches])[:count]
    assert sorted(found.tolist()) == list(range(count))
    assert found.tolist() != list(range(count))  # shuffled
    assert found.tolist() == order.epoch_order(count, 5, 0).tolist()
    if source.encoded:
        red = np.concatenate([images[:, 0, 0, 0] for images, _ in batches])[:count]
        positions = [_number(source, i) for i in found]
        np.testing.assert_allclose((red + 1) * 127.5, [7 * p for p in positions], atol=0.51)


def _number(source, i):
    return _PICTURES[source.get(tf.constant(i, tf.int64))["image"].numpy()]


_PICTURES = {picture(i): i for i in range(36)}


def test_nothing_of_python_opens_a_path(tmp_path, monkeypatch):
    """Folders, lists and names read the same from a file system that only TensorFlow knows."""
    _folder(tmp_path / "f")
    where = f"ram://{tmp_path.name}"
    for file in (tmp_path / "f").rglob("*.png"):
        target = f"{where}/{file.relative_to(tmp_path / 'f')}"
        tf.io.gfile.makedirs(target.rpartition("/")[0])
        tf.io.gfile.copy(str(file), target, True)
    with tf.io.gfile.GFile(f"{where}/names.txt", "w") as file:
        file.write("cow\nbee\nant\n")
    np.savez(tmp_path / "d.npz", x_train=np.zeros((3, 6, 6), np.uint8), y_train=[0, 1, 2],
             x_test=np.zeros((1, 6, 6), np.uint8), y_test=[0])  # fmt: skip
    tf.io.gfile.copy(str(tmp_path / "d.npz"), f"{where}/d.npz", True)
    tfds_folder(tmp_path / "t", {"train": 3, "test": 3}, count=1)
    tf.io.gfile.makedirs(f"{where}/t/insects/1.0.0")
    for file in (tmp_path / "t/insects/1.0.0").iterdir():
        tf.io.gfile.copy(str(file), f"{where}/t/insects/1.0.0/{file.name}", True)
    for data, count in (
        ({"source": "folder", "path": where}, COUNT),
        ({"source": "npz", "path": f"{where}/d.npz"}, 3),
        ({"source": "tfds", "path": f"{where}/t", "name": "insects"}, 3),
    ):
        values = {f"data.{key}": value for key, value in data.items()}
        config = configs.load_config(None, {"data.class_names": f"{where}/names.txt", **values})
        source = inputs.open_source(config, "train")
        assert source.num_examples == count and source.class_names == ("cow", "bee", "ant")
        source.get(tf.constant(2, tf.int64))
