"""Evidence: what the records of a run say about themselves, in the forms that alarms need."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.config import Experiment
from labkit.runs.record import StepRecord

WINDOW = 5  # steps: long enough to pass over one odd batch, short enough to speak early in a short run

Severity = Literal["warning", "critical"]


@dataclass(frozen=True)
class Finding:
    """What a rule found: in which steps, how bad, and what to do about it."""

    steps: Sequence[int]
    severity: Severity
    what: str
    cause: str
    cure: str


@dataclass(frozen=True)
class Evidence:
    """`experiment` is None where only the records are known; rules that need it then say nothing."""

    trained: Sequence[StepRecord]  # step 0, which only evaluates, left out
    evaluated: Sequence[StepRecord]  # with a held-out accuracy, step 0 included
    experiment: Experiment | None

    @classmethod
    def of(cls, records: Sequence[StepRecord], experiment: Experiment | None) -> "Evidence":
        trained = [record for record in records if record.step > 0]
        evaluated = [record for record in records if not math.isnan(record.metric("heldout_accuracy"))]
        return cls(trained, evaluated, experiment)

    def measured(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was measured and is a number."""
        values = [(record.step, record.metric(name)) for record in self.trained]
        return [(step, value) for step, value in values if not math.isnan(value)]

    def median(self, name: str) -> list[tuple[int, float]]:
        """(step, median of the metric's last WINDOW values up to it)."""
        values = self.measured(name)
        return [
            (step, statistics.median([value for _, value in values[max(0, i + 1 - WINDOW) : i + 1]]))
            for i, (step, _) in enumerate(values)
        ]

    def mostly(self, holds: Callable[[StepRecord], bool]) -> list[StepRecord]:
        """Records for which it holds, and for at least half of the last WINDOW up to them."""
        verdicts = [holds(record) for record in self.trained]
        return [
            record
            for i, record in enumerate(self.trained)
            if verdicts[i] and 2 * sum(verdicts[max(0, i + 1 - WINDOW) : i + 1]) >= min(i + 1, WINDOW)
        ]

    def where(self, holds: Callable[[StepRecord], bool]) -> list[StepRecord]:
        return [record for record in self.trained if holds(record)]

    def is_fp8(self, component: str) -> bool:
        """Whether the component really ran on FP8 numbers in the last step, emulated or not."""
        return bool(self.trained) and component_is_fp8(self.trained[-1], component)


def component_is_fp8(record: StepRecord, component: str) -> bool:
    active = record.active.get(component)
    return active is not None and active["state"] in ("fp8", "emulated")


def steps_of(records: Sequence[StepRecord]) -> list[int]:
    return [record.step for record in records]


def above(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    return [step for step, value in values if value > threshold]


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
