"""Each notebook runs from an empty namespace in an empty folder, and stands in the checkout with its outputs."""

import os

import pytest
from doc_pages import ROOT

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {"03_plan_for_tpu": "libtpu"}


def read(path):
    return nbformat.read(path, as_version=4)


def pictures(notebook):
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return [o for o in outputs if "image/png" in o.get("data", {})]


def test_the_four_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["01_quickstart", "02_fine_tune", "03_plan_for_tpu", "04_profile"]


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all notebooks: loading TensorFlow anew for each would cost more than what they compute."""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    manager.start_kernel(env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_from_an_empty_namespace(path, tmp_path, kernel):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    notebook = read(path)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type != "code" else cell.update(outputs=[], execution_count=None)
    clean = nbformat.v4.new_code_cell(
        f"%reset -f\nimport os\nos.chdir({str(tmp_path)!r})\ndel os\nassert 'vit_tpu' not in dir()"
    )
    notebook.cells.insert(0, clean)
    nbclient.NotebookClient(notebook, timeout=300, km=kernel).execute()
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
