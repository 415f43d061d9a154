import math
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest

from labkit.runs.compare import EMULATED, compare
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.report import curves, figure, write_html

Make = Callable[..., Run]


def mismatch(runs: list[Run]) -> tuple[go.layout.YAxis, list[go.Scatter]]:
    """The axis and the curves of a figure of TMPE alone."""
    fig = figure(runs, ["tmpe"])
    return fig.layout.yaxis, list(fig.data)


def test_the_six_panels(finished_run: Make) -> None:
    fig = curves([finished_run("bf16"), finished_run("fp8-e2e")])
    titles = " ".join(annotation.text for annotation in fig.layout.annotations)
    for word in ("Accuracy", "TMPE", "KL", "Throughput", "Effective sample size", "time"):
        assert word in titles


def test_tmpe_is_drawn_as_its_excess_on_a_logarithmic_axis(finished_run: Make) -> None:
    axis, (trace,) = mismatch([finished_run()])
    assert axis.type == "log"
    assert trace.y == pytest.approx([0.002] * 5)
    assert list(trace.x) == [1, 2, 3, 4, 5]


def test_exact_agreement_gets_a_labelled_band_below_the_rest(finished_run: Make) -> None:
    axis, (exact, inexact) = mismatch([finished_run("bf16", exact=True), finished_run()])
    assert axis.ticktext[0] == "exact (0)"
    assert set(exact.y) == {axis.tickvals[0]}
    assert set(exact.customdata) == {0.0}, "the hover text must say 0, not where 0 is drawn"
    assert max(exact.y) < min(inexact.y) / 9
    assert 10 ** axis.range[0] < axis.tickvals[0]


@pytest.mark.parametrize("broken", [1e10, math.inf, math.nan])
def test_a_mismatch_beyond_all_measure_is_drawn_beside_a_sound_one(
    finished_run: Make, record: Callable[..., StepRecord], broken: float
) -> None:
    sound, bad = finished_run(), finished_run("fp8-rollout", records=1)
    for step in range(1, 6):
        done = record(step)
        done.metrics["token_mult_prob_error"] = broken
        bad.directory.append_record(done)
    axis, (first, second) = mismatch([sound, bad])
    assert first.y == pytest.approx([0.002] * 5)
    assert list(second.y) == [broken - 1] * (5 if math.isfinite(broken) else 0)
    bottom, top = axis.range
    for value in [*first.y, *second.y]:
        assert 10**bottom < value < 10**top
    assert len(axis.tickvals) == len(axis.ticktext) <= 8
    assert compare([sound, bad]).table().row_count > 0
    curves([sound, bad]).to_json()


def test_no_band_where_nothing_is_exact(finished_run: Make) -> None:
    assert "exact (0)" not in mismatch([finished_run()])[0].ticktext


def test_seeds_of_a_recipe_share_colour_and_dash_and_recipes_do_not(finished_run: Make) -> None:
    runs = [finished_run("bf16", 0), finished_run("fp8-e2e", 0), finished_run("bf16", 1)]
    _, (first, other, second) = mismatch(runs)
    assert (first.line.color, first.line.dash) == (second.line.color, second.line.dash)
    assert first.line.color != other.line.color
    assert first.line.dash != other.line.dash
    assert [trace.showlegend for trace in (first, other, second)] == [True, True, False]


def test_emulated_speed_is_labelled(finished_run: Make) -> None:
    assert EMULATED in figure([finished_run()], ["throughput"]).layout.annotations[0].text
    assert EMULATED not in figure([finished_run("bf16", exact=True)], ["throughput"]).layout.annotations[0].text


def test_any_metric_can_be_drawn_and_unknown_ones_are_refused(finished_run: Make) -> None:
    assert figure([finished_run()], ["kept_share"]).layout.annotations[0].text == "kept_share"
    with pytest.raises(ValueError, match="accuracy"):
        figure([finished_run()], ["acuracy"])


def test_the_page_works_offline_and_holds_the_comparison(finished_run: Make, tmp_path: Path) -> None:
    runs = [finished_run("bf16", exact=True), finished_run("fp8-e2e")]
    page = write_html(tmp_path / "x.html", runs, "A <title>", ["a note"]).read_text()
    assert "<script src" not in page
    assert "plotly.js v" in page
    for text in ("A &lt;title&gt;", "a note", "fp8-e2e", "1 (exact)", EMULATED):
        assert text in page


def test_runs_without_steps_can_be_drawn(finished_run: Make) -> None:
    assert len(curves([finished_run(records=0)]).layout.annotations) == 6
