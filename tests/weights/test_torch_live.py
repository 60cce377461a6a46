"""Exported models run by PyTorch itself: timm's and transformers' outputs equal ours.

Needs torch, timm and transformers in this Python, or the path of a Python that has them in VIT_TPU_TORCH_PYTHON:
skipped otherwise (the stored references of test_torch_families.py cover the same names and arithmetic).
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from weights_helpers import build, images

from vit_tpu.weights import save_weights

SCRIPT = pathlib.Path(__file__).parents[1] / "data" / "weights" / "make_references.py"
HERE = all(importlib.util.find_spec(name) for name in ("torch", "timm", "transformers"))
PYTHON = os.environ.get("VIT_TPU_TORCH_PYTHON") or (sys.executable if HERE else None)
CASES = {
    "timm_tok": {"pool": "tok"},
    "timm_avg": {"pool": "gap"},
    "timm_avg_after": {"pool": "gap", "norm_position": "after"},
    "timm_map": {"pool": "map"},
    "timm_map_wide": {"pool": "map", "image_size": (8, 24)},
    "timm_registers": {"pool": "tok", "registers": 3, "layer_scale": 0.1},
    "timm_gap_registers": {"pool": "gap", "registers": 3},
    "timm_erf": {"pool": "tok", "gelu": "erf", "num_classes": 0},
    "timm_sincos": {"pool": "map", "posemb": "sincos2d"},
    "timm_scan": {"pool": "tok", "scan": True},
    "hf_vit": {"pool": "tok", "epsilon": 1e-12},
    "hf_vit_pooler": {"pool": "tok", "num_classes": 0, "representation_size": 8},
    "hf_dinov2": {"pool": "tok", "layer_scale": 0.1, "num_classes": 0},
    "hf_dinov2_registers": {"pool": "tok", "registers": 3, "layer_scale": 0.1, "num_classes": 0},
    "hf_dinov2_classifier": {"pool": "tok", "registers": 3, "layer_scale": 0.1},
    "hf_siglip": {"pool": "map", "num_classes": 0},
    "hf_siglip_classifier": {"pool": "gap"},
}


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="torch, timm and transformers are not here (VIT_TPU_TORCH_PYTHON)")
def test_pytorch_computes_our_outputs_from_exported_models(tmp_path):
    for seed, (name, settings) in enumerate(CASES.items()):
        model = build(seed=seed, **settings)
        save_weights(model, str(tmp_path / name), format="timm" if name.startswith("timm") else "huggingface")
        x = images(settings.get("image_size", 16))
        np.savez(tmp_path / name / "expected.npz", images=x, output=model(x).numpy())
    out = subprocess.run([PYTHON, str(SCRIPT), "check", str(tmp_path)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    differences = json.loads(out.stdout.splitlines()[-1])
    assert differences.keys() == CASES.keys()
    assert {name: d for name, d in differences.items() if not d < 2e-5} == {}
