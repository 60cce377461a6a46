"""TensorFlow Addons' LAMB on a TensorFlow that Addons no longer supports (extra `addons`).

Addons 0.23, its last release, was built for TensorFlow 2.13 to 2.15: importing the package loads
compiled operations and Keras internals that are gone. Its LAMB needs neither, so that one module is
loaded by itself, on tf_keras' legacy optimizer. Use it to compare with, or to continue an old run;
`vit_tpu.optim.LAMB(decay_style="paper")` computes the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any, Union

import numpy as np
import tensorflow as tf
import tf_keras as keras

_PACKAGE = "tensorflow_addons"


def load_lamb() -> Any:
    """Returns the class `tensorflow_addons.optimizers.LAMB` (a legacy tf_keras optimizer).

    Nothing named tensorflow_addons stays imported, so a later `import tensorflow_addons` is not
    affected.

    Raises:
      ImportError: when Addons or its typeguard is not installed, with the command that helps.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "tensorflow-addons is not installed: pip install 'vit-tpu[addons]' (wheels exist for Python 3.9 to 3.11)."
        )
    root = list(spec.submodule_search_locations)[0]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_addons(name)}
    try:
        # Packages without their __init__, holding only what lamb.py asks of them.
        _stub(_PACKAGE, root)
        _stub(f"{_PACKAGE}.utils", f"{root}/utils")
        floats = Union[tf.Tensor, float, np.float16, np.float32, np.float64]  # noqa: UP007
        _stub(f"{_PACKAGE}.utils.types", None, FloatTensorLike=floats)
        legacy = keras.optimizers.legacy.Optimizer
        _stub(f"{_PACKAGE}.optimizers", f"{root}/optimizers", KerasLegacyOptimizer=legacy)
        lamb = importlib.import_module(f"{_PACKAGE}.optimizers.lamb").LAMB
    finally:
        for name in [name for name in sys.modules if _is_addons(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
    # Its own decorator registers with `tf.keras`, which is Keras 3 here.
    return keras.utils.register_keras_serializable(package="Addons", name="LAMB")(lamb)


def _is_addons(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


def _stub(name: str, path: str | None, **members: Any) -> None:
    module = types.ModuleType(name)
    if path is not None:
        module.__path__ = [path]
    for key, member in members.items():
        setattr(module, key, member)
    sys.modules[name] = module
