"""Results: what the cells of a sweep measured, per arm and seed, and what that shows against the baseline.

Only cells that are done count: the accuracy in the middle of a run isn't that at its end. The others are listed under
`missing`, with where they stand.

    heldout_end     held-out accuracy of the unquantised policy after the last step
    heldout_area    area under its curve over the steps, divided by their number: the mean accuracy on the way
    tmpe_excess     median over the steps of TMPE - 1, compared as a ratio
    gen_kl          mean over the steps of the generation KL (k3), compared as a ratio
    heldout_engine  accuracy through the run's own engine, where it was measured
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from rich.table import Table

from labkit.config import Experiment
from labkit.runs.compare import Summary, summarize
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.sweeps.drive import Standing, standing_of
from labkit.sweeps.plan import Plan
from labkit.sweeps.statistics import Interval, Paired, evaluation_error, interval, paired, short, verdict
from labkit.sweeps.sweep import Sweep


@dataclass(frozen=True)
class Quantity:
    """A number of a whole run. `log`: it spans decades and is compared as a ratio."""

    title: str
    short: str  # where there is little room
    value: Callable[[Sequence[StepRecord]], float]
    better: Literal["higher", "lower"]
    log: bool = False

    def said(self, value: float) -> str:
        if not math.isfinite(value):
            return "–"
        return ("0" if value == 0 else f"{value:.2e}") if self.log else short(value)


def _points(records: Sequence[StepRecord], name: str) -> list[tuple[int, float]]:
    found = [(record.step, value) for record in records if (value := record.metrics.get(name)) is not None]
    return found if all(math.isfinite(value) for _, value in found) else []


def _end(name: str) -> Callable[[Sequence[StepRecord]], float]:
    def end(records: Sequence[StepRecord]) -> float:
        points = _points(records, name)
        return points[-1][1] if points and points[-1][0] == records[-1].step else math.nan

    return end


def area(records: Sequence[StepRecord]) -> float:
    """By trapezoids, over the steps from the first to the last evaluation."""
    points = _points(records, "heldout_accuracy")
    if len(points) < 2:
        return math.nan
    x, y = zip(*points, strict=True)
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def _over_steps(name: str, of: Callable[[Sequence[float]], float], less: float = 0.0) -> Callable[..., float]:
    def value(records: Sequence[StepRecord]) -> float:
        points = _points(records, name)
        return of([value for _, value in points]) - less if points else math.nan

    return value


QUANTITIES: dict[str, Quantity] = {
    "heldout_end": Quantity("held-out accuracy, end", "held-out, end", _end("heldout_accuracy"), "higher"),
    "heldout_area": Quantity("held-out accuracy, mean of the curve", "held-out, mean", area, "higher"),
    "tmpe_excess": Quantity(
        "TMPE − 1, median", "TMPE − 1", _over_steps("token_mult_prob_error", statistics.median, 1.0), "lower", log=True
    ),
    "gen_kl": Quantity("generation KL, mean", "KL", _over_steps("gen_kl_error", statistics.fmean), "lower", log=True),
    "heldout_engine": Quantity(
        "held-out accuracy through the run's engine, end", "held-out, engine", _end("heldout_accuracy_engine"), "higher"
    ),
}


@dataclass(frozen=True)
class Arm:
    name: str
    experiment: Experiment
    runs: dict[int, Run]  # by seed, those that are done
    missing: dict[int, Standing]

    @cached_property
    def records(self) -> dict[int, list[StepRecord]]:
        return {seed: run.records() for seed, run in self.runs.items()}

    @cached_property
    def summaries(self) -> dict[int, Summary]:
        return {seed: summarize(run) for seed, run in self.runs.items()}

    def values(self, quantity: str) -> dict[int, float]:
        """By seed; NaN where a run that is done didn't measure it or diverged."""
        return {seed: QUANTITIES[quantity].value(records) for seed, records in self.records.items()}

    def interval(self, quantity: str) -> Interval:
        return interval([value for value in self.values(quantity).values() if math.isfinite(value)])


