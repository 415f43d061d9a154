"""Numbers of curves: known values, and properties that hold for any series."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.runs.record import StepRecord
from labkit.ui.series import History, band, decimate, meaning, points, smooth


def record(step: int, **metrics: float | None) -> StepRecord:
    return StepRecord(
        step=step,
        weight_version=step,
        time=float(step),
        elapsed=30.0 * step,
        metrics=metrics,
        timings={"generate": 1.0, "update": 1.0, "evaluate": 9.0} if step else {"evaluate": 9.0},
        tokens={"prompt": 100, "generated": 300} if step else {},
        active={},
        engine={},
    )


def test_steps_that_did_not_measure_have_no_point_and_broken_ones_a_gap() -> None:
    records = [record(0), record(1, ess=0.5), record(2, ess=None), record(3, ess=math.nan), record(4, ess=math.inf)]
    x, y = points(records, "ess")
    assert x.tolist() == [1, 3, 4]
    assert y[0] == 0.5
    assert np.isnan(y[1:]).all()


@pytest.mark.parametrize(("x", "where"), [("step", [1, 2]), ("tokens", [300, 600]), ("time", [0.5, 1.0])])
def test_x_is_steps_cumulative_generated_tokens_or_minutes(x: Any, where: list[float]) -> None:
    records = [record(step, accuracy=0.1) for step in (1, 2)]
    assert points(records, "accuracy", x)[0].tolist() == where


def test_derived_curves() -> None:
    records = [record(0), record(1, token_mult_prob_error=1.25)]
    assert points(records, "tmpe")[1].tolist() == [0.25]
    assert points(records, "throughput")[1].tolist() == [200.0]  # 400 tokens in 2 s: evaluation doesn't count
    assert meaning("throughput").unit == "tokens/s"
    with pytest.raises(ValueError, match="no metric"):
        meaning("throughputs")


def test_a_history_reads_new_records_and_notices_those_done_again() -> None:
    history = History()
    first = [record(step, ess=float(step)) for step in range(100)]
    again = [record(step, ess=-float(step)) for step in range(60, 130)]
    for records in (first[:10], first, [*first[:60], *again], first[:5]):
        for x in ("step", "tokens"):
            for seen, anew in zip(history.points(records, "ess", x), points(records, "ess", x), strict=True):
                assert seen.tolist() == anew.tolist()


def test_smoothing_is_bias_corrected() -> None:
    # m_1 = .5 * 1; m_2 = .25 + .5 * 3 = 1.75; over 1 - .5^t
    assert smooth(np.array([1.0, 3.0]), 0.5).tolist() == pytest.approx([1.0, 1.75 / 0.75])
    constant = np.full(500, 7.0)
    assert smooth(constant, 0.97) == pytest.approx(constant)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=200), st.floats(0, 0.99))
def test_smoothing_equals_its_definition(values: list[float], weight: float) -> None:
    expected, mean, n = [], 0.0, 0
    for value in values:
        if math.isnan(value):
            expected.append(value)
            continue
        mean, n = weight * mean + (1 - weight) * value, n + 1
        expected.append(mean / (1 - weight**n))
    assert smooth(np.array(values), weight) == pytest.approx(np.array(expected), rel=1e-9, abs=1e-6, nan_ok=True)


def test_smoothing_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="below 1"):
        smooth(np.ones(3), 1.0)


@given(st.integers(1, 4000), st.integers(10, 600), st.integers(0, 9))
def test_decimation_keeps_extremes_ends_and_order(n: int, limit: int, seed: int) -> None:
    y = np.random.default_rng(seed).normal(size=n)
    x, kept = decimate(np.arange(n, dtype=float), y, limit)
    assert len(x) <= max(limit, 4)
    assert (kept.min(), kept.max(), kept[0], kept[-1]) == (y.min(), y.max(), y[0], y[-1])
    assert (np.diff(x) > 0).all()
    assert (y[x.astype(int)] == kept).all()


def test_a_gap_longer_than_a_pixel_stays_a_gap() -> None:
    y = np.ones(2000)
    y[500:1000] = np.nan
    assert np.isnan(decimate(np.arange(2000.0), y, 100)[1]).sum() >= 10


def test_band_over_seeds() -> None:
    x = np.array([0.0, 1.0, 2.0])
    grid, mean, std = band([(x, np.array([1.0, 2.0, 3.0])), (x[:2], np.array([3.0, 2.0]))])
    assert grid.tolist() == [0, 1, 2]
    assert mean.tolist() == [2, 2, 3]
    assert std.tolist() == pytest.approx([math.sqrt(2), 0, 0])  # n - 1; a single curve has no spread


def test_band_interpolates_where_seeds_stand_at_other_tokens() -> None:
    grid, mean, _ = band([(np.array([0.0, 4.0]), np.array([0.0, 4.0])), (np.array([0.0, 2.0]), np.array([0.0, 4.0]))])
    assert (grid.tolist(), mean.tolist()) == ([0, 2, 4], [0, 3, 4])
