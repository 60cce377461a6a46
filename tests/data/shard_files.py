"""Writes small record files for the tests of sources."""

import io
import json

import numpy as np
import tensorflow as tf
from PIL import Image

CLASSES = ("ant", "bee", "cow")


def picture(i, size=6):
    """A PNG whose pixels tell which one it is: red is 7 * i."""
    values = np.zeros((size, size, 3), np.uint8)
    values[..., 0] = 7 * i
    values[..., 1] = np.arange(size)[None]
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    return out.getvalue()


def feature(value):
    values = value if isinstance(value, list) else [value]
    if not values or isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    values = [v.encode() if isinstance(v, str) else v for v in values]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def example(**values):
    """A serialised Example; "__" in a name stands for "/"."""
    features = {key.replace("__", "/"): feature(value) for key, value in values.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def imagenet(i, label):
    return example(
        image__encoded=picture(i), image__class__label=label, image__filename=f"{i}.JPEG", image__height=6,
        image__object__bbox__xmin=[0.25, 0.5], image__class__synset="n0",
    )  # fmt: skip


def tfrecord(path, records, compression=None):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return path


def array_record(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def shards(folder, write, records, count, stem):
    """Deals `records` out to `count` files "<stem>-0000i-of-0000n"."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = np.linspace(0, len(records), count + 1).astype(int)
    for i in range(count):
        write(folder / f"{stem}-{i:05d}-of-{count:05d}", records[bounds[i] : bounds[i + 1]])
    return folder


def tfds_folder(root, splits, file_format="tfrecord", count=2, classes=CLASSES, label=None, name="insects"):
    """A prepared TFDS folder as its own tools write it; `splits` maps a name to its number of records.

    Returns the folder of the version.
    """
    folder = root / name / "1.0.0"
    label = label or {
        "pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel",
        "classLabel": {"numClasses": str(len(classes))},
    }
    features = {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {
            "image": {
                "pythonClassName": "tensorflow_datasets.core.features.image_feature.Image",
                "image": {"shape": {"dimensions": ["6", "6", "3"]}, "dtype": "uint8", "encodingFormat": "png"},
            },
            "label": label,
            "id": {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}},
        }},
    }  # fmt: skip
    infos = []
    write = tfrecord if file_format == "tfrecord" else array_record
    for split, size in splits.items():
        records = [example(id=f"{split}_{i}", image=picture(i), label=i % len(classes)) for i in range(size)]
        shards(folder, write, records, count, f"{name}-{split}.{file_format}")
        bounds = np.linspace(0, size, count + 1).astype(int)
        infos.append({
            "name": split, "shardLengths": [str(n) for n in np.diff(bounds)], "numBytes": "1",
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        })  # fmt: skip
    (folder / "features.json").write_text(json.dumps(features))
    (folder / "label.labels.txt").write_text("\n".join(classes) + "\n")
    (folder / "dataset_info.json").write_text(json.dumps({
        "name": name, "version": "1.0.0", "fileFormat": file_format, "description": "for tests",
        "moduleName": "tensorflow_datasets.core.dataset_builders.adhoc_builder", "splits": infos,
    }))  # fmt: skip
    return folder