@dataclass(frozen=True)
class Results:
    plan: Plan
    arms: dict[str, Arm]

    @classmethod
    def of(cls, sweep: Sweep) -> "Results":
        arms: dict[str, Arm] = {}
        for cell in sweep.cells:
            arm = arms.setdefault(cell.arm, Arm(cell.arm, cell.experiment, {}, {}))
            run = sweep.run_of(cell)
            standing = standing_of(run)
            if run is not None and standing == "done":
                arm.runs[cell.seed] = run
            else:
                arm.missing[cell.seed] = standing
        return cls(sweep.plan, arms)

    @property
    def done(self) -> int:
        return sum(len(arm.runs) for arm in self.arms.values())

    @property
    def baseline(self) -> Arm:
        return self.arms[self.plan.baseline]

    @property
    def others(self) -> list[Arm]:
        return [arm for arm in self.arms.values() if arm.name != self.plan.baseline]

    @cached_property
    def measured(self) -> list[str]:
        """The quantities that any run has."""
        return [
            key
            for key in QUANTITIES
            if any(math.isfinite(v) for arm in self.arms.values() for v in arm.values(key).values())
        ]

    def against(self, arm: str, quantity: str, baseline: str | None = None) -> Paired:
        """An arm against the baseline, or another arm, by seed."""
        theirs = self.arms[baseline or self.plan.baseline]
        return paired(self.arms[arm].values(quantity), theirs.values(quantity), QUANTITIES[quantity].log)

    def verdict(self, arm: str, quantity: str, baseline: str | None = None) -> str:
        return verdict(self.against(arm, quantity, baseline), baseline or self.plan.baseline)

    def missing(self) -> list[str]:
        """The cells that don't count yet, with the reason."""
        return [
            f"{arm.name}, seed {seed}: {standing}"
            for arm in self.arms.values()
            for seed, standing in sorted(arm.missing.items())
        ]

    def needed(self, arm: str) -> str:
        """How many seeds would be needed to find the plan's effect in the accuracy at the end."""
        found = self.against(arm, "heldout_end")
        effect = short(self.plan.effect, 3).rstrip("0")
        if found.n < 3:  # of two differences the spread is hardly known
            return f"seeds needed for {effect}: unknown until three are done"
        if found.difference.std == 0:
            return f"seeds needed for {effect}: unknown, the differences don't vary"
        count = found.needed(self.plan.effect)
        return f"seeds needed for {effect} with power .8: {count if count else 'more than a thousand'}"

    def reading(self) -> list[str]:
        """Sentences: what was shown about the accuracy and the mismatch of each arm, and what is missing."""
        lines = []
        for arm in self.others:
            for key in [key for key in ("heldout_end", "tmpe_excess") if key in self.measured]:
                after = f"; {self.needed(arm.name)}" if key == "heldout_end" else ""
                lines.append(f"{arm.name}: {QUANTITIES[key].title}: {self.verdict(arm.name, key)}{after}")
        if absent := self.missing():
            lines.append(f"not there yet: {'; '.join(absent)}")
        return lines

    def table(self) -> Table:
        """An arm a line: means with intervals, for a terminal."""
        table = Table(title=self.plan.question or self.plan.name, title_justify="left")
        table.add_column("arm")
        table.add_column("seeds", justify="right")
        for key in self.measured:
            table.add_column(QUANTITIES[key].short, justify="right")
        for arm in self.arms.values():
            seeds = f"{len(arm.runs)}/{len(arm.runs) + len(arm.missing)}"
            name = f"{arm.name} (baseline)" if arm.name == self.plan.baseline else arm.name
            table.add_row(name, seeds, *(self.cell(arm, key) for key in self.measured))
        table.caption, table.caption_justify = self.evaluation(), "left"
        return table

    def cell(self, arm: Arm, quantity: str) -> str:
        """The mean over seeds and its interval; the geometric mean of what is compared as a ratio."""
        values = [value for value in arm.values(quantity).values() if math.isfinite(value)]
        if not values:
            return "–"
        if QUANTITIES[quantity].log:
            return log_cell(values, quantity)
        found = interval(values)
        ends = f" [{short(found.low)}, {short(found.high)}]" if found.n > 1 else ""
        return f"{short(found.mean)}{ends}"

    def evaluation(self) -> str:
        """The error that each held-out accuracy has of its own."""
        accuracy = self.baseline.interval("heldout_end").mean
        if math.isnan(accuracy):
            return ""
        prompts = self.plan.experiment.eval_prompts
        error = short(evaluation_error(accuracy, prompts))
        return f"one evaluation on {prompts} prompts has a standard error of {error} (binomial) at {short(accuracy)}"


def log_cell(values: Sequence[float], quantity: str) -> str:
    zeros = sum(value <= 0 for value in values)
    if zeros == len(values):
        return "0 (exact)"
    if zeros:
        return f"0 (exact) in {zeros} of {len(values)}, else up to {max(values):.1e}"
    found = interval([math.log(value) for value in values])
    ends = f" [{math.exp(found.low):.1e}, {math.exp(found.high):.1e}]" if found.n > 1 else ""
    return f"{math.exp(found.mean):.2e}{ends}"
