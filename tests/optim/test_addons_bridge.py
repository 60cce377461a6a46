"""Addons' LAMB is optional, loaded alone, and never imported by the package itself."""

import importlib.util
import pathlib
import re
import sys

import pytest
import tf_keras as keras

import vit_tpu.optim
from vit_tpu.optim import addons_bridge


def test_nothing_else_mentions_addons_or_official():
    folder = pathlib.Path(vit_tpu.optim.__file__).parent
    for path in folder.glob("*.py"):
        imports = re.findall(r"^\s*(?:import|from)\s+(\w+)", path.read_text(), re.MULTILINE)
        assert not {"tensorflow_addons", "official", "jax", "optax"} & set(imports), path


def test_missing_addons_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'vit-tpu\[addons\]'"):
        addons_bridge.load_lamb()


def test_loading_leaves_no_half_imported_package():
    if importlib.util.find_spec("tensorflow_addons") is None:
        pytest.skip("the extra `addons` is not installed")
    lamb = addons_bridge.load_lamb()
    assert issubclass(lamb, keras.optimizers.legacy.Optimizer)
    assert not [name for name in sys.modules if name.startswith("tensorflow_addons")]
    config = keras.optimizers.serialize(lamb(0.5, exclude_from_weight_decay=["bias"]))
    again = keras.optimizers.deserialize(config)
    assert type(again) is lamb and again.exclude_from_weight_decay == ["bias"]
