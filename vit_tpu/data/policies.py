"""RandAugment, AutoAugment and three-augment: which operations, how often and how strong, as data.

The pixel operations are tf-models-official's (`official.vision.ops.augment`). What they draw from
TensorFlow's global generator (the choice, the sign, the place of the cutout, the width of the
blur) comes from the record's key here, so a policy is a function of (seed, epoch, index).

Four things differ from `official`, on purpose: Solarize at level 10 leaves the image alone, as in
the papers (there its threshold, 256, wraps round to 0 and inverts everything); shifts and cutouts
are in proportion to the image, so that small images are not moved out of sight; AutoAugment's
shifts are RandAugment's (there up to 225 pixels, an empty picture at 224); the blur of
three-augment is DeiT III's, drawn for each image (there once in a run).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data import keys, preprocess
from vit_tpu.errors import UserError, nearest

POLICIES = ("randaugment", "autoaugment", "three_augment")
MAX_LEVEL = 10.0
TRANSLATE, CUTOUT = 100 / 224, 40 / 224  # share of the image's side at level 10

Step = tuple[str, float, float]  # operation, probability, level 0..10
Distort = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

RANDAUGMENT_OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness",
    "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd", "Identity",
)  # fmt: skip
# Touvron et al., "DeiT III: revenge of the ViT", 2022, section 3.
THREE_AUGMENT: tuple[tuple[Step, ...], ...] = (
    (("Grayscale", 1.0, 0.0),), (("Solarize", 1.0, 5.0),), (("Blur", 1.0, 0.0),),
)  # fmt: skip
BLUR_SIGMA = (0.1, 2.0)
_BLUR_RADIUS = 6

# Streams of `keys`, a hundred for each step of a policy: clear of those in `augment`.
_FIRST_STREAM = 1000
_CHOICE, _APPLY, _SIGN, _ROW, _COLUMN, _SIGMA = range(6)


def make_policy(name: str, size: tuple[int, int], layers: int = 2, magnitude: float = 10.0) -> Distort:
    """Returns the function (image uint8 [H, W, 1 or 3], key uint64 scalar) -> uint8 of the same shape.

    Args:
      name: "randaugment" (Cubuk et al., arXiv:1909.13719: `layers` operations in a row, each one of
        16 or none, all at `magnitude`), "autoaugment" (arXiv:1805.09501, the 25 pairs of policy v0)
        or "three_augment" (arXiv:2204.07118: grey, solarize or blur).
      size: (H, W) of the images.
      layers: RandAugment's N, at least 1.
      magnitude: RandAugment's M; 0 to 10 is the papers' scale, big_vision goes to 20.

    Raises:
      UserError: for an unknown name or numbers out of range.
    """
    if name not in POLICIES:
        raise UserError(f'policy is "{name}": use {", ".join(POLICIES)} or none{nearest(name, POLICIES)}')
    if layers < 1 or not 0 <= magnitude <= 30:
        raise UserError(f"RandAugment with {layers} layers of magnitude {magnitude}: use 1 or more, and 0 to 30")
    table, rounds = _table(name, layers, magnitude)
    # Branches are told apart by what they do, so that each is traced once however often it occurs.
    branches = sorted({(op, _argument(op, level, size)) for row in table for op, _, level in row}, key=str)
    place = {branch: number for number, branch in enumerate(branches)}
    steps = max(len(row) for row in table)
    padded = [[*row, *[row[-1][:1] + (0.0, row[-1][2])] * (steps - len(row))] for row in table]
    chosen = np.array([[place[op, _argument(op, level, size)] for op, _, level in row] for row in padded], np.int32)
    shares = np.array([[probability for _, probability, _ in row] for row in padded], np.float32)
    functions = [functools.partial(_operation(op), argument) for op, argument in branches]

    def one(image: tf.Tensor, key: tf.Tensor, row: tf.Tensor, step: int, stream: tf.Tensor) -> tf.Tensor:
        number = tf.gather(tf.constant(chosen[:, step]), row)
        share = tf.gather(tf.constant(shares[:, step]), row)
        number = tf.where(keys.uniform(key, stream + _APPLY) < share, number, len(functions))
        calls = [lambda f=f: tf.ensure_shape(f(image, Draws(key, stream)), image.shape) for f in functions]
        return tf.switch_case(number, [*calls, lambda: image])

    spec = tf.TensorSpec([*size, 3], tf.uint8), tf.TensorSpec([], tf.uint64), tf.TensorSpec([], tf.int32)

    # Traced once for all rounds: sixteen operations are a large graph.
    @tf.function(input_signature=spec, autograph=False)
    def play(image: tf.Tensor, key: tf.Tensor, stream: tf.Tensor) -> tf.Tensor:
        row = keys.integer(key, stream + _CHOICE, len(table))
        for step in range(steps):
            image = one(image, key, row, step, stream + 10 * step)
        return image

    def distort(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        channels = image.shape[-1]
        image = tf.ensure_shape(preprocess.to_channels(image, 3), [*size, 3])
        for number in range(rounds):
            image = play(image, key, tf.constant(_FIRST_STREAM + 100 * number, tf.int32))
        return preprocess.to_channels(tf.ensure_shape(image, [*size, 3]), channels)

    return distort


class Draws:
    """The random numbers of one step of a policy for one record, each a function of its key."""

    def __init__(self, key: tf.Tensor, stream: tf.Tensor) -> None:
        self.key, self.stream = key, stream

    def uniform(self, number: int) -> tf.Tensor:
        return keys.uniform(self.key, self.stream + number)

    def sign(self) -> tf.Tensor:
        return tf.where(self.uniform(_SIGN) < 0.5, 1.0, -1.0)


def _table(name: str, layers: int, magnitude: float) -> tuple[list[tuple[Step, ...]], int]:
    """Returns the rows of a policy, one of which is drawn, and how often one is drawn."""
    if name == "randaugment":
        return [((op, 1.0, float(magnitude)),) for op in RANDAUGMENT_OPERATIONS], layers
    if name == "three_augment":
        return list(THREE_AUGMENT), 1
    return [tuple(map(tuple, row)) for row in _official().AutoAugment.policy_v0()], 1


def _official() -> Any:
    from official.vision.ops import augment  # slow to import, so only when a policy is used

    return augment


def _argument(op: str, level: float, size: tuple[int, int]) -> float:
    """Returns what `level` means for an operation, by the formulas of `official`; the sign is drawn later."""
    share = level / MAX_LEVEL
    return {
        "Rotate": share * 30.0,  # degrees
        "Posterize": min(int(share * 4), 8),  # bits kept
        "Solarize": int(share * 256),  # from this value on, pixels are inverted
        "SolarizeAdd": int(share * 110),  # added to dark pixels
        "Color": share * 1.8 + 0.1, "Contrast": share * 1.8 + 0.1,
        "Brightness": share * 1.8 + 0.1, "Sharpness": share * 1.8 + 0.1,
        "ShearX": share * 0.3, "ShearY": share * 0.3,
        "TranslateX": share * TRANSLATE * size[1], "TranslateY": share * TRANSLATE * size[0],
        "Cutout": int(share * CUTOUT * min(size)),  # half a side
    }.get(op, 0.0)  # fmt: skip


def _operation(op: str) -> Callable[[float, tf.Tensor, Draws], tf.Tensor]:
    """Returns the function (argument, image, draws) -> image of an operation by its name."""
    official = _official()

    def solarize(argument: float, image: tf.Tensor, draws: Draws) -> tf.Tensor:
        return image if argument > 255 else official.solarize(image, int(argument))

    # `official` adds a channel to find the pixels that come from outside, but its transform reflects
    # the image there and finds none: the transform alone gives the same pixels in less time.
    def shear(matrix: Callable[[tf.Tensor], list[Any]]) -> Callable[[float, tf.Tensor, Draws], tf.Tensor]:
        return lambda argument, image, draws: official.transform(image, tf.stack(matrix(argument * draws.sign())))

    special: dict[str, Callable[[float, tf.Tensor, Draws], tf.Tensor]] = {
        "Solarize": solarize,
        "SolarizeAdd": lambda argument, image, draws: official.solarize_add(image, int(argument)),
        "Posterize": lambda argument, image, draws: official.posterize(image, int(argument)),
        "Rotate": lambda argument, image, draws: official.rotate(image, argument * draws.sign()),
        "TranslateX": lambda argument, image, draws: official.translate(image, [-argument * draws.sign(), 0.0]),
        "TranslateY": lambda argument, image, draws: official.translate(image, [0.0, -argument * draws.sign()]),
        "ShearX": shear(lambda level: [1.0, level, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        "ShearY": shear(lambda level: [1.0, 0.0, 0.0, level, 1.0, 0.0, 0.0, 0.0]),
        "Cutout": lambda argument, image, draws: cutout(
            image, int(argument), draws.uniform(_ROW), draws.uniform(_COLUMN)
        ),
        "Blur": lambda argument, image, draws: blur(
            image, BLUR_SIGMA[0] + draws.uniform(_SIGMA) * (BLUR_SIGMA[1] - BLUR_SIGMA[0])
        ),
        "Identity": lambda argument, image, draws: image,
    }  # fmt: skip
    if op in special:
        return special[op]
    function = official.NAME_TO_FUNC[op]
    if op in ("Color", "Contrast", "Brightness", "Sharpness"):
        return lambda argument, image, draws: function(image, argument)
    return lambda argument, image, draws: function(image)


def cutout(image: tf.Tensor, half: int, row: tf.Tensor, column: tf.Tensor) -> tf.Tensor:
    """Greys (128) the square of side 2 `half` round a point of uint8 [H, W, C]; row, column in [0, 1)."""
    height, width = image.shape[0], image.shape[1]
    centre_row = tf.cast(row * height, tf.int32)
    centre_column = tf.cast(column * width, tf.int32)
    rows, columns = tf.range(height), tf.range(width)
    down = (rows >= centre_row - half) & (rows < centre_row + half)
    across = (columns >= centre_column - half) & (columns < centre_column + half)
    inside = down[:, None, None] & across[None, :, None]
    return tf.where(inside, tf.constant(128, tf.uint8), image)


def blur(image: tf.Tensor, sigma: tf.Tensor) -> tf.Tensor:
    """Blurs uint8 [H, W, C] with a Gaussian of `sigma` pixels (float32 scalar, up to 2), edges repeated."""
    offsets = tf.range(-_BLUR_RADIUS, _BLUR_RADIUS + 1, dtype=tf.float32)
    weights = tf.nn.softmax(-(offsets**2) / (2.0 * sigma**2))
    height, width = image.shape[0], image.shape[1]
    rows = tf.clip_by_value(tf.range(-_BLUR_RADIUS, height + _BLUR_RADIUS), 0, height - 1)
    columns = tf.clip_by_value(tf.range(-_BLUR_RADIUS, width + _BLUR_RADIUS), 0, width - 1)
    around = tf.gather(tf.gather(tf.cast(image, tf.float32), rows), columns, axis=1)
    # Channels stand in the batch: a depthwise convolution of three is slower on a CPU.
    planes = tf.transpose(around, [2, 0, 1])[..., None]
    planes = tf.nn.conv2d(planes, weights[:, None, None, None], 1, "VALID")
    planes = tf.nn.conv2d(planes, weights[None, :, None, None], 1, "VALID")
    return tf.cast(tf.round(tf.transpose(planes[..., 0], [1, 2, 0])), tf.uint8)
