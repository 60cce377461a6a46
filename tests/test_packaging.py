"""What is built is complete: the wheel has every module and works alone, the source archive has the whole project."""

import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = {str(path.relative_to(ROOT)) for path in (ROOT / "vit_tpu").rglob("*.py")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds both without the network, from a copy, so that no build folder is left in the checkout."""
    import shutil

    place = tmp_path_factory.mktemp("built")
    leave = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "*.egg-info", ".*_cache", "build", "dist")
    shutil.copytree(ROOT, place / "source", ignore=leave)
    code = (
        "import os, sys; from setuptools import build_meta as b; os.chdir(sys.argv[1]); "
        "print(b.build_wheel('../out')); print(b.build_sdist('../out'))"
    )
    (place / "out").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code, str(place / "source")], capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    (wheel,), (sdist,) = (list((place / "out").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def test_the_wheel_holds_every_module_and_the_licence(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    assert names >= MODULES | {"vit_tpu/py.typed"}
    assert not {name for name in names if name.startswith(("tests", "docs", "benchmarks"))}
    assert any(name.endswith("LICENSE") for name in names)
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(built[0]).read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text or "License: Apache-2.0" in text
    for extra in ("plan", "data", "export", "notebooks"):
        assert f"Provides-Extra: {extra}" in text


def test_the_wheel_works_without_the_checkout(built, tmp_path):
    zipfile.ZipFile(built[0]).extractall(tmp_path / "site")
    code = (
        "import vit_tpu, sys; assert vit_tpu.__file__.startswith(sys.argv[1]), vit_tpu.__file__; "
        "from vit_tpu import train; sys.exit(train.main(['--dry_run']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "digits" in run.stdout and "optimizer state" in run.stdout


def test_the_source_archive_holds_the_project(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(ROOT)) for folder in ("experiments", "benchmarks", "tests") for path in
              (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    wanted |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "constraints.txt", "Makefile"}
    assert names >= MODULES | wanted, sorted((MODULES | wanted) - names)[:5]
