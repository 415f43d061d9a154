"""Campaign: claims run together. What several of them need, the same Experiment with the same seed, is run once.

Cells lie in <root>/claims under names that end in a hash of their content, so claims that are run one after the other
share them too, and so do later campaigns with more seeds. The table can be made at any time from what is there.

Claims are put to the tiny policies, or to the model that is given; those about a mixture of experts keep their own.

Verdicts on an expectation, from the paired 95 % interval of the arms' difference:

    as published    the interval lies on the published side of 0; for "same", inside the margin
    the opposite    it lies on the other side; for "same", outside the margin on one side of 0
    not shown       neither: too few seeds for this spread, or no difference
    open            nothing is published: what was found stands for itself
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.config import preset
from labkit.hardware import modelled
from labkit.runs.process import Run
from labkit.runs.store import runs_root
from labkit.sweeps import provenance
from labkit.sweeps.claims import COST, Claim, Expectation
from labkit.sweeps.document import Block, Bullets, Grid, Heading, Paragraph
from labkit.sweeps.drive import Finished, OnRecord, drive
from labkit.sweeps.executor import Executor, LocalProcesses
from labkit.sweeps.plan import Cell, Plan, content, slug
from labkit.sweeps.results import QUANTITIES, Results
from labkit.sweeps.statistics import Paired, interval, paired, short, signed
from labkit.sweeps.sweep import Sweep

SECONDS_PER_STEP = {"tiny": 1.0, "tiny-moe": 1.4, "smollm2": 4.5}  # on one core of a server CPU
HEAD = ("claim", "comparison", "published", "here", "n", "verdict", "minutes")


@dataclass(frozen=True)
class Row:
    """A line of the table; `minutes` of the cells that the comparison rests on."""

    claim: str
    comparison: str
    published: str
    ours: str
    n: int
    verdict: str
    minutes: float

    def texts(self) -> list[str]:
        minutes = f"{self.minutes:.1f}" if self.minutes else "–"
        return [self.claim, self.comparison, self.published, self.ours, str(self.n), self.verdict, minutes]


class Campaign:
    """Claims over the same seeds and steps, in one folder."""

    def __init__(
        self,
        claims: Sequence[Claim],
        seeds: int = 3,
        steps: int | None = None,
        root: str | Path | None = None,
        model: str = "tiny",
    ) -> None:
        self.path = (runs_root(root) / "claims").absolute()
        self.claims = list(claims)
        pool: dict[str, Cell] = {}
        self.sweeps: dict[str, Sweep] = {}
        for claim in claims:
            plan = _plan(claim, seeds, steps, model)
            cells = [self._pooled(cell, pool) for cell in plan.cells()]
            self.sweeps[claim.name] = Sweep(plan, self.path, cells)
        self.cells = tuple(sorted(pool.values(), key=lambda cell: cell.seed))  # seed by seed, as a sweep goes

    @staticmethod
    def _pooled(cell: Cell, pool: dict[str, Cell]) -> Cell:
        experiment = Run.check(cell.experiment)
        key = content(experiment)
        cell_id = f"{slug(experiment.recipe.name)}-s{cell.seed}-{key[:8]}"
        named = Cell(cell_id, cell.arm, cell.seed, experiment.override({"name": cell_id}))
        pool.setdefault(key, named)
        return named

    def run(
        self, executor: Executor | None = None, retry: bool = False, on_record: OnRecord | None = None
    ) -> Iterator[Finished]:
        """Drive all cells that are missing: as a Sweep does, with its guarantees."""
        self.path.mkdir(parents=True, exist_ok=True)
        provenance.note(self.path)
        yield from drive(self.cells, self.path, executor or LocalProcesses(), retry, on_record)

    def left(self) -> list[Cell]:
        """The cells that aren't done."""
        done = {cell_id for sweep in self.sweeps.values() for cell_id, at in sweep.standings().items() if at == "done"}
        return [cell for cell in self.cells if cell.id not in done]

    def estimate(self) -> str:
        """Cells and time, from the steps that are left."""
        left = self.left()
        seconds = sum(cell.experiment.steps * SECONDS_PER_STEP.get(cell.experiment.model, math.nan) for cell in left)
        shared = sum(len(sweep.cells) for sweep in self.sweeps.values()) - len(self.cells)
        return f"{len(self.cells)} cells ({shared} more are shared between claims), {len(left)} of them not done" + (
            "" if math.isnan(seconds) else f": about {seconds / 60:.0f} minutes on one core"
        )

    def rows(self) -> list[Row]:
        rows = []
        for claim in self.claims:
            results = self.sweeps[claim.name].results()
            rows += [_row(claim, each, results) for each in claim.expectations]
        return rows

    def blocks(self) -> list[Block]:
        """The table with what there is to know about each claim, as a document."""
        found: list[Block] = [
            Paragraph(f"{self.estimate()}."),
            Grid(HEAD, [row.texts() for row in self.rows()], [1, 2, 5]),
        ]
        for claim in self.claims:
            results = self.sweeps[claim.name].results()
            note = f"{claim.note[:1].upper()}{claim.note[1:]}." if claim.note else ""
            found += [Heading(claim.name), Paragraph(f"{claim.statement}. {note}"), Paragraph(claim.source, soft=True)]
            found += [Bullets(results.reading())] if results.done and results.others else []
        return found


