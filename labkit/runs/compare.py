"""compare(runs): what differs between runs, and what came of it, side by side.

Throughput is given four ways, over all train steps but the first (which warms caches and allocators)
where there are more; seconds are wall-clock, and evaluation, which no recipe changes, is left out:

    rollout     generated tokens / seconds of generate
    train       prompt + generated tokens that passed through the update / seconds of update
                (padded: all positions that the update computed)
    end-to-end  prompt + generated tokens / seconds of the step
    effective   generated tokens that still counted after rejection / seconds of the step

Emulated FP8 does extra work, so its rates say what this machine did and nothing about FP8 hardware: they
carry the mark "emulated: not a speed-up".
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.table import Table

from labkit.config import Experiment
from labkit.config.words import said
from labkit.runs.record import StepRecord

EMULATED = "emulated: not a speed-up"


class Recorded(Protocol):
    """What a comparison needs of a run."""

    @property
    def id(self) -> str: ...
    @property
    def experiment(self) -> Experiment: ...
    def records(self, since: int = 0) -> list[StepRecord]: ...


@dataclass(frozen=True)
class Throughput:
    """Tokens per second, four ways; NaN where a phase took no time or was not timed."""

    rollout: float
    train: float
    train_padded: float
    end_to_end: float
    effective: float
    emulated: bool


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Accuracies are shares; NaN stands for not measured."""

    run: str
    steps: int
    heldout_start: float
    heldout_end: float
    heldout_best: float
    tmpe_median: float
    tmpe_last: float
    gen_kl: float
    ess: float
    ess_raw: float
    kept: float
    throughput: Throughput
    step_seconds: float
    recalibrate_share: float
    refit_share: float


@dataclass(frozen=True)
class Comparison:
    """Columns are runs: `settings` holds only what differs between them, `summaries` what came of it."""

    labels: list[str]
    settings: dict[str, list[Any]]
    summaries: list[Summary]

    def rows(self) -> list[tuple[str, list[str]]]:
        """(name, one text per run): first the settings that differ, then the results."""
        rows = [(key, [said(value) for value in values]) for key, values in self.settings.items()]
        for name, show in _RESULTS:
            cells = [show(summary) for summary in self.summaries]
            rows.append((name, cells))
        if any(summary.throughput.emulated for summary in self.summaries):
            rows.append(("FP8 speed", [EMULATED if s.throughput.emulated else "–" for s in self.summaries]))
        return rows

    def table(self) -> Table:
        """The same as a rich table, for a terminal or a notebook."""
        table = Table()
        table.add_column("")
        for label in self.labels:
            table.add_column(label, justify="right", overflow="fold")
        for index, (name, cells) in enumerate(self.rows()):
            table.add_row(name, *cells, end_section=index == len(self.settings) - 1)
        return table


