import math
from collections.abc import Callable

import pytest

from labkit.sweeps.results import area
from labkit.sweeps.sweep import Sweep

BF16 = {0: 0.93, 1: 0.95, 2: 0.94, 3: 0.96, 4: 0.90}
LOWER = {0: 0.92, 1: 0.92, 2: 0.92, 3: 0.92, 4: 0.895}  # by .01, .03, .02, .04, .005: see test_statistics


def test_arms_are_held_against_the_baseline_by_seed(filled: Callable[..., Sweep]) -> None:
    sweep = filled({"bf16": BF16, "fp8": LOWER}, {"fp8": 1e-3})
    results = sweep.results()
    assert results.done == 10
    assert results.verdict("fp8", "heldout_end") == "lower than bf16 by .021 [.003, .039], n = 5"
    assert results.verdict("bf16", "heldout_end", baseline="fp8") == "higher than fp8 by .021 [.003, .039], n = 5"
    assert results.verdict("fp8", "tmpe_excess") == "above 0 where bf16 is exactly 0, in all of n = 5"
    assert results.needed("fp8") == "seeds needed for .02 with power .8: 7"
    assert results.cell(results.baseline, "heldout_end") == ".936 [.907, .965]"
    assert results.cell(results.baseline, "tmpe_excess") == "0 (exact)"
    assert results.cell(results.arms["fp8"], "tmpe_excess").startswith("1.19e-03 [")
    assert results.evaluation() == ("one evaluation on 256 prompts has a standard error of .015 (binomial) at .936")


def test_the_area_is_the_mean_of_the_curve(filled: Callable[..., Sweep]) -> None:
    results = filled({"bf16": {0: 0.9}}).results()
    assert area(results.baseline.records[0]) == pytest.approx(0.6)  # straight from .3 to .9


def test_what_is_missing_or_diverged_is_said_and_does_not_count(filled: Callable[..., Sweep]) -> None:
    sweep = filled({"bf16": {0: 0.9, 1: 0.9, 2: 0.9}, "fp8": {0: 0.8, 1: math.nan}}, {"bf16": 1e-4, "fp8": 1e-3})
    results = sweep.results()
    assert results.arms["fp8"].missing == {2: "missing"}
    found = results.against("fp8", "heldout_end")
    assert (found.seeds, found.unpaired) == ((0,), (1, 2))
    assert "which shows nothing" in results.verdict("fp8", "heldout_end")
    assert results.verdict("fp8", "tmpe_excess") == "higher than bf16 by ×10 [×10, ×10], n = 2"
    assert results.reading()[-1] == "not there yet: fp8, seed 2: missing"
    assert "unknown until three are done" in results.needed("fp8")


def test_an_arm_of_which_nothing_is_done_has_a_dash(filled: Callable[..., Sweep]) -> None:
    results = filled({"bf16": {0: 0.9}, "fp8": {}}).results()
    assert results.verdict("fp8", "heldout_end") == "not comparable with bf16: no seed in common"
    assert results.cell(results.arms["fp8"], "heldout_end") == "–"
    assert results.table().row_count == 2
