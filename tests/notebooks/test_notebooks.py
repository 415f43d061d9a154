"""Notebooks are stripped, short, and run from top to bottom, the hidden solutions of their exercises included."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from labkit.hardware import packages

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PANEL = {"00_start_here"}  # its figure is in the panel, a widget
SLOW = {  # they wait for whole runs
    *("04_importance_sampling", "05_kv_cache_and_recalibration", "06_end_to_end", "07_mixture_of_experts"),
    "11_make_it_yours",
}
NEEDS_VLLM = {"09_real_engines"}
SOLUTION = re.compile(r"<details><summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def solution(notebook: nbformat.NotebookNode) -> str:
    (found,) = [code for cell in notebook.cells for code in SOLUTION.findall(cell.source)]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_short(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert len(notebook.cells) <= 25
    assert notebook.cells[0].source.startswith("# ")
    assert "**Goal:**" in notebook.cells[0].source
    assert "Time:" in notebook.cells[0].source
    assert "Hardware:" in notebook.cells[0].source
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 15


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_with_an_exercise_whose_solution_is_hidden(path: Path) -> None:
    notebook = read(path)
    assert "## Try it yourself" in notebook.cells[-1].source
    compile(solution(notebook), path.stem, "exec")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem) for path in NOTEBOOKS],
)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, why = packages.vllm()
    if path.stem in NEEDS_VLLM and not there:
        pytest.skip(why)
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LABKIT_SMOKE", "1")
    notebook = read(path)
    assert len([c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]) == 1
    notebook.cells.append(nbformat.v4.new_code_cell(solution(notebook)))
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
    assert len(figures) == (0 if path.stem in PANEL else 1)
