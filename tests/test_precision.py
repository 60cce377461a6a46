"""The policy scope restores, the names are checked, the advice follows the hardware."""

import subprocess
import sys

import pytest
import tf_keras as keras

import vit_tpu.precision as precision
from vit_tpu.errors import UserError


def current():
    return keras.mixed_precision.global_policy().name


@pytest.mark.parametrize("policy", precision.POLICIES)
def test_the_policy_holds_inside_and_not_after(policy):
    with precision(policy):
        assert current() == policy
        assert keras.layers.Dense(1).dtype_policy.name == policy
    assert keras.layers.Dense(1).dtype_policy.name == "float32"


def test_scopes_nest():
    with precision.scope("mixed_bfloat16"):
        with precision.scope("mixed_float16"):
            assert current() == "mixed_float16"
        assert current() == "mixed_bfloat16"
    assert current() == "float32"


def test_the_policy_is_restored_after_an_exception():
    with pytest.raises(ZeroDivisionError), precision("mixed_float16"):
        1 / 0  # noqa: B018
    assert current() == "float32"


def test_a_model_keeps_its_policy_and_leaves_none_behind():
    from vit_tpu.models.vit import ViT

    with precision("mixed_bfloat16"):
        model = ViT("mu/16", image_size=32, num_classes=2)
    assert keras.layers.Dense(1).dtype_policy.name == "float32"
    assert model.blocks[0].attention.compute_dtype == "bfloat16"
    assert model.norm.compute_dtype == "float32"


def test_importing_leaves_the_policy_alone():
    code = (
        "import tf_keras; tf_keras.mixed_precision.set_global_policy('mixed_float16');"
        "import vit_tpu, vit_tpu.models.vit, vit_tpu.optim; print(tf_keras.mixed_precision.global_policy().name)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "mixed_float16"


@pytest.mark.parametrize(
    "name, words",
    [
        ("bfloat16", 'use "mixed_bfloat16"'),
        ("float16", 'use "mixed_float16"'),
        ("mixed_bfloat", 'did you mean "mixed_bfloat16"'),
        ("float64", "choose one of float32, mixed_bfloat16, mixed_float16"),
        ("", "unknown precision"),
    ],
)
def test_other_names_are_refused_in_one_sentence(name, words):
    with pytest.raises(UserError, match=words) as caught, precision(name):
        pass
    assert "\n" not in str(caught.value)
    assert current() == "float32"


@pytest.mark.parametrize(
    "capability, policy",
    [
        ((9, 0), "mixed_bfloat16"),
        ((8, 0), "mixed_bfloat16"),
        ((7, 5), "mixed_float16"),
        ((7, 0), "mixed_float16"),
        ((6, 1), "float32"),
        (None, "float32"),
    ],
)
def test_advice_for_gpus(capability, policy):
    chosen, reason = precision.for_gpu(capability)
    assert chosen == policy
    if capability:
        assert f"{capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(
    "flags, policy",
    [
        ({"avx2"}, "float32"),
        ({"avx512f", "avx512_bf16"}, "mixed_bfloat16"),
        ({"amx_bf16"}, "mixed_bfloat16"),
        (set(), "float32"),
    ],
)
def test_advice_for_cpus(flags, policy):
    chosen, reason = precision.for_cpu(frozenset(flags))
    assert chosen == policy and "CPU" in reason


def test_this_cpu_is_advised_by_its_own_flags():
    assert precision.explain() == precision.for_cpu(precision.cpu_flags())
    assert precision.cpu_flags()  # Linux names them
