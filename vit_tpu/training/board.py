"""TensorBoard beyond scalars: histograms, pictures of what is learnt and predicted, the projector, hyper-parameters."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.losses import SigmoidCrossEntropy
from vit_tpu.pictures import attention, weights
from vit_tpu.training import storage
from vit_tpu.training.logger import Logger, StepCallback

SHOWN = 8  # validation images with their attention
PICTURES = 4  # how often pictures are drawn in a run, besides its end: they cost about a second


@dataclasses.dataclass(frozen=True)
class Samples:
    """Validation examples to draw and to project.

    Attributes:
      images: uint8 [n, H, W, C], as the model sees them before scaling.
      labels: int [n].
      class_names: by label.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: Sequence[str]

    def name(self, label: int) -> str:
        return self.class_names[label] if 0 <= label < len(self.class_names) else str(label)


class Board(StepCallback):
    """Writes histograms, pictures and the projector's data into the run's logs.

    Args:
      logger: whose writers are used, and which must come before it in the list of callbacks.
      every: steps between histograms; a histogram is taken from float32 weights on the host.
      samples: validation examples; None leaves the pictures of images out.
      total_steps: of the run.
    """

    def __init__(self, logger: Logger, every: int, samples: Samples | None, *, total_steps: int, start: int = 0):
        super().__init__(every, start)
        self.logger, self.samples, self.total_steps = logger, samples, total_steps
        self.between = max(total_steps // PICTURES, 1)
        self.drawn = start - start % self.between
        self.before: dict[str, np.ndarray] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self.before = self._weights()

    def on_steps(self, step: int, logs: Any) -> None:
        with self.logger.clock.pause(), self.logger.writers["train"].as_default(step):
            self._histograms()
            if step - self.drawn >= self.between or step >= self.total_steps:
                self.drawn = step
                self._pictures()
        self.logger.writers["train"].flush()

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        if self.samples is not None and self.step >= self.total_steps:  # whoever stopped the run may not wait
            project(self.model, self.samples, storage.join(self.logger.workdir, "logs"))

    def _weights(self) -> dict[str, np.ndarray]:
        return {p.path: tf.convert_to_tensor(p.variable).numpy() for p in self.model.parameters()}

    def _histograms(self) -> None:
        """Weights by path; how far each group moved since the last time, as a share of its length; trust ratios."""
        now = self._weights()
        for path, value in now.items():
            tf.summary.histogram(f"weights/{path}", value)
        for group in self.model.groups:
            moved = sum(float(np.square(now[path] - self.before[path]).sum()) for path in group.paths)
            length = sum(float(np.square(now[path]).sum()) for path in group.paths)
            tf.summary.scalar(f"moved/{group.name}", np.sqrt(moved / max(length, 1e-30)))
        self.before = now
        if getattr(self.model.inner_optimizer, "record_trust_ratios", False):
            ratios = self.model.inner_optimizer.trust_ratios()
            tf.summary.histogram("trust_ratios", np.asarray(list(ratios.values()), np.float32))

    def _pictures(self) -> None:
        drawn = {"patch_filters": weights.filter_sheet(self.model), "positions": weights.similarity_sheet(self.model)}
        if self.samples is not None and self.model.pool != "none" and self.model.num_classes:
            images, labels = self.samples.images[:SHOWN], self.samples.labels[:SHOWN]
            floats = images.astype(np.float32) / 127.5 - 1
            scores = tf.sigmoid if isinstance(self.model.loss, SigmoidCrossEntropy) else tf.nn.softmax
            shares = scores(self.model.logits(tf.constant(floats))).numpy()
            captions = [
                f"{self.samples.name(int(share.argmax()))} {share.max():.0%}"
                + ("" if share.argmax() == label else f", is {self.samples.name(int(label))}")
                for share, label in zip(shares, labels)
            ]
            maps = attention.attention_maps(self.model, floats)
            drawn["validation"] = attention.attention_figure(
                list(images), maps, captions, "predictions and attention", pairs=2, font=20
            )  # TensorBoard shows it 280 pixels wide
        for name, figure in drawn.items():
            if figure is not None:
                # One section, so that TensorBoard opens all of them and not the first two.
                tf.summary.image(f"pictures/{name}", weights.pixels(figure)[None])


# The columns of TensorBoard's table of runs: it shows five, by the alphabet. The rest is in the text of the config.
COLUMNS = ("model.variant", "optimizer.name", "optimizer.learning_rate", "training.batch_size", "precision")


def hyperparameters(writer: Any, values: Mapping[str, Any], text: str) -> None:
    """Writes the config as text and as hyper-parameters, so that runs can be compared in TensorBoard's table.

    TensorBoard shows beside them what the same writer writes; the logger gives it the validation's results, too.

    Args:
      writer: of the training.
      values: the config by key.
      text: the config as YAML.
    """
    from tensorboard.plugins.hparams import api

    flat = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
    results = [
        api.Metric("validation/accuracy", display_name="validation accuracy"),
        api.Metric("validation/loss", display_name="validation loss"),
        api.Metric("loss", display_name="train loss"),
    ]
    with writer.as_default(0):
        api.hparams_config([api.HParam(key) for key in COLUMNS if key in flat], results)
        api.hparams(flat)
        tf.summary.text("config", f"```yaml\n{text}\n```")
    writer.flush()


def project(model: Any, samples: Samples, logs: str | os.PathLike[str], batch: int = 64) -> None:
    """Writes what the classifier reads of the samples for TensorBoard's embedding projector.

    Args:
      model: a ViT that pools.
      samples: validation examples.
      logs: the folder given to TensorBoard.
      batch: images a pass.
    """
    if model.pool == "none" or not len(samples.images):
        return
    features = tf.function(lambda images: model.pooled(model.encode(images)), reduce_retracing=True)
    rows = []
    for i in range(0, len(samples.images), batch):
        part = samples.images[i : i + batch]
        full = np.concatenate([part, np.repeat(part[-1:], batch - len(part), 0)])  # one shape, one trace
        rows.append(features(tf.constant(full.astype(np.float32) / 127.5 - 1)).numpy()[: len(part)])
    table, (sprite, (height, width)) = io.StringIO(), _sprite(samples.images)
    np.savetxt(table, np.concatenate(rows), "%.6g", "\t")
    files = {
        "features.tsv": table.getvalue().encode(),
        "labels.tsv": "".join(f"{samples.name(int(label))}\n" for label in samples.labels).encode(),
        "sprite.png": tf.io.encode_png(sprite).numpy(),
        "projector_config.pbtxt": (
            b'embeddings {\n  tensor_name: "validation features"\n  tensor_path: "features.tsv"\n'
            b'  metadata_path: "labels.tsv"\n  sprite { image_path: "sprite.png" '
            b"single_image_dim: %d single_image_dim: %d }\n}\n" % (width, height)
        ),
    }
    storage.make_folder(os.fspath(logs))
    for name, content in files.items():
        with storage.writing(storage.join(logs, name)) as file:
            file.write(content)


def _sprite(images: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the images side by side in a square, at most 48 pixels each (the projector takes 8192 in all)."""
    size = (min(images.shape[1], 48), min(images.shape[2], 48))
    small = tf.cast(tf.round(tf.image.resize(images, size, antialias=True)), tf.uint8).numpy()
    side = int(np.ceil(np.sqrt(len(small))))
    sheet = np.zeros((side * size[0], side * size[1], images.shape[-1]), np.uint8)
    for i, image in enumerate(small):
        row, column = divmod(i, side)
        sheet[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]] = image
    return sheet, size
