"""Claims are well-formed, share their cells, and are judged by their intervals."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.config import ConfigError
from labkit.config.experiment import MODEL_TASKS
from labkit.runs.process import Run
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory
from labkit.sweeps.campaign import Campaign, judged
from labkit.sweeps.claims import CLAIMS, COST, Expectation, find
from labkit.sweeps.executor import LocalProcesses
from labkit.sweeps.plan import content
from labkit.sweeps.results import QUANTITIES
from labkit.sweeps.statistics import paired


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


@pytest.fixture
def campaign(root: Path) -> Iterator[Campaign]:
    yield Campaign(find("tmpe-order-same-kernels"), seeds=2, steps=1, root=root)
    for run in Run.all(root / "claims"):
        run.kill()


def test_one_small_claim_from_end_to_end_with_a_cell_that_is_there_already(campaign: Campaign) -> None:
    before, rest = campaign.cells[0], campaign.cells[1:3]
    campaign.path.mkdir(parents=True)
    RunDirectory.create(before.experiment, campaign.path, before.id).write_state(RunState("done"))
    assert len(campaign.left()) == len(campaign.cells) - 1
    campaign.cells = campaign.cells[:3]  # of one seed
    finished = {each.cell.id: each.before for each in campaign.run(LocalProcesses(os.cpu_count()))}
    assert finished == {before.id: True, **{cell.id: False for cell in rest}}
    rows = campaign.rows()
    higher = next(row for row in rows if "fp8-rollout higher than fp8-e2e" in row.comparison)
    assert (higher.n, higher.verdict, higher.published) == (1, "not enough seeds", "FP8 rollouts highest")
    assert higher.ours == "above 0 where fp8-e2e is exactly 0"
    assert higher.minutes > 0
    assert campaign.left() == []
