"""What a log line says beyond loss, accuracy and speed: memory, how far the weights move, trust ratios, attention.

A gauge is called with the step at every log line, when the device has been waited for already, and returns numbers by
name; what it cannot know is left out. Some also watch what they measure and say so when it goes wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from vit_tpu.data.source import Source
from vit_tpu.diagnose import shortage
from vit_tpu.models import watch
from vit_tpu.settings import Config
from vit_tpu.training import inputs

Gauge = Callable[[int], Mapping[str, float]]
GIB = 2.0**30
LARGE_LOGIT = 1e4  # from here on runs diverge (arXiv 2309.14322, figure 2; arXiv 2302.05442 saw 5e4 just before)


PROBED = 8  # validation images whose attention logits are looked at


def of_run(config: Config, model: Any, validation: Source, say: Callable[[str], None], total_steps: int) -> list[Gauge]:
    """Returns the gauges that a run's `training.board` asks for.

    Args:
      config, model: of the run.
      validation: a few of its images go through the model at each line, for board=watch and full.
      say: where to print warnings.
      total_steps: of the run.
    """
    found: list[Gauge] = [Memory(say, total_steps)]
    if config.training.board == "scalars":
        return found
    found.append(Movement(model))
    if getattr(model.inner_optimizer, "record_trust_ratios", False):
        found.append(TrustRatios(model))
    images, _ = inputs.sample(config, validation, PROBED)
    return [*found, AttentionLogits(model, images, say)]


def resident_bytes() -> int | None:
    """Returns the memory that this process holds, or None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def device_bytes() -> tuple[int, int] | None:
    """Returns bytes in use and their peak on the fullest accelerator, or None where no device reports them."""
    found = []
    for kind in ("GPU", "TPU"):
        for device in tf.config.list_logical_devices(kind):
            try:
                info = tf.config.experimental.get_memory_info(device.name)
            except (ValueError, NotImplementedError, tf.errors.OpError):
                continue
            found.append((int(info["current"]), int(info["peak"])))
    return max(found, key=lambda pair: pair[1], default=None)


class Memory:
    """Memory of the host and of the fullest device; says so when the host's grows steadily.

    Args:
      say: where to print.
      total_steps: of the run, or None.
      limit: bytes of the host.
      resident: gives the bytes in use.

    Attributes:
      grown: the sentence about a leak, once there is one.
    """

    def __init__(
        self, say: Callable[[str], None] = print, total_steps: int | None = None, *, limit: int | None = None,
        resident: Callable[[], int | None] = resident_bytes,
    ):  # fmt: skip
        self.say, self.total_steps, self.resident = say, total_steps, resident
        self.limit = shortage.of_host() if limit is None else limit
        self.seen: list[tuple[int, int]] = []
        self.grown: str | None = None
        self.said = 0

    def __call__(self, step: int) -> dict[str, float]:
        values, used, device = {}, self.resident(), device_bytes()
        if used is not None:
            values["memory/host_gib"] = used / GIB
            self._watch(step, used)
        if device is not None:
            values["memory/device_gib"], values["memory/device_peak_gib"] = device[0] / GIB, device[1] / GIB
        return values

    def _watch(self, step: int, used: int) -> None:
        if self.seen and step <= self.seen[-1][0]:  # the run went back
            self.seen.clear()
        self.seen.append((step, used))
        if len(self.seen) > 256:
            del self.seen[1::2]
        found = growth(self.seen)
        if found is None or used < 1.5 * self.said:
            return
        (first, low), rate = found
        text = (
            f"host memory grows steadily: {low / GIB:.2f} GiB at step {first:,}, {used / GIB:.2f} GiB at step "
            f"{step:,}, {rate / 2**20:,.3g} MiB a step"
        )
        if self.limit:
            full = step + max(self.limit - used, 0) / rate
            ends = self.total_steps is not None and full > self.total_steps
            text += f"; the host's {self.limit / GIB:.1f} GiB " + (
                "last to the end of the run" if ends else f"are full at about step {full:,.0f}"
            )
        self.said, self.grown = used, text
        self.say(
            f"WARNING: {text}. Something keeps what it should let go: a callback or a data function that collects "
            "tensors, or tf.function called with ever new Python values"
        )


