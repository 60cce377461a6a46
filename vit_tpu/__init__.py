"""Vision Transformers in TensorFlow: train, plan, convert. The names below load on first use."""

from __future__ import annotations

import importlib
import os
from typing import Any

# TensorFlow's C++ start-up notes would hide ours; whoever wants them sets the variable. Without an NVIDIA driver the
# complaints about CUDA, which are logged as errors, are of no use either.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if os.path.exists("/dev/nvidiactl") else "3")

from vit_tpu import precision
from vit_tpu._version import __version__
from vit_tpu.errors import UserError

_PUBLIC = {
    "Config": "settings", "load_config": "config", "ViT": "models.vit", "run": "training.run",
    "Summary": "training.run", "callbacks": "training.callbacks", "load_weights": "weights",
    "save_weights": "weights", "load_trained": "evaluation.loading", "judge_features": "evaluation.report",
    "export_model": "exporting.artefact", "LoadReport": "weights", "make_plan": "tpu.planner", "Plan": "tpu.planner",
}  # fmt: skip
_MODULES = ("evaluate", "losses", "metrics", "models", "optim", "predict")

__all__ = ["UserError", "__version__", "precision", *_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"vit_tpu.{_PUBLIC[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"vit_tpu.{name}")
    raise AttributeError(f"module vit_tpu has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
