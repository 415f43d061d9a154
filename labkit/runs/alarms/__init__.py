"""Alarms: what in the records of a run says that something is broken, since when, why, and what to do.

    for alarm in alarms(run.records(), run.experiment):
        print(alarm)

Silent failure is the disease of this field: rewards go on rising while scales are lost, a correction has nothing to
correct, or half the batch is thrown away. So no rule looks at the reward alone. Each reads StepRecords and nothing
else (no torch, no files), so alarms of a run that lives on another machine, or of last year, are the same. With the
Experiment they know what was meant and say more; without it, rules that need it stay silent. A run that is sound has
none.

To add one: write a rule, from Evidence to a Finding or None, in one of the modules here and give it a name in RULES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.config import Experiment
from labkit.runs.alarms import correction, engine, learning, mismatch
from labkit.runs.alarms.evidence import Evidence, Finding, Severity
from labkit.runs.record import StepRecord

if TYPE_CHECKING:
    from labkit.runs.store import Switch


@dataclass(frozen=True)
class Alarm:
    name: str
    step: int  # the first that it concerns
    last_step: int
    severity: Severity
    what: str  # with the number
    cause: str
    cure: str  # which setting

    def __str__(self) -> str:
        steps = f"step {self.step}" if self.step == self.last_step else f"steps {self.step} to {self.last_step}"
        return f"{self.severity}: {self.name}, {steps}\n  {self.what}\n  cause: {self.cause}\n  cure: {self.cure}"


RULES: dict[str, Callable[[Evidence], Finding | None]] = {
    "batch-rejected": correction.batch_rejected,
    "nan-tokens": engine.nan_tokens,
    "update-skipped": learning.update_skipped,
    "not-active": engine.not_active,
    "scales-default": engine.scales_default,
    "blind-correction": mismatch.blind_correction,
    "sampler-ratio": mismatch.sampler_ratio,
    "sampler-surprisal": mismatch.sampler_surprisal,
    "sampler-fitted": learning.sampler_fitted,
    "accuracy-fell": learning.accuracy_fell,
    "stale-weights": engine.stale_weights,
    "kv-saturation": engine.kv_saturation,
    "stale-scales": engine.stale_scales,
    "not-exact": mismatch.not_exact,
    "mismatch-level": mismatch.mismatch_level,
    "mismatch-spike": mismatch.mismatch_spike,
    "mismatch-trend": mismatch.mismatch_trend,
    "ratio-off-one": mismatch.ratio_off_one,
    "codes-frozen": engine.codes_frozen,
    "ess-low": correction.ess_low,
    "mostly-rejected": correction.mostly_rejected,
    "no-advantage": learning.no_advantage,
    "truncated": learning.truncated,
    "entropy-collapse": learning.entropy_collapse,
    "entropy-surge": learning.entropy_surge,
}


def alarms(records: Sequence[StepRecord], experiment: Experiment | None = None) -> list[Alarm]:
    """At most one of each kind, critical ones first, then in the order of the steps they began at."""
    evidence = Evidence.of(records, experiment)
    raised = []
    for name, rule in RULES.items():
        if found := rule(evidence):
            raised.append(
                Alarm(name, min(found.steps), max(found.steps), found.severity, found.what, found.cause, found.cure)
            )
    return sorted(raised, key=lambda alarm: (alarm.severity != "critical", alarm.step))


def alarms_in_force(records: Sequence[StepRecord], experiment: Experiment, switches: "Sequence[Switch]") -> list[Alarm]:
    """Of the steps under the Recipe that the run was last switched to: what an earlier one meant no longer counts."""
    if not switches:
        return alarms(records, experiment)
    latest = switches[-1]
    since = [record for record in records if record.step >= latest.step]
    return alarms(since, experiment.override({"recipe": latest.recipe}))
