"""Notebooks are stripped, short, and run from top to bottom."""

from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What the tests set in the cell tagged "parameters".
SMOKE = {"00_start_here": "steps = 2\nseeds = 1\nmodel = 'tiny'"}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_short(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert len(notebook.cells) <= 25
    assert notebook.cells[0].source.startswith("# ")
    assert "**Goal:**" in notebook.cells[0].source
    assert "Time:" in notebook.cells[0].source
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 15


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    notebook = read(path)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source = SMOKE[path.stem]
    nbclient.NotebookClient(
        notebook, timeout=240, store_widget_state=False, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert sum(bool(cell.get("outputs")) for cell in notebook.cells) >= 5
    figures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(figures) == 1
