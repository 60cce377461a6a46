import struct

import numpy as np
import pytest
import tensorflow as tf
from shard_files import example, imagenet, picture, shards, tfrecord

from vit_tpu.data import examples, tfrecords
from vit_tpu.data.decode import decode_image
from vit_tpu.data.examples import Keys
from vit_tpu.data.tfrecords import from_tfrecords
from vit_tpu.errors import UserError

LABELS = [0, 2, 1, 1, 0, 2, 0]


def _records(labels=LABELS):
    return [imagenet(i, label) for i, label in enumerate(labels)]


def _red(source, i):
    return int(decode_image(source.get(tf.constant(i, tf.int64))["image"]).numpy()[0, 0, 0])


@pytest.fixture
def folder(tmp_path):
    shards(tmp_path, tfrecord, _records(), 3, "train")
    return shards(tmp_path, tfrecord, _records([1, 0]), 1, "validation")


def test_any_record_of_any_shard_is_read_by_its_number(folder):
    source = from_tfrecords(folder)
    assert source.num_examples == 7 and source.num_classes == 3 and source.encoded
    assert source.labels.tolist() == LABELS and source.labels.dtype == np.int32
    for i in (6, 0, 3, 2, 5, 1, 4):
        record = source.get(tf.constant(i, tf.int64))
        assert record["image"].numpy() == picture(i) and int(record["label"]) == LABELS[i]
        assert record["id"].numpy().decode() == source.name_of(i)
    assert [source.name_of(i) for i in (0, 2, 6)] == [
        "train-00000-of-00003#0", "train-00001-of-00003#0", "train-00002-of-00003#2"]  # fmt: skip
    assert from_tfrecords(folder, "validation").labels.tolist() == [1, 0]


def test_records_are_read_inside_a_parallel_graph(folder):
    source = from_tfrecords(folder)
    dataset = tf.data.Dataset.range(7).map(lambda i: source.get(6 - i)["image"], num_parallel_calls=4)
    assert list(dataset.as_numpy_iterator()) == [picture(6 - i) for i in range(7)]


def test_the_index_agrees_with_tensorflows_own_reader(folder):
    path = str(folder / "train-00001-of-00003")
    at, offsets = 0, []
    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        offsets.append(at)
        at += len(record) + 16
    assert [offset for offset, *_ in tfrecords._records(path)] == offsets


def test_the_checksum_is_the_published_one():
    # RFC 3720, B.4: 32 bytes of zero have the CRC-32C 8a9136aa; TFRecord rotates it by 15 and adds a constant.
    crc = 0x8A9136AA
    assert tfrecords.masked_crc32c(bytes(32)) == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


@pytest.mark.parametrize("packed", [True, False])
def test_labels_are_found_however_they_are_encoded(tmp_path, packed):
    record = bytearray(example(label=300, image=picture(1)))
    if not packed:  # an Int64List of field 1 as single varints, as old writers do
        feature = b"\x1a\x03" + b"\x08\xac\x02"
        entry = b"\x0a\x05label\x12" + bytes([len(feature)]) + feature
        body = b"\x0a" + bytes([len(entry)]) + entry
        image = tf.train.Example.FromString(example(image=picture(1))).features.SerializeToString()
        features = body + image
        record = b"\x0a" + _varint(len(features)) + features
        assert tf.train.Example.FromString(bytes(record)).features.feature["label"].int64_list.value == [300]
    label, text = examples.look(bytes(record), 0, len(record), Keys("image", "label"), "x")
    assert label == 300 and text is None


def _varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def test_own_keys_offset_and_float_labels(tmp_path):
    tfrecord(tmp_path / "a.tfrecord", [example(pic=picture(i), y=[float(1 + i % 2)]) for i in range(36)])
    keys = Keys("pic", "y")
    train = from_tfrecords(tmp_path, keys=keys, label_offset=-1)
    valid = from_tfrecords(tmp_path, "validation", keys=keys, label_offset=-1)
    assert train.num_examples + valid.num_examples == 36 and train.num_classes == 2
    assert not {train.name_of(i) for i in range(train.num_examples)} & {
        valid.name_of(i) for i in range(valid.num_examples)}  # fmt: skip
    position = int(valid.name_of(1).partition("#")[2])
    assert _red(valid, 1) == 7 * position and valid.labels[1] == position % 2