def growth(
    seen: Sequence[tuple[int, int]], blocks: int = 8, at_least: float = 2.0**27
) -> tuple[tuple[int, int], float] | None:
    """Returns where steady growth began and bytes a step, or None if memory does not grow steadily.

    Growth is steady if the least use in each eighth of the later three quarters of the run is above that of the eighth
    before, if no eighth adds more than a third of it all (buffers and caches that fill add most of theirs at once), and
    if it comes to 128 MiB and a twentieth of what is used.

    Args:
      seen: (step, bytes) in order.
      blocks: how many parts are compared.
      at_least: bytes.
    """
    later = list(seen[len(seen) // 4 :])
    if len(later) < 2 * blocks:
        return None
    parts = [later[len(later) * i // blocks : len(later) * (i + 1) // blocks] for i in range(blocks)]
    lows = [min(part, key=lambda pair: pair[1]) for part in parts]
    rises = np.diff([used for _, used in lows])
    total = float(rises.sum())
    if (rises <= 0).any() or rises.max() > total / 3 or total < max(at_least, 0.05 * lows[-1][1]):
        return None
    return lows[0], total / (lows[-1][0] - lows[0][0])


class Movement:
    """How far the last applied update moved each group, as a share of its length: `update_ratio/<group>`.

    Args:
      model: compiled with record_updates=True.
    """

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, step: int) -> dict[str, float]:
        ratios = self.model.movement.ratios(self.model.groups)
        return {f"update_ratio/{group}": ratio for group, ratio in ratios.items()}


class TrustRatios:
    """Smallest, middle and largest trust ratio of each group that has them: `trust_ratio/<group>/min`, ...

    Args:
      model: whose optimizer records them.
    """

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, step: int) -> dict[str, float]:
        ratios, values = self.model.inner_optimizer.trust_ratios(), {}
        for group in self.model.groups:
            members = [np.ravel(ratios[path]) for path in group.paths if path in ratios]
            if members:
                every = np.concatenate(members)
                for name, function in (("min", np.min), ("median", np.median), ("max", np.max)):
                    values[f"trust_ratio/{group.name}/{name}"] = float(function(every))
        return values


class AttentionLogits:
    """The largest attention logit of all layers on a few images: `attention/max_logit`; says so when it is too large.

    Not in the training step, which would keep them from being fused away: a forward pass of its own over the same few
    validation images at each log line, in the run's precision.

    Args:
      model: a ViT.
      images: uint8 [n, H, W, C].
      say: where to print.
    """

    def __init__(self, model: Any, images: np.ndarray, say: Callable[[str], None] = print):
        self.model, self.say, self.said = model, say, 0.0
        self.count = len(images)
        self.images = tf.constant(images.astype(np.float32) / 127.5 - 1)
        self.layers: list[str] = []
        self.largest = tf.function(self._largest, autograph=False)

    def prepare(self) -> None:
        """Traces the function, which the first call would."""
        self.largest(self.images)

    def _largest(self, images: tf.Tensor) -> tf.Tensor:
        found = watch.max_attention_logits(self.model, images)
        self.layers = list(found)
        return tf.stack(list(found.values()))

    def __call__(self, step: int) -> dict[str, float]:
        values = self.largest(self.images).numpy()
        # Not a number is the largest of all.
        place = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
        value, layer = float(values[place]), self.layers[place]
        if self.said < np.inf and not value <= max(LARGE_LOGIT, 2 * self.said):
            self.said = value if np.isfinite(value) else np.inf
            self.say(
                f"WARNING: step {step:,}: an attention logit of {layer} is {value:.3g} on {self.count} validation "
                "images: its softmax looks at one token alone and passes no gradient, which is how training diverges. "
                "Lower the learning rate, lengthen the warm-up, or raise the weight decay"
            )
        each = {f"attention/{name.removesuffix('/attention')}": float(v) for name, v in zip(self.layers, values)}
        return {"attention/max_logit": value, **each}