def compare(runs: Sequence[Recorded]) -> Comparison:
    """Compare runs, finished or not. Raises ValueError if there are none."""
    if not runs:
        raise ValueError("nothing to compare: give at least one run")
    flat = [_flatten(run.experiment.model_dump(mode="json")) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    settings = {
        key: [settings.get(key) for settings in flat]
        for key in keys
        if key not in ("name", "recipe.name") and any(s.get(key) != flat[0].get(key) for s in flat)
    }
    return Comparison(labels(runs), settings, [summarize(run) for run in runs])


def labels(runs: Sequence[Recorded]) -> list[str]:
    """The shortest names that tell the runs apart: recipe; recipe and seed; those and the model; the id."""
    experiments = [run.experiment for run in runs]
    choices = [
        [e.recipe.name for e in experiments],
        [f"{e.recipe.name} · seed {e.seed}" for e in experiments],
        [f"{e.recipe.name} · {e.model} · seed {e.seed}" for e in experiments],
    ]
    return next((names for names in choices if len(set(names)) == len(names)), [run.id for run in runs])


def summarize(run: Recorded) -> Summary:
    records = run.records()
    heldout = _measured(records, "heldout_accuracy")
    tmpe = _measured(records, "token_mult_prob_error")
    timed = train_steps(records)
    seconds = sum(map(step_seconds, timed))
    return Summary(
        run=run.id,
        steps=records[-1].step if records else 0,
        heldout_start=heldout[0] if heldout else math.nan,
        heldout_end=heldout[-1] if heldout else math.nan,
        heldout_best=max(heldout, default=math.nan),
        tmpe_median=statistics.median(tmpe) if tmpe else math.nan,
        tmpe_last=tmpe[-1] if tmpe else math.nan,
        gen_kl=_mean(_measured(records, "gen_kl_error")),
        ess=_mean(_measured(records, "ess")),
        ess_raw=_mean(_measured(records, "ess_raw")),
        kept=_mean(_measured(records, "kept_share")),
        throughput=throughput(records),
        step_seconds=_ratio(seconds, len(timed)),
        recalibrate_share=_ratio(_seconds(timed, "recalibrate"), seconds),
        refit_share=_ratio(_seconds(timed, "refit"), seconds),
    )


def throughput(records: Sequence[StepRecord]) -> Throughput:
    timed = train_steps(records)
    generated = _tokens(timed, "generated")
    both = generated + _tokens(timed, "prompt")
    counted = sum(record.tokens.get("generated", 0) * _kept_share(record) for record in timed)
    step = sum(map(step_seconds, timed))
    update = _seconds(timed, "update")
    return Throughput(
        rollout=_ratio(generated, _seconds(timed, "generate")),
        train=_ratio(_tokens(timed, "trained"), update),
        train_padded=_ratio(_tokens(timed, "padded"), update),
        end_to_end=_ratio(both, step),
        effective=_ratio(counted, step),
        emulated=is_emulated(records),
    )


def step_seconds(record: StepRecord) -> float:
    """Wall-clock seconds of a step, evaluation left out."""
    return sum(seconds for phase, seconds in record.timings.items() if phase != "evaluate")


def is_emulated(records: Iterable[StepRecord]) -> bool:
    return any(active["state"] == "emulated" for record in records for active in record.active.values())


def train_steps(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps whose time counts: those that trained (step 0 only evaluates), the first of them left out."""
    trained = [record for record in records if record.tokens]
    return trained[1:] or trained


def _tokens(records: Sequence[StepRecord], kind: str) -> int:
    return sum(record.tokens.get(kind, 0) for record in records)


def _kept_share(record: StepRecord) -> float:
    share = record.metric("kept_share")
    return 1.0 if math.isnan(share) else share


def _measured(records: Sequence[StepRecord], name: str) -> list[float]:
    values = [record.metric(name) for record in records]
    return [value for value in values if not math.isnan(value)]


def _seconds(records: Sequence[StepRecord], phase: str) -> float:
    return sum(record.timings.get(phase, 0.0) for record in records)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _ratio(amount: float, by: float) -> float:
    return amount / by if by else math.nan


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def tmpe_text(value: float) -> str:
    """TMPE so that "exact", "nearly exact" and "broken" can be told apart."""
    if value == 1.0:
        return "1 (exact)"
    if value < 1.0001:
        return f"1 + {value - 1:.1e}"
    return _number(value, ".3g" if value >= 100 else ".5f")


_RESULTS = [
    ("steps done", lambda s: str(s.steps)),
    ("held-out accuracy, start", lambda s: _number(s.heldout_start, ".3f")),
    ("held-out accuracy, end", lambda s: _number(s.heldout_end, ".3f")),
    ("held-out accuracy, best", lambda s: _number(s.heldout_best, ".3f")),
    ("TMPE, median", lambda s: tmpe_text(s.tmpe_median)),
    ("TMPE, last", lambda s: tmpe_text(s.tmpe_last)),
    ("generation KL, mean", lambda s: _number(s.gen_kl, ".2e")),
    ("ESS before correction, mean", lambda s: _number(s.ess_raw, ".4f")),
    ("ESS of the weights, mean", lambda s: _number(s.ess, ".4f")),
    ("tokens kept, mean", lambda s: _number(s.kept, ".1%")),
    ("rollout tok/s", lambda s: _number(s.throughput.rollout, ",.0f")),
    ("train tok/s", lambda s: _number(s.throughput.train, ",.0f")),
    ("train tok/s, padded", lambda s: _number(s.throughput.train_padded, ",.0f")),
    ("end-to-end tok/s", lambda s: _number(s.throughput.end_to_end, ",.0f")),
    ("effective tok/s", lambda s: _number(s.throughput.effective, ",.0f")),
    ("seconds per step", lambda s: _number(s.step_seconds, ".2f")),
    ("share of recalibrate", lambda s: _number(s.recalibrate_share, ".1%")),
    ("share of refit", lambda s: _number(s.refit_share, ".1%")),
]