def test_names_come_from_the_records_texts_or_from_the_file(tmp_path):
    rows = [("bee", 1), ("ant", 0), ("bee", 1)]
    records = [example(image__encoded=picture(i), image__class__label=n, image__class__text=t)
               for i, (t, n) in enumerate(rows)]  # fmt: skip
    tfrecord(tmp_path / "train-00000-of-00001", records)
    tfrecord(tmp_path / "test-00000-of-00001", records)
    assert from_tfrecords(tmp_path).class_names == ("ant", "bee")
    assert from_tfrecords(tmp_path, names=("x", "y")).class_names == ("x", "y")
    words = Keys(label="image/class/text")
    assert from_tfrecords(tmp_path, keys=words, names=("bee", "ant")).labels.tolist() == [0, 1, 0]
    with pytest.raises(UserError, match='labels are words such as "bee": set data.class_names'):
        from_tfrecords(tmp_path, keys=words)
    with pytest.raises(UserError, match=r'train-00000-of-00001#0 has the label "bee".*1 class names'):
        from_tfrecords(tmp_path, keys=words, names=("ant",))


def test_several_labels_become_rows_on_request_only(tmp_path):
    records = [example(image__encoded=picture(i), image__class__label=v) for i, v in enumerate([[0, 2], [1], []])]
    tfrecord(tmp_path / "train-00000-of-00001", records)
    tfrecord(tmp_path / "val-00000-of-00001", records)
    source = from_tfrecords(tmp_path, multi_label=True)
    assert source.labels.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    with pytest.raises(UserError, match=r"#0 has 2 labels \(0, 2\): set data.multi_label=true"):
        from_tfrecords(tmp_path)


@pytest.mark.parametrize("path", ["{}/train-*", "{}/{{split}}-*", "{}/train-00000-of-00003"])
def test_patterns(folder, path):
    source = from_tfrecords(path.format(folder))
    assert 1 <= source.num_examples <= 7 and "train-" in source.name


def test_a_placeholder_finds_both_splits(folder):
    path = f"{folder}/{{split}}-*"
    assert from_tfrecords(path).num_examples == 7
    assert from_tfrecords(path, "validation").num_examples == 2
    assert from_tfrecords(path, "validation", validation_name="train").num_examples == 7
    with pytest.raises(UserError, match='data.validation_split: .* has no split "dev"'):
        from_tfrecords(path, "validation", validation_name="dev")


def test_a_shard_that_lies_there_twice_is_refused(folder):
    (folder / "train-00001-of-00003.bak").write_bytes((folder / "train-00001-of-00003").read_bytes())
    for path in (folder, f"{folder}/train-*"):
        with pytest.raises(UserError, match="train-00001-of-00003 and .*train-00001-of-00003.bak are the same shard"):
            from_tfrecords(path)


def test_a_missing_shard_is_named(folder):
    (folder / "train-00001-of-00003").unlink()
    with pytest.raises(UserError, match="2 of 3 shards train-.*-00001-of-00003 is missing"):
        from_tfrecords(folder)
    assert from_tfrecords(f"{folder}/train-0000[02]*", "train").num_examples < 7  # a pattern takes what it names


def _damage(folder, where, change):
    path = folder / where
    path.write_bytes(change(path.read_bytes()))


def _wrong_length(data):
    second = struct.unpack("<Q", data[:8])[0] + 16
    return data[:second] + bytes([data[second] ^ 1]) + data[second + 1 :]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: b"", "train-00002-of-00003 holds no images, or was cut short: remove it"),
        (lambda data: data[:-1], "train-00002-of-00003 ends in the middle of the record at byte"),
        (lambda data: data + b"123", "train-00002-of-00003 ends in the middle of a record at byte"),
        (lambda data: b"hello, this is text", "train-00002-of-00003 is not a TFRecord file"),
        (_wrong_length, r"train-00002-of-00003 is damaged at byte \d+ \(wrong checksum"),
    ],
)
def test_a_damaged_shard_is_named(folder, change, message):
    _damage(folder, "train-00002-of-00003", change)
    with pytest.raises(UserError, match=message) as error:
        from_tfrecords(folder)
    assert "\n" not in str(error.value)


