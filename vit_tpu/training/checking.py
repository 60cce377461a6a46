"""`--check_numerics` without XLA: TensorFlow's own check of every operation, which names the first that went wrong."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from vit_tpu.models.guard import NonFiniteError
from vit_tpu.optim import LossScale
from vit_tpu.settings import Config


def possible(config: Config, model: Any) -> bool:
    """Whether the check of every operation is asked for and can be used: not compiled, no scale that may overflow."""
    return config.training.check_numerics and not model.jit and not _tries_out(model)


def sentence(config: Config, model: Any) -> str:
    """Returns what the start of a run says about how numbers are checked, to follow what it says of the precision."""
    if not config.training.check_numerics:
        return ""
    if _tries_out(model):
        return ", stops at the first loss that is not finite (gradients may overflow: the loss scale is dynamic)"
    if possible(config, model):
        return ", every operation checked for NaN (slow)"
    return ", stops at the first gradient that is not finite"


def _tries_out(model: Any) -> bool:
    return isinstance(model.optimizer, LossScale) and model.optimizer.dynamic


@contextlib.contextmanager
def every_operation(model: Any, wanted: bool) -> Iterator[None]:
    """Inside, an operation whose result is not finite stops the execution.

    TensorFlow checks beside the step, not before its updates; a loss or gradient that is not finite changes no weight
    all the same, since the step looks at them itself.

    Raises:
      NonFiniteError: with the operation's name; the model's counters then say which step it was, as after a compiled
        step.
    """
    if not wanted:
        yield
        return
    tf.debugging.enable_check_numerics()
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        text = str(error)
        if not re.search(r"!!! Detected|Tensor had [-+]?(NaN|Inf)", text):
            raise
        counters = model.counters.values()
        bad = counters["bad_step"] or counters["steps"] + 1
        if not counters["bad_step"]:  # the check was faster than the step
            model.counters.steps.assign(bad)
            model.counters.bad_step.assign(bad)
        found = text[text.find("!!! Detected") :] if "!!! Detected" in text else text
        told = " ".join(found.split("Graph name")[0].split())[:600]
        raise NonFiniteError(f"step {bad} is not finite; check_numerics: {told}") from error
    finally:
        tf.debugging.disable_check_numerics()
