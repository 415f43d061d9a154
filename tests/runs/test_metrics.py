"""What records hold is described; the values themselves are tested in tests/rl/test_metrics.py."""

from typing import get_args

import pytest

from labkit.config import Experiment
from labkit.rl.loop import Loop
from labkit.runs import METRICS, describe
from labkit.runs.metrics import TOKENS, Better


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe.correction": {"name": "geometric-mask"}},
        {"recipe.correction": {"name": "custom", "calibrate_clip_every": 1}},
        {"recipe.rollout.attention": False, "recipe.rollout.kv_cache": False},
    ],
    ids=["filter", "calibrated-clip", "no-cache"],
)
def test_everything_that_a_real_record_holds_is_described(small: Experiment, changes: dict) -> None:
    start, step = Loop(small.override({"steps": 1, "eval_prompts": 4, **changes})).steps()
    for name in {**start.metrics, **step.metrics}:
        describe(name)
    assert set(step.tokens) == set(TOKENS)


def test_a_filter_names_its_metrics() -> None:
    assert describe("rejected_mean_ratio").definition == "tokens that the filter mean ratio rejects"
    assert "mult error" in describe("judged_mult_error_q95").definition
    assert describe("rejected_correct_share") is METRICS["rejected_correct_share"], "no filter of that name"


def test_a_name_that_no_record_holds_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean gen_kl_error"):
        describe("gen_kl_eror")
    for name in ("judged_mean_ratio", "rejected_"):
        with pytest.raises(ValueError, match="no metric"):
            describe(name)


def test_descriptions_are_complete() -> None:
    for name, metric in {**METRICS, **TOKENS}.items():
        assert all((metric.definition, metric.unit, metric.source)), name
        assert metric.better in get_args(Better), name
        assert metric.healthy is None or metric.healthy[0] <= metric.healthy[1], name
        if metric.healthy and metric.better in ("one", "zero"):
            target = 1.0 if metric.better == "one" else 0.0
            assert metric.healthy[0] <= target <= metric.healthy[1], name


def test_bands_that_projects_publish() -> None:
    assert METRICS["token_mult_prob_error"].healthy == (1.0, 1.05)
    assert METRICS["gen_kl_error"].healthy == (0.0, 1e-3)
    assert METRICS["ess"].healthy == (0.3, 1.0)
    assert METRICS["mean_applied"].healthy == (0.5, 2.0)
