import math
from collections.abc import Callable

import pytest

from labkit.runs.compare import EMULATED, compare, labels, summarize, throughput, tmpe_text
from labkit.runs.process import Run
from labkit.runs.record import StepRecord

Make = Callable[..., Run]


def test_throughput_four_ways_by_hand(record: Callable[..., StepRecord]) -> None:
    slow_first = record(1, timings={"generate": 100.0})
    rates = throughput([record(0), slow_first, record(2), record(3)])
    assert rates.rollout == 300 / 1.0
    assert rates.train == 200 / 0.5
    assert rates.train_padded == 250 / 0.5
    assert rates.end_to_end == (100 + 300) / 2.0  # evaluation is no part of a step
    assert rates.effective == 300 * 0.5 / 2.0
    assert rates.emulated


def test_a_summary_by_hand(finished_run: Make) -> None:
    summary = summarize(finished_run())
    assert summary.steps == 5
    assert (summary.heldout_start, summary.heldout_end, summary.heldout_best) == (0.3, 0.3 + 0.04, 0.3 + 0.04)
    assert summary.tmpe_median == summary.tmpe_last == 1.002
    assert summary.step_seconds == 2.0
    assert summary.refit_share == 0.25
    assert summary.recalibrate_share == 0.0


def test_only_settings_that_differ_are_shown(finished_run: Make) -> None:
    comparison = compare([finished_run("bf16", seed=0), finished_run("fp8-rollout", seed=3)])
    assert comparison.settings == {"recipe.rollout.linears": [False, True], "seed": [0, 3]}
    rows = dict(comparison.rows())
    assert rows["recipe.rollout.linears"] == ["off", "on"]
    assert rows["seed"] == ["0", "3"]


def test_emulated_speed_is_labelled_and_bf16_is_not(finished_run: Make) -> None:
    rows = dict(compare([finished_run("bf16", exact=True), finished_run()]).rows())
    assert rows["FP8 speed"] == ["–", EMULATED]
    assert rows["TMPE, median"] == ["1 (exact)", "1.00200"]
    assert rows["ESS of the weights, mean"] == ["–", "0.9900"]


def test_a_run_without_steps_compares_as_not_measured(finished_run: Make) -> None:
    comparison = compare([finished_run(records=0)])
    assert math.isnan(comparison.summaries[0].heldout_end)
    assert dict(comparison.rows())["seconds per step"] == ["–"]


def test_labels_are_as_short_as_they_can_be(finished_run: Make) -> None:
    one, two = finished_run("bf16"), finished_run("fp8-e2e")
    assert labels([one, two]) == ["bf16", "fp8-e2e"]
    assert labels([one, finished_run("bf16", seed=1)]) == ["bf16 · seed 0", "bf16 · seed 1"]
    assert labels([one, one.open(one.path)]) == [one.id, one.id]


def test_the_table_shows_every_run(finished_run: Make) -> None:
    table = compare([finished_run("bf16"), finished_run("fp8-e2e")]).table()
    assert [column.header for column in table.columns] == ["", "bf16", "fp8-e2e"]


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare([])


def test_exact_and_nearly_exact_are_told_apart() -> None:
    assert [tmpe_text(value) for value in (1.0, 1.0000003, 1.01, math.nan)] == [
        "1 (exact)",
        "1 + 3.0e-07",
        "1.01000",
        "–",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(1e10, "1e+10"), (22026.4658, "2.2e+04"), (2.5, "2.50000"), (math.inf, "inf")]
)
def test_a_mismatch_beyond_all_measure_stays_readable(value: float, text: str) -> None:
    assert tmpe_text(value) == text
