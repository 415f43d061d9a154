"""Claims are well-formed, share their cells, and are judged by their intervals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.config import ConfigError
from labkit.config.experiment import MODEL_TASKS
from labkit.sweeps.campaign import Campaign, judged
from labkit.sweeps.claims import CLAIMS, COST, Expectation, find
from labkit.sweeps.plan import Cell, content
from labkit.sweeps.results import QUANTITIES
from labkit.sweeps.statistics import paired
from labkit.sweeps.sweep import Sweep


def test_every_claim_names_arms_and_quantities_that_there_are() -> None:
    for claim in CLAIMS.values():
        assert claim.source
        for expected in claim.expectations:
            assert expected.arm in claim.arms
            assert expected.versus in claim.arms or (expected.band and not expected.versus)
            assert expected.quantity in QUANTITIES or expected.quantity == COST
            assert (expected.says == "same") == bool(expected.margin or expected.band)
    assert ("moe-parity" in CLAIMS) == ("tiny-moe" in MODEL_TASKS)


def test_a_name_that_is_no_claim_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean end-to-end"):
        find("end-to-ends")
    assert len(find("all")) == len(CLAIMS)


def test_claims_share_cells_by_content(root: Path) -> None:
    everything = Campaign(find("all"), seeds=3, root=root)
    contents = {content(cell.experiment) for cell in everything.cells}
    assert len(contents) == len(everything.cells) == len({cell.id for cell in everything.cells})
    one_by_one = [Campaign(find(name), seeds=3, root=root) for name in CLAIMS]
    assert {cell.id for campaign in one_by_one for cell in campaign.cells} == {cell.id for cell in everything.cells}
    assert sum(len(campaign.cells) for campaign in one_by_one) > len(everything.cells)
    assert [cell.seed for cell in everything.cells] == sorted(cell.seed for cell in everything.cells)
    assert everything.estimate().startswith(f"{len(everything.cells)} cells")


def test_claims_can_be_put_to_another_model(root: Path) -> None:
    asked = Campaign(find("all"), seeds=1, steps=12, root=root, model="tiny-moe")
    assert {cell.experiment.model for cell in asked.cells} == {"tiny-moe"}
    tiny = Campaign(find("moe-parity"), seeds=1, steps=12, root=root)
    assert {cell.id for cell in tiny.cells} <= {cell.id for cell in asked.cells}  # which is about that model anyway
    assert tiny.estimate().endswith("3 of them not done: about 1 minutes on one core")


LESS = Expectation("a", "b", "heldout_end", "lower")
SAME = Expectation("a", "b", "heldout_end", "same", margin=0.03)


@pytest.mark.parametrize(
    ("expected", "differences", "verdict"),
    [
        (LESS, [-0.02, -0.03, -0.025], "as published"),
        (LESS, [0.02, 0.03, 0.025], "the opposite"),
        (LESS, [-0.02, 0.03, 0.0], "not shown"),
        (LESS, [0.0, 0.0, 0.0], "not shown"),
        (LESS, [-0.02], "not enough seeds"),
        (SAME, [0.001, -0.002, 0.003], "as published (within ±.03)"),
        (SAME, [0.01, -0.04, 0.03], "not shown (±.03 needs more seeds)"),
        (SAME, [-0.05, -0.06, -0.055], "the opposite"),
        (Expectation("a", "b", "heldout_end", "open"), [-0.02, -0.03, -0.025], "open: lower"),
    ],
)
def test_verdicts_follow_from_the_interval(expected: Expectation, differences: list[float], verdict: str) -> None:
    found = paired({seed: 0.5 + d for seed, d in enumerate(differences)}, dict.fromkeys(range(len(differences)), 0.5))
    assert judged(found, expected) == verdict


def test_the_table_is_made_from_what_is_there(root: Path, fill: Callable[[Sweep, Cell, float, float], None]) -> None:
    campaign = Campaign(find("end-to-end"), seeds=3, root=root)
    (sweep,) = campaign.sweeps.values()
    rows = campaign.rows()
    assert [(row.n, row.ours, row.verdict) for row in rows] == [(0, "–", "not enough seeds")] * 2
    accuracy = {"bf16": 0.90, "fp8-e2e + IS": 0.90, "fp8-rollout + IS": 0.87}
    for cell in sweep.cells[:6]:  # of two seeds
        fill(sweep, cell, accuracy[cell.arm] + cell.seed / 100, 0.0)
    same, higher = campaign.rows()
    assert (same.n, same.ours, same.verdict) == (2, "+.000 [+.000, +.000]", "as published (within ±.03)")
    assert (higher.published, higher.verdict) == (".613 against .586: +.027", "as published")
    assert higher.ours == "+.030 [+.030, +.030]"
    assert higher.minutes == pytest.approx(2 * 2 * (5 * 9 + 4 * 2) / 60)
    assert [cell.seed for cell in campaign.left()] == [2, 2, 2]
    campaign.cells = campaign.cells[:6]
    assert [each.before for each in campaign.run()] == [True] * 6


def test_a_cost_is_held_against_the_published_range_and_modelled_beside(
    root: Path, fill: Callable[[Sweep, Cell, float, float], None]
) -> None:
    campaign = Campaign(find("recalibration-cost"), seeds=2, root=root)
    (sweep,) = campaign.sweeps.values()
    for cell in sweep.cells:
        fill(sweep, cell, 0.9, 1e-3)
    (row,) = campaign.rows()
    assert row.ours.startswith("0.0% [0.0%, 0.0%]; ")
    assert "modelled for H100 SXM" in row.ours
    assert (row.n, row.verdict) == (2, "the opposite")
