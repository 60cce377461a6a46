"""`import vit_tpu` is quick and quiet, and the public names load on first use."""

import subprocess
import sys

import pytest

import vit_tpu


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_loads_neither_tensorflow_nor_official_and_prints_nothing():
    done = python(
        "import sys, vit_tpu\n"
        "heavy = {'tensorflow', 'tf_keras', 'keras', 'official', 'tensorflow_addons', 'matplotlib', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_using_a_model_imports_no_keras_3_or_official():
    done = python(
        "import sys, vit_tpu\n"
        "vit_tpu.ViT('Ti/4', image_size=8, width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=2)\n"
        "assert 'official' not in sys.modules and 'tensorflow_addons' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_loads():
    for name in vit_tpu.__all__:
        assert getattr(vit_tpu, name) is not None
    assert set(vit_tpu.__all__) <= set(dir(vit_tpu))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        vit_tpu.no_such_name  # noqa: B018


def test_precision_is_a_function_and_a_module():
    assert callable(vit_tpu.precision) and vit_tpu.precision.recommended() in vit_tpu.precision.POLICIES


def test_tensorboard_itself_starts():
    # It needs pkg_resources, which newer setuptools no longer bring.
    code = "from tensorboard import main, default; print(len(default.get_plugins()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-500:]
    assert int(found.stdout.split()[-1]) > 10
