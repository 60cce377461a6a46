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

    source: str = "digits"  # digits | folder | npz | synthetic
    path: str | None = None
    channels: int | None = None  # None: as the source has them
    crop: str = "resize"  # resize | inception
    crop_area: tuple[float, float] = (0.05, 1.0)
    flip: bool = False
    shift: int = 0  # pixels of padding for a random shift
    mixup: float = 0.0
    in_memory: bool | None = None  # decode files once and keep them; None: if they fit into 1 GiB and crop is resize
    validation_fraction: float = 0.1  # of a class-folder tree without its own validation split
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
    ema: float | None = None
    evaluate_ema: bool = False
    steps_per_execution: int | None = None  # None: chosen from the number of steps
    jit: bool | None = None  # None: chosen for the device
    log_every: int | None = None  # steps; None: about a hundred lines a run
    evaluate_every: Duration | None = None  # None: every epoch, or so that about twenty fit into the run
    checkpoint_every: Duration | None = None  # None: at the end and when interrupted
    max_skipped: int = 50
    seed: int = 0
    deterministic: bool = False
    check_numerics: bool = False
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
    workdir: str | None = None  # None: runs/<name of the config>
    init_from: str | None = None  # weight file to start from
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
    "data.shift": (0.0, 10_000.0),
    "data.validation_fraction": (0.0, 0.9),
    "data.max_broken": (0.0, 1e18),
    "data.size": (1.0, 1e12),
    "data.classes": (1.0, 1e9),
    "optimizer.learning_rate": (0.0, 1e6),
    "training.grad_clip_norm": (1e-12, 1e12),
    "training.seed": (0.0, 2.0**31 - 1),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "data.source": ("digits", "folder", "npz", "synthetic"),
    "data.crop": ("resize", "inception"),
    "optimizer.name": ("adamw", "lamb", "adafactor", "sgd"),
    "schedule.name": ("reciprocal_sqrt", "cosine", "linear", "constant"),
    "loss_scale.mode": ("auto", "off", "fixed", "dynamic"),
    "training.loss": ("softmax", "sigmoid"),
    "strategy": ("auto", "cpu", "gpu", "mirrored", "tpu"),
}
