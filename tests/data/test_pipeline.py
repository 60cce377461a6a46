import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from PIL import Image

from vit_tpu.data import order
from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.digits import digits
from vit_tpu.data.folders import from_folders
from vit_tpu.data.in_memory import load_into_memory
from vit_tpu.data.pipeline import eval_pipeline, train_pipeline
from vit_tpu.data.samples import sample_images
from vit_tpu.errors import UserError


def _numbered(count, size=4):
    """Record i has label i and carries i in its first pixels, so batches tell what they hold."""
    images = np.zeros((count, size, size, 1), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = np.arange(count) // 256, np.arange(count) % 256
    return from_arrays(images, np.arange(count), name="n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Two classes of 9 images each, of several sizes and formats."""
    root = tmp_path_factory.mktemp("tree")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(18):
            folder = root / split / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            colour = rng.integers(0, 256, (3, 4, 3), np.uint8)
            image = Image.fromarray(colour).resize((20 + i, 40 - i), Image.Resampling.BICUBIC)
            image.save(folder / f"{i}.img", ("JPEG", "PNG", "GIF", "WEBP")[i % 4])
    return root


def _take(dataset, count):
    return [tuple(part.numpy() for part in batch) for batch in dataset.take(count)]


def _assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a, b)


def _ways(tree):
    """(source, options): the short way, the long way from memory, and files; all augmented."""
    usual = {"flip": True, "shift": 1, "mixup": 0.2, "label_format": "onehot"}
    everything = usual | {"cutmix": 1.0, "policy": "three_augment", "jitter": 0.3, "erasing": 0.5, "repeats": 2}
    return [
        (digits(), {"image_size": 8, **usual}),
        (digits(), {"image_size": (8, 6), "crop": "inception", **everything}),
        (from_folders(tree), {"image_size": (8, 6), "crop": "inception", "channels": 1, **usual}),
    ]


@pytest.mark.parametrize("way", range(3))
def test_a_batch_is_a_function_of_seed_and_step_for_every_number_of_hosts_and_global_policy(tree, way):
    source, options = _ways(tree)[way]

    def read(start, count, **kwargs):
        kwargs = {"seed": 3} | options | kwargs
        # 20 is several chunks for one host and for each of two, and crosses an epoch of 18
        return _take(train_pipeline(source, batch_size=20, start_step=start, **kwargs), count)

    whole = read(0, 6)
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        hosts = [read(2, 3, num_hosts=2, host=host) for host in range(2)]  # resumed, too
    finally:
        keras.mixed_precision.set_global_policy(before)
    joined = [tuple(np.concatenate(parts) for parts in zip(*halves)) for halves in zip(*hosts)]
    _assert_same(joined, whole[2:5])
    if way == 0:  # building the others takes seconds
        _assert_same(read(5, 1), whole[5:])
        _assert_same(read(0, 1), whole[:1])
        other = read(0, 1, seed=4)
        assert not np.array_equal(other[0][0], whole[0][0])


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("repeats", [2, 3])
def test_repeats_give_each_example_that_often_in_its_batch_and_in_all(num_hosts, repeats):
    source, batch_size, steps = _numbered(12), 12, 2 * repeats  # two epochs of whole batches

    def read(host):
        dataset = train_pipeline(source, batch_size=batch_size, image_size=4, repeats=repeats, shift=2, seed=1,
                                 num_hosts=num_hosts, host=host)  # fmt: skip
        return _take(dataset, steps)

    hosts = [read(host) for host in range(num_hosts)]
    images, labels = (np.stack([np.concatenate([h[i][part] for h in hosts]) for i in range(steps)]) for part in (0, 1))
    for one in labels:
        assert sorted(np.unique(one, return_counts=True)[1]) == [repeats] * (batch_size // repeats)
        assert (one != np.roll(one, 1)).all()  # mixup meets no example with itself
    distinct = labels[:, : batch_size // repeats].reshape(-1)
    for epoch in range(2):
        np.testing.assert_array_equal(distinct[12 * epoch : 12 * epoch + 12], order.epoch_order(12, 1, epoch))
    np.testing.assert_array_equal(np.tile(labels[:, : batch_size // repeats], repeats), labels)
    first, second = images[:, 0], images[:, batch_size // repeats]  # two copies, varied each in its own way
    assert np.mean([np.array_equal(a, b) for a, b in zip(first, second)]) < 0.6


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("stop", [1, 7])
def test_interrupted_anywhere_an_epoch_is_every_example_once(num_hosts, stop):
    source, batch_size, seed = _numbered(37), 4, 5
    steps = math.ceil(2 * 37 / batch_size)

    def read(start, count):
        hosts = [
            _take(train_pipeline(source, batch_size=batch_size, image_size=4, seed=seed,
                                 start_step=start, num_hosts=num_hosts, host=h), count)
            for h in range(num_hosts)
        ]  # fmt: skip
        return [np.concatenate([host[i][1] for host in hosts]) for i in range(count)]

    labels = np.concatenate(read(0, stop) + read(stop, steps - stop))
    np.testing.assert_array_equal(np.sort(labels[:37]), np.arange(37))
    np.testing.assert_array_equal(np.sort(labels[37:74]), np.arange(37))
    np.testing.assert_array_equal(labels[:37], order.epoch_order(37, seed, 0))


def test_labels_stay_with_their_images():
    for images, labels in _take(train_pipeline(_numbered(300), batch_size=50, image_size=4), 6):
        numbers = np.round((images + 1) * 127.5)
        np.testing.assert_array_equal(numbers[:, 0, 0, 0] * 256 + numbers[:, 0, 1, 0], labels)


def test_without_shuffle_records_come_in_order():
    found = _take(train_pipeline(_numbered(5), batch_size=4, image_size=4, shuffle=False), 3)
    assert np.concatenate([b[1] for b in found]).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_augmentation_differs_between_epochs_and_not_by_neighbours():
    rng = np.random.default_rng(0)
    source = from_arrays(rng.integers(0, 256, (8, 9, 9, 1), np.uint8), np.arange(8))
    options = {"image_size": 9, "shift": 4, "flip": True, "seed": 2}
    (images, labels), (later, later_labels) = _take(train_pipeline(source, batch_size=8, **options), 2)
    same = [np.array_equal(images[labels == i], later[later_labels == i]) for i in range(8)]
    assert sum(same) <= 1
    small = _take(train_pipeline(source, batch_size=2, **options), 4)
    _assert_same([(np.concatenate([b[0] for b in small]),)], [(images,)])


def test_all_shapes_and_dtypes_are_static(tree):
    for source in (digits(), from_folders(tree)):
        channels = 1 if source.image_shape else 3
        train = train_pipeline(source, batch_size=4, image_size=(8, 6), num_hosts=2)
        assert train.element_spec == (
            tf.TensorSpec((2, 8, 6, channels), tf.float32), tf.TensorSpec((2,), tf.int32)
        )  # fmt: skip
        assert train.cardinality() == tf.data.INFINITE_CARDINALITY
        evaluation = eval_pipeline(
            source, batch_size=4, image_size=8, channels=3, label_format="onehot", num_classes=12
        )
        assert evaluation.element_spec == (
            tf.TensorSpec((4, 8, 8, 3), tf.float32), tf.TensorSpec((4, 12), tf.float32),
            tf.TensorSpec((4,), tf.float32),
        )  # fmt: skip
        assert int(evaluation.cardinality()) == math.ceil(source.num_examples / 4)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_evaluation_counts_10001_examples_once(num_hosts):
    source = _numbered(10_001)
    seen, weights, steps = [], 0.0, set()
    for host in range(num_hosts):
        dataset = eval_pipeline(source, batch_size=128, image_size=4, num_hosts=num_hosts, host=host)
        steps.add(int(dataset.cardinality()))
        for _, labels, weight in dataset.as_numpy_iterator():
            seen.append(labels[weight == 1])
            weights += weight.sum()
    assert steps == {79}
    assert weights == 10_001
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(10_001))


def test_a_keras_model_evaluates_to_the_accuracy_of_numpy():
    source = digits("validation")
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile(weighted_metrics=["sparse_categorical_accuracy"])
    dataset = eval_pipeline(source, batch_size=77, image_size=8)
    _, accuracy = model.evaluate(dataset, verbose=0)
    images = source.get(tf.range(360, dtype=tf.int64))["image"].numpy() / 127.5 - 1
    expected = model(images).numpy().argmax(axis=1) == source.labels
    assert accuracy == pytest.approx(expected.mean(), abs=1e-6)


def test_mixup_rows_are_shares_of_two_classes():
    dataset = train_pipeline(_numbered(8), batch_size=4, image_size=4, mixup=1.0, label_format="onehot")
    plain = train_pipeline(_numbered(8), batch_size=4, image_size=4, label_format="onehot")
    for (_, mixed), (_, own) in zip(_take(dataset, 5), _take(plain, 5)):
        np.testing.assert_allclose(mixed.sum(axis=1), 1, atol=1e-6)
        share = mixed[own == 1]
        assert share.min() >= 0.5 and np.ptp(share) < 1e-6
        np.testing.assert_allclose(mixed, share[0] * own + (1 - share[0]) * np.roll(own, 1, 0),
                                   atol=1e-6)  # fmt: skip


def test_label_rows_of_the_source_are_kept():
    rows = np.array([[0, 1, 1], [0.5, 0, 0.5]], np.float32)
    source = from_arrays(np.zeros((2, 4, 4, 1), np.uint8), rows)
    ((_, labels),) = _take(train_pipeline(source, batch_size=2, image_size=4, shuffle=False), 1)
    np.testing.assert_array_equal(labels, rows)


def test_files_in_memory_give_the_batches_of_the_files(tree):
    source = from_folders(tree)
    loaded = load_into_memory(source, (8, 6))
    assert loaded.image_shape == (8, 6, 3) and loaded.name_of(3) == source.name_of(3)
    assert loaded.class_names == source.class_names
    options = {"batch_size": 6, "image_size": (8, 6), "shift": 1, "flip": True}
    _assert_same(_take(train_pipeline(loaded, **options), 4),
                 _take(train_pipeline(source, **options), 4))  # fmt: skip
    with pytest.raises(UserError, match="more than 0.0"):
        load_into_memory(source, (8, 6), limit=100)


def test_central_crop_cuts_the_border(tree):
    for source in (digits(), from_folders(tree)):
        ((images, _, _),) = _take(eval_pipeline(source, batch_size=2, image_size=8, crop="central"), 1)
        ((whole, _, _),) = _take(eval_pipeline(source, batch_size=2, image_size=8), 1)
        assert images.shape == whole.shape and not np.array_equal(images, whole)


def test_sample_images_are_spread_and_named(tree):
    source = from_folders(tree, "validation")
    sample = sample_images(source, 6, image_size=(8, 6))
    assert sample["image"].shape == (6, 8, 6, 3) and sample["image"].dtype == np.uint8
    assert sample["id"] == [source.name_of(i) for i in range(0, 18, 3)]
    assert sample["label"].tolist() == [0, 0, 0, 1, 1, 1]
    images = np.concatenate([b[0] for b in eval_pipeline(
        source, batch_size=6, image_size=(8, 6)).as_numpy_iterator()])  # fmt: skip
    np.testing.assert_array_equal(sample["image"], np.round((images[::3] + 1) * 127.5))
    assert sample_images(digits(), 3, image_size=8)["id"][1] == "digits/train/479"
    assert len(sample_images(_numbered(2), 5, image_size=4)["id"]) == 2


@pytest.fixture
def damaged(tree, tmp_path):
    """Eight files, the sixth of them cut short."""
    files = sorted((tree / "train" / "a").iterdir())[:8]
    (tmp_path / "train" / "a").mkdir(parents=True)
    for number, file in enumerate(files):
        data = file.read_bytes()
        (tmp_path / "train" / "a" / str(number)).write_bytes(data[:-20] if number == 5 else data)
    return from_folders(tmp_path, validation_share=1e-12)


def test_a_broken_record_is_named_and_its_place_taken(damaged):
    broken = BrokenRecords(1)
    dataset = train_pipeline(damaged, batch_size=8, image_size=8, shuffle=False, broken=broken)
    whole = damaged.num_examples
    assert whole == 8
    (images, _), (again, _) = _take(dataset, 2)
    assert list(broken.reasons) == ["a/5"] and "damaged" in broken.reasons["a/5"]
    np.testing.assert_array_equal(images[5], images[6])
    np.testing.assert_array_equal(images, again)
    assert not np.array_equal(images[4], images[5])


def test_stand_ins_for_broken_records_are_the_same_for_every_number_of_hosts(damaged, tmp_path):
    """Also where a host's whole part is broken, and where the partner that mixup takes from the host before is."""
    for name in "467":  # 5 is cut short already: read in order, the second of two hosts has nothing
        (tmp_path / "train" / "a" / name).write_bytes(b"")
    options = {"batch_size": 8, "image_size": 8, "shuffle": False, "shift": 2, "label_format": "onehot", "mixup": 1.0}

    def read(num_hosts, host=0):
        broken = BrokenRecords(4)
        return _take(train_pipeline(damaged, broken=broken, num_hosts=num_hosts, host=host, **options), 2), broken

    whole, broken = read(1)
    assert sorted(broken.reasons) == ["a/4", "a/5", "a/6", "a/7"]
    np.testing.assert_array_equal(whole[0][0][5], whole[0][0][6])
    hosts = [read(2, host)[0] for host in range(2)]
    _assert_same([tuple(np.concatenate(parts) for parts in zip(*batches)) for batches in zip(*hosts)], whole)


def test_a_batch_without_one_readable_record_stops_with_the_list(damaged, tmp_path):
    for file in (tmp_path / "train" / "a").iterdir():
        file.write_bytes(b"")
    broken = BrokenRecords(1000)
    with pytest.raises(tf.errors.OpError):
        _take(train_pipeline(damaged, batch_size=2, image_size=8, broken=broken), 1)
    with pytest.raises(UserError, match=r"no record of a batch could be read: a/. \(the file is empty\).*larger batch"):
        broken.check()


def test_a_broken_record_has_no_weight_in_evaluation(damaged):
    broken = BrokenRecords(1)
    dataset = eval_pipeline(damaged, batch_size=3, image_size=8, broken=broken)
    weights = np.concatenate([b[2] for b in _take(dataset, 3)])
    assert weights.tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 0]
    assert list(broken.reasons) == ["a/5"]


def test_too_many_broken_records_stop_with_the_list(damaged):
    broken = BrokenRecords(0)
    with pytest.raises(tf.errors.OpError):
        _take(eval_pipeline(damaged, batch_size=8, image_size=8, broken=broken), 1)
    with pytest.raises(UserError, match=r"1 unreadable records, 0 allowed: a/5 \(the .* damaged\)"):
        broken.check()
    with pytest.raises(UserError, match="1 unreadable records, 0 allowed: a/5"):
        load_into_memory(damaged, 8)
    assert load_into_memory(damaged, 8, broken=BrokenRecords(1)).num_examples == 7


def test_a_file_that_vanished_is_a_broken_record(tmp_path):
    for name in ("1", "2"):
        (tmp_path / "train" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "train" / "a" / name, "PNG")
    source = from_folders(tmp_path, validation_share=1e-12)
    (tmp_path / "train" / "a" / "2").unlink()
    broken = BrokenRecords(1)
    _take(train_pipeline(source, batch_size=2, image_size=4, broken=broken), 1)
    assert broken.reasons["a/2"] == f"it cannot be read ({tmp_path}/train/a/2; No such file or directory)"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 6, "num_hosts": 4}, "does not divide among 4 hosts"),
        ({"crop": "inceptoin"}, 'crop is "inceptoin".*did you mean "inception"'),
        ({"label_format": "one_hot"}, "label_format"),
        ({"mixup": 0.2}, 'mixup mixes label rows: set label_format="onehot"'),
        ({"cutmix": 1.0}, 'cutmix mixes label rows: set label_format="onehot"'),
        ({"cutmix": -1.0, "label_format": "onehot"}, "cutmix is -1"),
        ({"mixup": 0.2, "label_format": "onehot", "batch_size": 1}, "batch_size of 2 or more"),
        ({"repeats": 3}, "does not hold each example 3 times"),
        ({"policy": "randaugmnt"}, 'did you mean "randaugment"'),
        ({"erasing": 1.5}, "erasing is 1.5"),
        ({"jitter": float("nan")}, "jitter is nan"),
        ({"services": ["localhost:5050"]}, "digits/train is in memory here"),
        ({"channels": 4}, "channels is 4"),
        ({"image_size": (8,)}, "image_size"),
    ],
)
def test_wrong_options_are_one_line_of_error(options, message):
    with pytest.raises(UserError, match=message):
        train_pipeline(digits(), **{"batch_size": 8, "image_size": 8, **options})


def test_two_replicas_get_the_batch_in_equal_parts(tree, mirrored):
    dataset = train_pipeline(from_folders(tree), batch_size=8, image_size=8)
    spread = next(iter(mirrored.experimental_distribute_dataset(dataset)))
    parts = mirrored.experimental_local_results(spread[0])
    assert [part.shape[0] for part in parts] == [4, 4]
    np.testing.assert_array_equal(np.concatenate(parts), _take(dataset, 1)[0][0])
