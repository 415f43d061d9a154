import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.sweeps import provenance, report
from labkit.sweeps.sweep import Sweep


@pytest.fixture
def sweep(filled: Callable[..., Sweep]) -> Sweep:
    accuracies = {"bf16": {0: 0.93, 1: 0.95}, "fp8 | odd <name>": {0: 0.92, 1: 0.92, 2: 0.9}}
    sweep = filled(accuracies, {"fp8 | odd <name>": 1e-3}, question="Does <it> matter?")
    provenance.note(sweep.path)
    return sweep


def test_the_page_holds_everything_and_needs_no_network(sweep: Sweep, tmp_path: Path) -> None:
    page = report.write_html(tmp_path / "x.html", sweep).read_text()
    assert "<title>Does &lt;it&gt; matter?</title>" in page
    assert page.count("Plotly.newPlot(") == 1
    assert 'src="http' not in page
    for part in ("What was shown", "Arms", "Curves", "Results", "Against the baseline", "Throughput", "Alarms"):
        assert f"<h2>{part}</h2>" in page
    assert "fp8 | odd &lt;name&gt;: held-out accuracy, end: no difference from bf16 shown at n = 2" in page
    assert "without seed 2, which only one side has" in page
    assert "bf16, seed 2: missing" in page
    assert "emulated: not a speed-up" in page
    assert "modelled for H100 SXM, not measured: Llama-3.1-8B" in page
    assert f"labkit sweep {sweep.path / 'sweep.yaml'}" in page
    assert "grpo.lr" in page
    assert "kv_format" not in page.partition("To repeat it")[0], "only settings that differ are listed"


def test_markdown_keeps_its_tables_whole(sweep: Sweep, tmp_path: Path) -> None:
    text = report.write_markdown(tmp_path / "x.md", sweep).read_text()
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert "fp8 \\| odd &lt;name>" in text
    widths = {line.replace("\\|", "").count("|") for line in tables if "recipe.rollout.linears" in line}
    assert widths == {4}


def test_csv_has_a_line_for_each_cell_done_or_not(sweep: Sweep, tmp_path: Path) -> None:
    rows = list(csv.DictReader(report.write_csv(tmp_path / "x.csv", sweep).open()))
    assert [row["standing"] for row in rows] == ["done", "done", "done", "done", "missing", "done"]
    assert float(rows[0]["heldout_end"]) == pytest.approx(0.93)
    assert rows[1]["recipe.rollout.linears"] == "on"
    assert rows[4]["heldout_end"] == ""


def test_before_anything_is_done_the_report_says_so(filled: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = filled({"bf16": {0: 0.9}})
    for run in sweep.path.glob("bf16-s0"):
        run.rename(tmp_path / "away")
    assert "no cell is done" in report.write_html(tmp_path / "x.html", sweep).read_text()
