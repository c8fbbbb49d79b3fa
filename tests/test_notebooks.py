"""The example notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
QUICK = "resnet"
"""The one that runs every time; a kernel takes seconds to start."""


def _marked(path: Path):
    return pytest.param(path, id=path.stem, marks=() if path.stem == QUICK else pytest.mark.slow)


# jupyter_client says that it will use another folder one day; the kernel closes its sockets when it goes.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("path", [_marked(path) for path in NOTEBOOKS])
def test_a_notebook_runs_and_shows_its_results(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pages = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert any("peak allocated" in page or "iframe" in page for page in pages)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert path.stat().st_size < 20_000
