"""Each notebook runs from a clean kernel in an empty folder, and stands in the checkout with its outputs."""

import os

import pytest
from doc_pages import ROOT

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {"03_plan_for_tpu": "libtpu"}


def read(path):
    return nbformat.read(path, as_version=4)


def pictures(notebook):
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return [o for o in outputs if "image/png" in o.get("data", {})]


def test_the_four_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["01_quickstart", "02_fine_tune", "03_plan_for_tpu", "04_profile"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_from_a_clean_kernel(path, tmp_path, monkeypatch):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = read(path)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type != "code" else cell.update(outputs=[], execution_count=None)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert len(pictures(notebook)) == len(pictures(read(path))) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_stored_with_its_outputs_and_without_complaints(path):
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count == number for number, cell in enumerate(code, 1)), "run it from top to bottom"
    assert pictures(notebook) and path.stat().st_size < 600_000
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            text = str(output.get("text", ""))
            assert str(ROOT) not in text and "/tmp/" not in text and "Traceback" not in text
