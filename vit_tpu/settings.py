"""The fields of a config: sections, defaults, ranges and choices. Data only; `vit_tpu.config` reads and checks them."""

from __future__ import annotations

import dataclasses
from typing import Any

Duration = int | float | str  # steps, or text: "5 epochs", "10%", "50000 examples"


@dataclasses.dataclass(frozen=True)
class Model:
    """What `vit_tpu.ViT` is built with; None leaves the variant's own value."""

    variant: str = "S/16"
    image_size: int | tuple[int, int] = 224
    num_classes: int | None = None  # None: as many as the data has
    pool: str = "map"
    posemb: str = "learn"
    registers: int = 0
    dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    head_bias_init: float = 0.0
    representation_size: int | None = None
    remat: str = "none"
    scan: bool = False
    gelu: str = "tanh"
    epsilon: float = 1e-6
    norm_position: str = "before"  # the final LayerNorm: before | after the pooling
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    num_heads: int | None = None
    patch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """What is read and how training images are varied."""

    source: str = "digits"  # digits | folder | npz | tfds | tfrecord | array_record | manifest | synthetic
    path: str | None = None  # folder, file or pattern, local or gs://; for tfds the data_dir
    name: str | None = None  # tfds: the dataset, such as cifar10, name/config or name:1.0.0
    split: str | None = None  # name of the training split; None: train
    validation_split: str | None = None  # None: validation, val, valid or test; else a share of train, by a hash
    class_names: str | None = None  # text file with one class name a line, in label order
    image_key: str | None = None  # where records and lists keep the image and the label; None: the format's usual name
    label_key: str | None = None
    label_offset: int = 0  # added to labels that are numbers: -1 where they count from 1
    multi_label: bool = False  # any number of labels an image, for training.loss=sigmoid
    exif: str = "ignore"  # ignore | apply the orientation that a camera noted
    background: tuple[int, int, int] = (255, 255, 255)  # red, green, blue under transparent pixels
    channels: int | None = None  # None: as the source has them
    crop: str = "resize"  # resize | inception
    crop_area: tuple[float, float] = (0.05, 1.0)
    flip: bool = False
    shift: int = 0  # pixels of padding for a random shift
    policy: str = "none"  # none | randaugment | autoaugment | three_augment
    policy_layers: int = 2  # RandAugment's N: operations in a row
    policy_magnitude: float = 10.0  # RandAugment's M
    jitter: float = 0.0  # strength of changes in brightness, contrast and saturation, such as 0.3
    erasing: float = 0.0  # probability of random erasing
    erasing_count: int = 1  # boxes it fills
    repeats: int = 1  # copies of each example in its batch, each varied in its own way
    mixup: float = 0.0  # alpha of its beta distribution; with cutmix too, each batch gets one of the two
    cutmix: float = 0.0
    cache: str = "auto"  # auto | none | files | pixels in memory | disk; auto: pixels if under 1 GiB, crop resize
    cache_dir: str | None = None  # folder on a local disk for cache=disk
    data_service: tuple[str, ...] = ()  # host:port of processes that read and decode: python -m vit_tpu.data_service
    validation_fraction: float = 0.1  # of data without its own validation split
    max_broken: int | None = None  # unreadable training files tolerated; None: one in a thousand
    size: int = 1024  # examples of the synthetic source
    classes: int = 10  # classes of the synthetic source


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Name and numbers of the optimizer; None leaves its own default."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    head_weight_decay: float | None = None
    decay_style: str | None = None  # LAMB: decoupled | paper
    momentum_dtype: str | None = None
    beta_1: float | None = None
    beta_2: float | None = None
    beta2_cap: float | None = None  # Adafactor
    epsilon: float | None = None
    momentum: float | None = None  # SGD
    nesterov: bool | None = None  # SGD
    trust_clip: float | None = None  # LAMB
    clipping_threshold: float | None = None  # Adafactor
    exclude_from_weight_decay: tuple[str, ...] | None = None
    exclude_from_layer_adaptation: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()
    layer_decay: float | None = None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate moves; durations are steps or text such as "5 epochs", "10%", "50000 examples"."""

    name: str = "cosine"  # reciprocal_sqrt | cosine | linear | constant
    warmup: Duration = 0
    cooldown: Duration = 0
    timescale: Duration = 10_000  # reciprocal_sqrt


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Loss scaling; off suits float32 and mixed_bfloat16, dynamic is needed by mixed_float16."""

    mode: str = "auto"  # auto | off | fixed | dynamic
    initial: float = 4096.0
    growth_steps: int = 2000
    minimum: float = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Training:
    """Length, batch and rhythm of a run."""

    batch_size: int = 64
    epochs: float | None = None  # give epochs or steps
    steps: int | None = None
    accumulation_steps: int = 1
    grad_clip_norm: float | None = 1.0
    loss: str = "softmax"  # softmax | sigmoid
    label_smoothing: float = 0.0
    ema: float | str | None = None  # decay of the average, or polyak: the plain mean since the warm-up
    evaluate_ema: bool = False
    steps_per_execution: int | None = None  # None: chosen from the number of steps
    jit: bool | None = None  # None: chosen for the device
    log_every: int | None = None  # steps; None: about a hundred lines a run
    evaluate_every: Duration | None = None  # None: every epoch, or so that about twenty fit into the run
    checkpoint_every: Duration | None = None  # None: at the end and when interrupted
    keep: int = 2  # newest checkpoints that stay
    keep_every: Duration | None = None  # and those of every so many steps, for good
    keep_best: bool = True  # and the one with the best validation accuracy, saved when it is reached
    save_weights: bool = False  # also the weights alone beside each checkpoint, averaged if evaluate_ema
    max_skipped: int = 50
    on_nonfinite: str = "stop"  # stop | rollback: to the last checkpoint, passing over the data up to the bad step
    max_rollbacks: int = 3
    seed: int = 0
    deterministic: bool = False
    check_numerics: bool = False
    # scalars | watch: also update ratios, trust ratios and attention logits | full: also histograms and pictures
    board: str = "scalars"
    profile: tuple[int, int] | None = None  # first and last step of a profiler window


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. `Config()` trains a small ViT on the embedded digits."""

    model: Model = dataclasses.field(default_factory=lambda: Model(**DIGITS_MODEL))
    data: Data = dataclasses.field(default_factory=lambda: Data(mixup=0.2))
    optimizer: Optimizer = dataclasses.field(default_factory=lambda: Optimizer(learning_rate=3e-3, weight_decay=0.05))
    schedule: Schedule = dataclasses.field(default_factory=lambda: Schedule(warmup="5%"))
    loss_scale: LossScale = dataclasses.field(default_factory=LossScale)
    training: Training = dataclasses.field(default_factory=lambda: Training(**DIGITS_TRAINING))
    precision: str = "float32"
    strategy: str = "auto"
    tpu: str | None = None
    virtual_devices: int | None = None  # parts to cut the CPU into, to try out several devices
    workers: tuple[str, ...] = ()  # host:port of each process of a run on several machines; the first one writes
    worker: int | None = None  # which of them this process is, from 0
    worker_timeout: float = 300.0  # seconds to wait for a worker at the start and wherever all meet
    mesh: str | None = None  # cores of one model copy, such as data=4,model=2
    shard: str = "none"  # over the data axis: none | state (moments, average, gradients) | full (weights too)
    resume: str = "auto"  # auto | never | a run's folder or checkpoint to continue from
    allow_config_change: bool = False  # continue although the learning rate, the batch, the data, ... differ
    workdir: str | None = None  # None: runs/<name of the config>
    init_from: str | None = None  # weight file to start from, or a run's folder or checkpoint
    init_allow: tuple[str, ...] = ()  # globs of parameters that may start afresh, such as head/*
    init_resize: str = "auto"  # kernel for position embeddings of another grid, see vit_tpu.load_weights


DIGITS_MODEL: dict[str, Any] = {
    "variant": "Ti/2", "image_size": 8, "pool": "gap", "width": 64, "depth": 4, "mlp_dim": 256, "num_heads": 4,
}  # fmt: skip
DIGITS_TRAINING: dict[str, Any] = {"epochs": 50.0, "ema": 0.98, "evaluate_ema": True}

SECTIONS: dict[str, Any] = {
    "model": Model, "data": Data, "optimizer": Optimizer, "schedule": Schedule, "loss_scale": LossScale,
    "training": Training,
}  # fmt: skip

RANGES: dict[str, tuple[float, float]] = {
    "data.mixup": (0.0, 100.0),
    "data.cutmix": (0.0, 100.0),
    "data.policy_layers": (1.0, 16.0),
    "data.policy_magnitude": (0.0, 30.0),
    "data.jitter": (0.0, 10.0),
    "data.erasing": (0.0, 1.0),
    "data.erasing_count": (1.0, 10.0),
    "data.repeats": (1.0, 64.0),
    "data.shift": (0.0, 10_000.0),
    "data.validation_fraction": (0.0, 0.9),
    "data.max_broken": (0.0, 1e18),
    "data.label_offset": (-(2.0**31), 2.0**31),
    "data.size": (1.0, 1e12),
    "data.classes": (1.0, 1e9),
    "optimizer.learning_rate": (0.0, 1e6),
    "training.grad_clip_norm": (1e-12, 1e12),
    "training.max_rollbacks": (0.0, 1e6),
    "training.seed": (0.0, 2.0**31 - 1),
    "virtual_devices": (1.0, 1024.0),
    "worker": (0.0, 65535.0),
    "worker_timeout": (1.0, 1e6),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.pool": ("tok", "gap", "map", "none"),
    "model.posemb": ("learn", "sincos2d"),
    "model.remat": ("none", "block"),
    "model.gelu": ("tanh", "erf"),
    "model.norm_position": ("before", "after"),
    "data.source": ("digits", "folder", "npz", "tfds", "tfrecord", "array_record", "manifest", "synthetic"),
    "data.exif": ("ignore", "apply"),
    "data.crop": ("resize", "inception"),
    "data.policy": ("none", "randaugment", "autoaugment", "three_augment"),
    "data.cache": ("auto", "none", "files", "pixels", "disk"),
    "optimizer.name": ("adamw", "lamb", "adafactor", "sgd"),
    "schedule.name": ("reciprocal_sqrt", "cosine", "linear", "constant"),
    "loss_scale.mode": ("auto", "off", "fixed", "dynamic"),
    "training.loss": ("softmax", "sigmoid"),
    "training.on_nonfinite": ("stop", "rollback"),
    "training.board": ("scalars", "watch", "full"),
    "shard": ("none", "state", "full"),
    "strategy": ("auto", "cpu", "gpu", "mirrored", "multi_worker", "tpu"),
}
