"""A model over a data set: outputs of every example, in order, each once, on all replicas."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data.broken import BrokenRecords
from vit_tpu.data.source import Source
from vit_tpu.errors import UserError, nearest
from vit_tpu.evaluation.loading import Trained
from vit_tpu.models.accept import choose_jit
from vit_tpu.models.vit import ViT
from vit_tpu.settings import Config
from vit_tpu.training import inputs

FEATURES = ("head", "cls", "mean")
PAPER_RATIO = 8 / 7  # few-shot images: 256 pixels, of which the middle 224 are seen


@dataclasses.dataclass
class Speed:
    """How fast a pass was.

    Attributes:
      images_per_second: reading, decoding and computing; the first batch, which compiles, left out.
      first_seconds: of the first batch.
    """

    images_per_second: float | None = None
    first_seconds: float = 0.0


def batch_size(trained: Trained, wanted: int | None, examples: int) -> int:
    """Returns a batch size that divides among the replicas: the wanted or the run's, not above what there is."""
    replicas = trained.here.replicas
    size = wanted if wanted is not None else trained.config.training.batch_size
    if size < 1:
        raise UserError(f"batch_size is {size}: give a number above 0")
    if wanted and size % replicas:
        near = sorted({max(size // replicas, 1) * replicas, (size // replicas + 1) * replicas})
        raise UserError(
            f"batch_size {size} does not divide among {replicas} replicas: use {' or '.join(map(str, near))}"
        )
    return -(-min(size, examples) // replicas) * replicas


def eval_dataset(trained: Trained, source: Source, size: int, broken: BrokenRecords) -> tf.data.Dataset:
    """Returns batches (images, labels, weights) of `source` as the run's own validation prepares them."""
    return inputs.eval_data(_config(trained, size, trained.model.image_size), source, broken)


def paper_dataset(trained: Trained, source: Source, size: int, broken: BrokenRecords) -> tf.data.Dataset:
    """Returns batches as the paper's few-shot evaluation prepares them: resized to 8/7 of the model's size whatever
    the shape, then the middle. Runs that train on resized whole images are given those."""
    if trained.config.data.crop != "inception":
        return eval_dataset(trained, source, size, broken)
    height, width = trained.model.image_size
    larger = (round(height * PAPER_RATIO), round(width * PAPER_RATIO))
    top, left = (larger[0] - height) // 2, (larger[1] - width) // 2

    def cut(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return images[:, top : top + height, left : left + width], labels, weights

    dataset = inputs.eval_data(_config(trained, size, larger, crop="resize"), source, broken)
    return dataset.map(cut, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def _config(trained: Trained, size: int, image_size: tuple[int, int], crop: str | None = None) -> Config:
    """The run's config with our batch; labels are the data's own here, compared with the head elsewhere."""
    config = trained.config
    data = dataclasses.replace(config.data, channels=trained.model.channels, crop=crop or config.data.crop)
    model = dataclasses.replace(config.model, image_size=image_size, num_classes=None)
    return dataclasses.replace(
        config, data=data, model=model, training=dataclasses.replace(config.training, batch_size=size)
    )


def logits_of(model: ViT) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns images -> logits [B, C].

    Raises:
      UserError: the model has no head, or an output for each token.
    """
    if not model.num_classes:
        raise UserError(
            "this model has no head, so no predictions: judge its features with --fewshot, --knn or --probe"
        )
    if model.pool == "none":
        raise UserError("this model has an output for each token (pool=none): its images have no single prediction")
    return lambda images: model(images, training=False)


def features_of(model: ViT, kind: str = "head") -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns images -> features [B, D] in float32.

    Args:
      model: the network.
      kind: "head" is what the classifier reads; "cls" the class token and "mean" the mean of the patch tokens, after
        the final LayerNorm.

    Raises:
      UserError: the model has no such features.
    """
    if kind not in FEATURES:
        raise UserError(f'features "{kind}"{nearest(kind, FEATURES)}: choose one of {", ".join(FEATURES)}')
    if kind == "cls" and model.pool != "tok":
        raise UserError(f"features=cls, but this model has no class token (pool={model.pool}): use head or mean")
    if kind == "head" and model.pool == "none":
        raise UserError("features=head, but this model has an output for each token (pool=none): use mean")

    def compute(images: tf.Tensor) -> tf.Tensor:
        tokens = model.encode(images)
        if kind == "cls":
            return tf.cast(tokens[:, 0], tf.float32)
        if kind == "mean":
            return tf.reduce_mean(tf.cast(tokens[:, model.positions.num_prefix :], tf.float32), axis=1)
        x = model.pooled(tokens)
        return x if model.pre_logits is None else model.pre_logits.forward(model.pre_logits.params, x)

    return compute


def compiled(trained: Trained, compute: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a traced function of a batch that runs on all replicas, each with its equal part of the batch."""
    strategy = trained.here.strategy
    jit = choose_jit(trained.config.training.jit, strategy)
    inner = tf.function(compute, jit_compile=jit or None, autograph=False, reduce_retracing=True)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 and not isinstance(strategy, tf.distribute.TPUStrategy):
        return inner
    step = tf.function(lambda part: strategy.run(inner, (part,)), autograph=False)

    def run(images: tf.Tensor) -> tf.Tensor:
        share = images.shape[0] // replicas

        def part(context: Any) -> tf.Tensor:
            first = context.replica_id_in_sync_group * share
            return images[first : first + share]

        out = step(strategy.experimental_distribute_values_from_function(part))
        return tf.concat(strategy.experimental_local_results(out), 0)

    return run


def compiled_logits(trained: Trained) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the compiled images -> logits [B, C] of a model, the same one each time."""
    if "logits" not in trained.functions:
        trained.functions["logits"] = compiled(trained, logits_of(trained.model))
    return trained.functions["logits"]


def each_batch(
    run: Callable[[tf.Tensor], tf.Tensor], dataset: tf.data.Dataset, speed: Speed | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, tf.Tensor]]:
    """Yields (outputs, labels, weights, images) of every batch; the next one is computed while the caller works.

    Raises:
      FloatingPointError: outputs are not finite.
    """
    speed = speed if speed is not None else Speed()
    began, images_done, first_images, pending = time.perf_counter(), 0, None, None
    for images, labels, weights in dataset:
        out = run(images)
        if pending is not None:
            yield _fetched(pending)
        pending = (out, labels, weights, images)
        if first_images is None:
            out.numpy()  # waits for the compilation
            speed.first_seconds, first_images = time.perf_counter() - began, images
            began = time.perf_counter()
        else:
            images_done += int(images.shape[0])
    if pending is None:
        return
    if not images_done and first_images is not None:  # a single batch: once more, without compiling
        run(first_images).numpy()
        images_done = int(first_images.shape[0])
    last = _fetched(pending)
    speed.images_per_second = images_done / max(time.perf_counter() - began, 1e-9)
    yield last


def _fetched(pending: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, tf.Tensor]:
    out, labels, weights, images = pending
    if not np.isfinite(out.numpy()).all():
        raise FloatingPointError(
            "the model's outputs are not finite: its weights are broken, or its numbers are too large for the "
            "precision (try --precision=float32)"
        )
    return out.numpy(), labels.numpy(), weights.numpy(), images


def features(
    trained: Trained, source: Source, kind: str = "head", *, batch: int | None = None,
    speed: Speed | None = None, run: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Returns float32 features [n, D] and labels int [n] of every example of `source`, in its order.

    Args:
      trained: the model.
      source: what to look at; one label an example.
      kind: as in `features_of`.
      batch: examples at a time; None: the run's.
      speed: filled in.
      run: the compiled function, if the caller keeps it.

    Raises:
      UserError: label rows, an unreadable file, or no such features.
    """
    if source.labels.ndim != 1:
        raise UserError(f"{source.name} has label rows: few-shot, neighbours and probe need one label an image")
    broken = BrokenRecords(0)
    dataset = paper_dataset(trained, source, batch_size(trained, batch, source.num_examples), broken)
    run = run or compiled(trained, features_of(trained.model, kind))
    rows = []
    with readable(broken):
        for out, _, weights, _ in each_batch(run, dataset, speed):
            rows.append(out[weights > 0])
    return np.concatenate(rows), np.asarray(source.labels, np.int64)


class readable:  # noqa: N801  (used as a with statement)
    """Turns TensorFlow's obscure error for an unreadable file into the one that names the file."""

    def __init__(self, broken: BrokenRecords):
        self.broken = broken

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self.broken.check()


def open_source(trained: Trained, split: str) -> Source:
    """Returns a split of the data that the model's config names.

    Args:
      trained: says which data.
      split: "train", "validation", or "all": every record of data that have no validation split of their own.

    Raises:
      UserError: no such data, or "all" of data with a validation split.
    """
    if split != "all":
        return inputs.open_source(trained.config, split)
    # With a vanishing share for validation all records are training records, unless validation stands apart.
    config = dataclasses.replace(
        trained.config, data=dataclasses.replace(trained.config.data, validation_fraction=sys.float_info.min)
    )
    everything = inputs.open_source(config, "train")
    try:
        inputs.open_source(config, "validation")
    except UserError:
        return everything
    raise UserError(f"{everything.name} has a validation split of its own: evaluate on validation or train, not all")
