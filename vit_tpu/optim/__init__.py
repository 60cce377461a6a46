"""Optimizers, schedules, parameter groups, loss scale and weight averaging."""

from vit_tpu.optim import decay, loss_scale, schedules
from vit_tpu.optim.adafactor import Adafactor
from vit_tpu.optim.adamw import AdamW
from vit_tpu.optim.base import GroupedOptimizer
from vit_tpu.optim.build import build, state_bytes
from vit_tpu.optim.decay import Group, Parameter
from vit_tpu.optim.ema import Ema
from vit_tpu.optim.lamb import LAMB
from vit_tpu.optim.loss_scale import LossScale
from vit_tpu.optim.sgd import SGD

__all__ = [
    "LAMB",
    "SGD",
    "AdamW",
    "Adafactor",
    "Ema",
    "Group",
    "GroupedOptimizer",
    "LossScale",
    "Parameter",
    "build",
    "decay",
    "loss_scale",
    "schedules",
    "state_bytes",
]
