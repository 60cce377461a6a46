"""Optimizers by name, and the bytes of their state."""

import json
import math

import numpy as np
import pytest
from optim_helpers import list_parameters

from vit_tpu.errors import UserError
from vit_tpu.optim import LAMB, SGD, Adafactor, AdamW, build, state_bytes
from vit_tpu.optim.build import OPTIMIZERS
from vit_tpu.optim.decay import resolve


def vit_shapes(width, depth, mlp, heads, patch, classes, tokens, scan=False):
    """Shapes of a ViT with learned positions, a MAP head and a classifier; scan stacks blocks."""
    size = width // heads

    def attention():
        return [(width, heads, size), (heads, size)] * 3 + [(heads, size, width), (width,)]

    def block_mlp():
        return [(width, mlp), (mlp,), (mlp, width), (width,)]

    shapes = [(patch, patch, 3, width), (width,), (1, tokens, width)]
    block = [(width,)] * 4 + attention() + block_mlp()
    shapes += [(depth, *shape) for shape in block] if scan else block * depth
    shapes += [(width,)] * 2
    shapes += [(1, 1, width)] + attention() + [(width,)] * 2 + block_mlp()
    return shapes + [(width, classes), (classes,)]


VARIANTS = {
    "B/16": (768, 12, 3072, 12, 16, 29593, 196),
    "g/14": (1408, 40, 6144, 16, 14, 29593, 256),
    "G/14": (1664, 48, 8192, 16, 14, 29593, 256),
}
OURS = {
    "adafactor": ("adafactor", {}),
    "adam": ("adamw", {}),
    "adam_bf16": ("adamw", {"momentum_dtype": "bfloat16"}),
    "momentum_hp": ("sgd", {"momentum": 0.9, "momentum_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", OURS)
def test_state_bytes_equal_the_papers_code_to_the_byte(refs, variant, kind):
    # Recorded with stacked blocks, which big_vision factors as any array: so do bare shapes here.
    recorded = refs("optstate_bytes.json")[variant]
    name, options = OURS[kind]
    found = state_bytes(name, vit_shapes(*VARIANTS[variant], scan=True), **options)
    assert found["parameters"] == recorded["params"][0]
    assert found["total"] == recorded[kind][0]
    assert found["total"] / found["parameters"] == pytest.approx(recorded[kind][2], abs=1e-4)


def test_adafactor_of_separate_blocks_keeps_half_of_the_parameters():
    # Norms and biases of one block are vectors, so not factored: 0.06 % more than stacked ones.
    found = state_bytes("adafactor", vit_shapes(*VARIANTS["G/14"]))
    assert found["total"] / found["parameters"] == pytest.approx(0.5045, abs=1e-4)


def test_what_bfloat16_momentum_saves_with_lamb():
    shapes = vit_shapes(*VARIANTS["G/14"])
    full, half = (state_bytes("lamb", shapes, momentum_dtype=d) for d in ("float32", "bfloat16"))
    assert half["total"] / full["total"] == pytest.approx(0.75)
    with_weights = (half["parameters"] + half["total"]) / (full["parameters"] + full["total"])
    assert with_weights == pytest.approx(5 / 6)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lamb", {"momentum_dtype": "bfloat16"}),
        ("adafactor", {}),
        ("adamw", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {}),
    ],
)
def test_allocated_bytes_are_those_of_the_real_variables(name, options, stacked):
    parameters = list_parameters(depth=34, stacked=stacked)
    optimizer = build(name, 0.1, **options)
    optimizer.assign_groups(resolve(parameters))
    optimizer.build([p.variable for p in parameters])
    real = sum(v.dtype.size * math.prod(v.shape) for v in optimizer.variables)
    assert state_bytes(optimizer, parameters)["allocated"] == real
    assert state_bytes(name, parameters, **options)["allocated"] == real


def test_builds_each_by_name_with_its_options():
    kinds = {"lamb": LAMB, "adafactor": Adafactor, "adamw": AdamW, "sgd": SGD}
    assert kinds == OPTIMIZERS
    for name, kind in kinds.items():
        optimizer = build(name.upper(), 0.5, weight_decay=0.1, head_weight_decay=1.0)
        assert type(optimizer) is kind
        assert np.isclose(float(optimizer.learning_rate), 0.5)
        assert json.dumps(optimizer.get_config(), default=str)
    assert build("lamb", 0.1, decay_style="paper").decay_style == "paper"


def test_wrong_names_and_options_get_the_nearest():
    with pytest.raises(UserError, match='did you mean "adamw"'):
        build("adam", 0.1)
    with pytest.raises(UserError, match='no option "decay_stile".*did you mean "decay_style"'):
        build("lamb", 0.1, decay_stile="paper")
    with pytest.raises(UserError, match='"adamw" has no option "decay_style"'):
        build("adamw", 0.1, decay_style="paper")