def _plan(claim: Claim, seeds: int, steps: int | None, model: str) -> Plan:
    changes = claim.experiment | ({} if steps is None else {"steps": steps, "eval_every": max(1, steps // 6)})
    model = changes.get("model", model)
    experiment = preset("bf16", model, **{key: value for key, value in changes.items() if key != "model"})
    return Plan(
        name=f"claim-{claim.name}", question=claim.statement, experiment=experiment, arms=claim.arms,
        seeds=tuple(range(seeds)), baseline=next(iter(claim.arms)), effect=claim.effect,
    )  # fmt: skip


def _row(claim: Claim, expected: Expectation, results: Results) -> Row:
    minutes = sum(
        sum(record.timings.values()) / 60
        for name in filter(None, (expected.arm, expected.versus))
        for records in results.arms[name].records.values()
        for record in records
    )
    if expected.band:
        return _cost_row(claim, expected, results, minutes)
    quantity = QUANTITIES[expected.quantity]
    found = paired(
        results.arms[expected.arm].values(expected.quantity),
        results.arms[expected.versus].values(expected.quantity),
        quantity.log,
    )
    words = {"lower": "lower than", "higher": "higher than", "same": "the same as", "open": "against"}[expected.says]
    comparison = f"{quantity.short}: {expected.arm} {words} {expected.versus}"
    return Row(
        claim.name,
        comparison,
        expected.published,
        signed(found, expected.versus),
        found.n,
        judged(found, expected),
        minutes,
    )


def judged(found: Paired, expected: Expectation) -> str:
    """See the head."""
    if found.n < 2:
        return "not enough seeds"
    if expected.says == "open":
        return "open: " + {-1: "lower", 0: "no difference shown", 1: "higher"}[found.shown]
    if expected.says == "same":
        low, high = found.difference.low, found.difference.high
        if -expected.margin < low and high < expected.margin:
            return f"as published (within ±{short(expected.margin, 2)})"
        apart = low > expected.margin or high < -expected.margin
        return "the opposite" if apart else f"not shown (±{short(expected.margin, 2)} needs more seeds)"
    wanted = -1 if expected.says == "lower" else 1
    return {wanted: "as published", -wanted: "the opposite", 0: "not shown"}[found.shown]


def _cost_row(claim: Claim, expected: Expectation, results: Results, minutes: float) -> Row:
    """A share of the time of a step: measured here, and modelled for the hardware that the figure is from."""
    assert expected.quantity == COST
    assert expected.band
    arm = results.arms[expected.arm]
    found = interval([summary.recalibrate_share for summary in arm.summaries.values()])
    told = modelled(arm.experiment.recipe)
    share = told.seconds["recalibrate"] / told.step_seconds
    ours = (
        "–" if found.n == 0 else f"{found.mean:.1%}" + (f" [{found.low:.1%}, {found.high:.1%}]" if found.n > 1 else "")
    )
    low, high = expected.band
    inside = low <= found.low and found.high <= high
    outside = found.low > high or found.high < low
    judgement = "as published" if inside else "the opposite" if outside else "not shown"
    if found.n < 2:
        judgement = "not enough seeds"
    comparison = "share of a step that recalibration takes"
    return Row(
        claim.name, comparison, expected.published, f"{ours}; {share:.1%} {told.label}", found.n, judgement, minutes
    )
