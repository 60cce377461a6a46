"""What happens to a training image between the crop and the batch, as one plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from vit_tpu.data import augment, policies
from vit_tpu.errors import UserError


@dataclass(frozen=True)
class Variation:
    """Flip -> shift -> policy -> colour jitter -> random erasing, each a function of the record's key.

    Attributes:
      flip: mirror every other image, at random.
      shift: pixels of padding for a random crop of the finished image (4 is usual for CIFAR).
      policy: "none", "randaugment", "autoaugment" or "three_augment", see `policies.make_policy`.
      policy_layers, policy_magnitude: RandAugment's N and M.
      jitter: strength of the colour jitter (0.3 in DeiT III), 0 for none.
      erasing: probability of random erasing (0.25 is usual).
      erasing_count: how many boxes it fills.
    """

    flip: bool = False
    shift: int = 0
    policy: str = "none"
    policy_layers: int = 2
    policy_magnitude: float = 10.0
    jitter: float = 0.0
    erasing: float = 0.0
    erasing_count: int = 1

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise UserError(f"shift is {self.shift}: use 0 or more pixels")
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise UserError(f"jitter is {self.jitter}: use 0 for none, or a strength such as 0.3")
        if not 0 <= self.erasing <= 1:
            raise UserError(f"erasing is {self.erasing}: it is a probability, use 0 to 1")
        if not 1 <= self.erasing_count <= 10:
            raise UserError(f"erasing_count is {self.erasing_count}: use 1 to 10 boxes")

    @property
    def needs_records(self) -> bool:
        """True for what is done to one record at a time, not to a batch at once."""
        return self.policy != "none" or self.jitter > 0 or self.erasing > 0


def of_one(plan: Variation, size: tuple[int, int]) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the function (image uint8 [*size, C], key uint64 scalar) -> the varied image."""
    distort = None
    if plan.policy != "none":
        distort = policies.make_policy(plan.policy, size, plan.policy_layers, plan.policy_magnitude)

    def vary(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        if plan.flip:
            image = augment.flip_one(image, key)
        image = augment.shift_one(image, key, plan.shift)
        if distort is not None:
            image = distort(image, key)
        if plan.jitter:
            image = augment.jitter(image, key, plan.jitter)
        if plan.erasing:
            image = augment.erase(image, key, plan.erasing, plan.erasing_count)
        return image

    return vary


def of_batch(plan: Variation, images: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns uint8 [B, H, W, C] flipped and shifted as `of_one` does it; key uint64 [B]."""
    if plan.flip:
        images = augment.random_flip(images, key)
    return augment.random_shift(images, key, plan.shift)
