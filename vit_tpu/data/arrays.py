"""Images in NumPy arrays or in an `.npz` file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from vit_tpu.data import splits
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError

_SPLIT_KEYS = {
    "train": (("train_images", "train_labels"), ("x_train", "y_train")),
    "validation": (
        ("validation_images", "validation_labels"),
        ("test_images", "test_labels"),
        ("x_val", "y_val"),
        ("x_test", "y_test"),
    ),
}
_PLAIN_KEYS = (("images", "labels"), ("x", "y"), ("image", "label"))


def from_arrays(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    name: str = "arrays",
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
) -> Source:
    """Returns a source that serves images from memory.

    Args:
      images: uint8 [n, H, W, C] or [n, H, W]; C is 1 or 3.
      labels: integers [n] (or [n, 1]) from 0, or float rows [n, K] (soft or multi-label).
      name: used in ids ("name/17") and messages.
      num_classes: default: the number of `class_names`, else the largest label plus one.
      class_names: default: "0", "1", ...
      ids: a readable name for each record; default: "name/0", "name/1", ...

    Raises:
      UserError: for images that are not uint8, other ranks, unequal lengths or no example.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8:
        raise UserError(
            f"{name}: images are {images.dtype}, expected uint8 0..255: "
            "for floats in [0, 1] pass (255 * images).round().astype('uint8')"
        )
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UserError(
            f"{name}: images have shape {list(images.shape)}, expected [n, H, W, 1 or 3]: move the channels last"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if len(images) != len(labels):
        raise UserError(f"{name}: {len(images)} images but {len(labels)} labels: pass one for each")
    if not len(images):
        raise UserError(f"{name}: there are no examples: pass at least one image")
    labels = _plain_labels(labels, name)
    found = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    if num_classes is None:
        num_classes = len(class_names) if class_names is not None else max(found, 1)
    if class_names is None:
        class_names = [str(i) for i in range(num_classes)]
    if len(class_names) != num_classes:
        raise UserError(f"{name}: {len(class_names)} class names for {num_classes} classes: give one for each")
    if ids is not None and len(ids) != len(images):
        raise UserError(f"{name}: {len(ids)} ids for {len(images)} images: pass one for each")
    # Datasets run on the CPU: kept there, the array is captured by reference, not copied.
    with tf.device("CPU:0"):
        image_tensor, label_tensor = tf.constant(images), tf.constant(labels)
        id_tensor = None if ids is None else tf.constant(list(ids))

    def id_of(index: tf.Tensor) -> tf.Tensor:
        if id_tensor is None:
            return tf.strings.join([f"{name}/", tf.strings.as_string(index)])
        return tf.gather(id_tensor, index)

    def get(index: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            "image": tf.gather(image_tensor, index),
            "label": tf.gather(label_tensor, index),
            "id": id_of(index),
        }

    return Source(
        name=name,
        num_examples=len(images),
        num_classes=num_classes,
        class_names=tuple(class_names),
        labels=labels,
        get=get,
        image_shape=tuple(images.shape[1:]),
        name_of=lambda i: f"{name}/{i}" if ids is None else ids[i],
    )


def from_npz(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    validation_share: float = 0.1,
    label_offset: int = 0,
) -> Source:
    """Returns the `split` ("train" or "validation") of an `.npz` file.

    Array names understood: images/labels or x/y (one split), train_images/train_labels,
    validation_images/..., test_images/..., or Keras' x_train/y_train, x_test/y_test; an array
    class_names is used when present. In a file without validation arrays each image is dealt to a
    split by a hash of its position.

    Args:
      validation_share: the hashed split's share of validation, between 0 and 1.
      label_offset: added to integer labels; -1 for labels that count from 1.

    Raises:
      UserError: for a missing or unreadable file, another split name, or no such arrays.
    """
    path = os.fspath(path)
    splits.check_split(split, validation_share)
    if not tf.io.gfile.exists(path):
        raise UserError(f"there is no file {path}: check the path")
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            start = file.read(6)
        if not start.startswith(b"PK"):  # numpy would call it pickled
            what = "one array alone (.npy)" if start == b"\x93NUMPY" else f"another format (it starts with {start!r})"
            raise UserError(f"{path} is {what}: write images and labels with numpy.savez")
        with tf.io.gfile.GFile(path, "rb") as file, np.load(file, allow_pickle=False) as loaded:
            own = _pair(loaded.files, _SPLIT_KEYS["validation"])
            chosen = own if split == "validation" and own else _pair(loaded.files, _SPLIT_KEYS["train"] + _PLAIN_KEYS)
            if chosen is None:
                raise UserError(
                    f"{path} holds {', '.join(loaded.files) or 'nothing'}, no {split} split: "
                    "it needs arrays named train_images and train_labels, or images and labels"
                )
            images, labels = loaded[chosen[0]], loaded[chosen[1]]
            if class_names is None and "class_names" in loaded.files:
                class_names = [str(value) for value in loaded["class_names"]]
    except UserError:
        raise
    except Exception as error:  # zip, pickle and format errors come in many types
        raise UserError(f"{path} is not a readable .npz file ({error}): write it again") from None
    stem = os.path.splitext(os.path.basename(path))[0]
    if label_offset:
        if not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"{path}: data.label_offset needs integer labels, these are {labels.dtype}: leave it out")
        labels = labels.astype(np.int64) + label_offset
    name = f"{stem}/{split}" if own else stem
    source = from_arrays(images, labels, name=name, num_classes=num_classes, class_names=class_names)
    return source if own else splits.by_hash(source, split, validation_share)


def _pair(files: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if pair[0] in files and pair[1] in files), None)


def _plain_labels(labels: np.ndarray, name: str) -> np.ndarray:
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        # An unsigned or 64-bit label must not wrap around on its way to int32.
        if len(labels) and max(abs(int(labels.min())), abs(int(labels.max()))) >= 2**31:
            raise UserError(f"{name}: label {labels.max()} does not fit in int32: number from 0")
        return labels.astype(np.int32)
    if labels.ndim == 2 and labels.dtype.kind in "fiub":
        return labels.astype(np.float32)
    raise UserError(
        f"{name}: labels are {labels.dtype} {list(labels.shape)}, expected integers [n] or float rows [n, classes]"
    )