def test_a_flipped_bit_in_an_image_is_found_when_it_is_read(folder):
    position = (folder / "train-00000-of-00003").read_bytes().rindex(b"IDAT") + 8
    _damage(folder, "train-00000-of-00003", lambda d: d[:position] + bytes([d[position] ^ 1]) + d[position + 1 :])
    source = from_tfrecords(folder)
    with pytest.raises(tf.errors.DataLossError):
        source.get(tf.constant(1, tf.int64))
    assert _red(source, 0) == 0


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_shards_are_refused_with_the_way_out(tmp_path, compression):
    tfrecord(tmp_path / "train-00000-of-00001", _records(), compression)
    with pytest.raises(UserError, match=r"train-00000-of-00001 is compressed: .* write it again uncompressed"):
        from_tfrecords(tmp_path)


@pytest.mark.parametrize(
    "record, message",
    [
        (example(image__encoded=picture(0)),
         'a.tfrecord#0 has no label under "image/class/label"; it has image/encoded'),
        (example(image__encodet=picture(0), image__class__label=1),
         r'has no image as bytes under "image/encoded" \(did you mean "image/encodet"\?\).*set data.image_key'),
        (example(image__encoded=3, image__class__label=1), "has no image as bytes"),
        (b"\x0a\xff\xff\xff", "a.tfrecord#0 is not a tf.train.Example"),
        (b"no example", "a.tfrecord#0 is not a tf.train.Example"),
        (example(image__encoded=picture(0), image__class__label=1.5), "#0 has the label 1.5: use a whole number"),
        (example(image__encoded=picture(0), image__class__label=2**40), "does not fit in int32"),
    ],
)  # fmt: skip
def test_records_that_are_no_labelled_images_are_named(tmp_path, record, message):
    tfrecord(tmp_path / "a.tfrecord", [record])
    with pytest.raises(UserError, match=message) as error:
        from_tfrecords(tmp_path)
    assert "\n" not in str(error.value)


def test_wrong_places_are_one_line_of_error(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="has no shards"):
        from_tfrecords(tmp_path)
    with pytest.raises(UserError, match="no file matches .*nowhere"):
        from_tfrecords(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no file matches .*train-\*"):
        from_tfrecords(f"{tmp_path}/{{split}}-*")
    tfrecord(tmp_path / "val-00000-of-00001", _records())
    with pytest.raises(UserError, match='has no split "train".*it has val: set data.split'):
        from_tfrecords(tmp_path)


def test_remote_shards_are_read_through_tensorflows_file_systems():
    tf.io.gfile.makedirs("ram://shards")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        tfrecord(f"ram://shards/{name}", _records())
    source = from_tfrecords("ram://shards")
    assert source.num_examples == 14 and _red(source, 12) == 35
    assert from_tfrecords("ram://shards/{split}-*", "validation").num_examples == 7
    tf.io.gfile.remove("ram://shards/train-00001-of-00002")
    with tf.io.gfile.GFile("ram://shards/train-00001-of-00002", "wb") as file:
        file.write(b"not records at all")
    with pytest.raises(UserError, match="ram://shards/train-00001-of-00002 is not a TFRecord file"):
        from_tfrecords("ram://shards")


def test_a_long_indexing_tells_how_far_it_is(monkeypatch, caplog):
    clock = iter([0.0, 2.0, 6.0, 8.0])
    monkeypatch.setattr(examples.time, "monotonic", lambda: next(clock))
    progress = examples.Progress("Reading labels", 3)
    with caplog.at_level("INFO", logger="absl"):
        progress.step(1.0)
        progress.step(0.5)
        progress.end()
    assert "1.5 of 3 shards, about 6 s left" in caplog.text and "3 shards in 8 s" in caplog.text


def test_shards_of_two_splits_are_indexed_once_and_again_when_they_change(tmp_path, monkeypatch):
    tfrecord(tmp_path / "a.tfrecord", [imagenet(i, i % 2) for i in range(30)])
    calls = []
    original = tfrecords._index_one
    monkeypatch.setattr(tfrecords, "_index_one", lambda *args: calls.append(args) or original(*args))
    from_tfrecords(tmp_path)
    from_tfrecords(tmp_path, "validation")
    assert len(calls) == 1
    tfrecord(tmp_path / "a.tfrecord", [imagenet(i, i % 2) for i in range(35)])
    train = from_tfrecords(tmp_path, validation_share=1e-9)
    assert len(calls) == 2 and train.num_examples == 35
    with pytest.raises(UserError, match="has no label"):
        from_tfrecords(tmp_path, keys=Keys(label="other"))
