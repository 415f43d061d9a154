"""The demo: three recipes, everything else equal. What does FP8 change, and what not?

    bf16           nothing in FP8: the control
    fp8-rollout    FP8 linears while generating, BF16 training: generator and trainer disagree
    fp8-e2e        FP8 linears on both sides, with importance-sampling correction

Each arm is a Run of its own (a worker process and a run directory that `labkit list` shows). The three
recipes of a seed run at the same time on equal shares of the cores, so that whatever else a machine does
slows all of them alike; a model that is large for that (three copies of SmolLM2 with optimizer are about
11 GB) has them one after the other.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from labkit.config import Experiment
from labkit.config.presets import preset
from labkit.runs.compare import EMULATED, Summary, step_seconds, summarize, tmpe_text
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.store import RunError

RECIPES = ("bf16", "fp8-rollout", "fp8-e2e")
_POLL = 0.2
_CURVES = (
    "reward",
    "accuracy",
    "heldout_accuracy",
    "token_mult_prob_error",
    "gen_kl_error",
    "ess",
    "entropy",
)


@dataclass(frozen=True)
class Arm:
    """The runs of one recipe, a seed each."""

    recipe: str
    summaries: list[Summary]

    def mean(self, value: Callable[[Summary], float]) -> float:
        """Over the seeds that measured it; NaN if none did."""
        values = [value(s) for s in self.summaries if not math.isnan(value(s))]
        return statistics.fmean(values) if values else math.nan

    def spread(self, value: Callable[[Summary], float]) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        values = [value(s) for s in self.summaries if not math.isnan(value(s))]
        return statistics.stdev(values) if len(values) > 1 else 0.0


def run_demo(
    steps: int | None = None,
    seeds: int = 1,
    model: str = "tiny",
    progress: Callable[[Run, StepRecord], None] | None = None,
    root: str | Path | None = None,
) -> list[Run]:
    """Run the three recipes for seeds 0 … seeds − 1 and return the runs, in the order in which they ran.

    `steps` None: the model's own number. `progress` is called after each step. Blocks until all runs are
    done; interrupted, it stops the runs at hand. Raises RunError if a run does not come to its end.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, not {seeds}")
    together = model == "tiny"
    overrides: dict[str, Any] = {} if steps is None else {"steps": steps}
    if together:
        overrides["threads"] = max(1, (os.cpu_count() or 1) // len(RECIPES))
    runs: list[Run] = []
    for seed in range(seeds):
        experiments = [preset(name, model, seed=seed, **overrides) for name in RECIPES]
        for batch in [experiments] if together else [[experiment] for experiment in experiments]:
            runs += _carry_out(batch, progress, root)
    return runs


def _carry_out(
    experiments: Sequence[Experiment],
    progress: Callable[[Run, StepRecord], None] | None,
    root: str | Path | None,
) -> list[Run]:
    """Run experiments side by side to their end; if one fails, or on an interrupt, stop the others."""
    runs: list[Run] = []
    try:
        for experiment in experiments:
            runs.append(Run.start(experiment, root))
        while any([_watch(run, progress) for run in runs]):
            time.sleep(_POLL)
    except BaseException:
        _end(runs)
        raise
    return runs


def _end(runs: Sequence[Run]) -> None:
    """Stop the runs and wait until they have; interrupted once more, kill them."""
    try:
        for run in runs:
            if run.alive:
                run.stop()
        for run in runs:
            run.wait()
    except BaseException:
        for run in runs:
            run.kill()
        raise


def _watch(run: Run, progress: Callable[[Run, StepRecord], None] | None) -> bool:
    """Report a run's new steps; whether it is still going."""
    status = run.status
    for record in run.tail():
        if progress:
            progress(run, record)
    if not status.active and status.name != "done":
        raise RunError(f"the demo ends here: {run.id} is {status}")
    return status.active


def arms(runs: Sequence[Run]) -> list[Arm]:
    names = list(dict.fromkeys(run.experiment.recipe.name for run in runs))
    return [Arm(name, [summarize(run) for run in runs if run.experiment.recipe.name == name]) for name in names]


def table(runs: Sequence[Run]) -> Table:
    """A column per recipe: mean over seeds, ± standard deviation where there are several."""
    seeds = len({run.experiment.seed for run in runs})
    drawn = Table(title=f"{seeds} seed{'s' if seeds > 1 else ''}, {runs[0].experiment.model}", title_justify="left")
    found = arms(runs)
    drawn.add_column("")
    for arm in found:
        drawn.add_column(arm.recipe, justify="right")
    for _, title, value, form in _QUANTITIES:
        drawn.add_row(title, *[_cell(arm, value, form) for arm in found])
    if _emulated(found):
        drawn.caption, drawn.caption_justify = f"FP8 {EMULATED}", "left"
    return drawn


def _emulated(found: Sequence[Arm]) -> bool:
    return any(summary.throughput.emulated for arm in found for summary in arm.summaries)


def reading(runs: Sequence[Run]) -> list[str]:
    """What the demo shows and what it does not, from the numbers measured."""
    found = arms(runs)
    mismatch = ", ".join(f"{arm.recipe} {tmpe_text(arm.mean(lambda s: s.tmpe_median))}" for arm in found)
    lines = [
        f"Mismatch between rollout and training (median TMPE): {mismatch}. "
        "FP8 on the rollout side alone makes the trainer learn from a policy that is not quite its own; "
        "this is the number that the choice of recipe moves."
    ]
    lines.append(_accuracy_line(found, runs))
    if _emulated(found):
        lines.append(f"Speed: FP8 here is {EMULATED}. It computes what FP8 hardware would, and pays extra for it.")
    return lines


def write_json(path: str | Path, runs: Sequence[Run]) -> None:
    """The numbers of the demo: per recipe, per run and per step. Null stands for not measured."""
    content = {
        "schema": 1,
        "arms": {arm.recipe: _arm_numbers(arm) for arm in arms(runs)},
        "runs": [_run_numbers(run) for run in runs],
        "reading": reading(runs),
    }
    Path(path).write_text(json.dumps(_null(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _accuracy_line(found: Sequence[Arm], runs: Sequence[Run]) -> str:
    ends = {arm.recipe: arm.mean(lambda s: s.heldout_end) for arm in found}
    measured = [value for value in ends.values() if not math.isnan(value)]
    if len(measured) < 2:
        return "Accuracy: fewer than two recipes have a held-out accuracy, so there is nothing to compare."
    gap = max(measured) - min(measured)
    prompts = runs[0].experiment.eval_prompts * len(found[0].summaries)
    middle = statistics.fmean(measured)
    error = math.sqrt(2 * middle * (1 - middle) / prompts)  # of the difference of two independent shares
    values = ", ".join(f"{name} {value:.3f}" for name, value in ends.items())
    verdict = (
        "no difference that this many prompts could show. That does not prove them equal, but it is what to "
        "expect at this size: the mismatch moves, the accuracy hardly"
        if gap <= 2 * error
        else "more than the prompts' sampling error explains; seeds vary too: run more before believing it"
    )
    gap_text = f"The largest gap is {gap:.3f} (standard error {error:.3f})"
    return f"Held-out accuracy at the end: {values}. {gap_text}: {verdict}."


def _arm_numbers(arm: Arm) -> dict[str, Any]:
    return {key: {"mean": arm.mean(value), "std": arm.spread(value)} for key, _, value, _ in _QUANTITIES}


def _run_numbers(run: Run) -> dict[str, Any]:
    records = run.records()
    return {
        "id": run.id,
        "recipe": run.experiment.recipe.name,
        "seed": run.experiment.seed,
        "summary": asdict(summarize(run)),
        "step": [record.step for record in records],
        "step_seconds": [step_seconds(record) for record in records],
        **{name: [record.metric(name) for record in records] for name in _CURVES},
    }


def _null(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _null(item) for key, item in value.items()}
    return [_null(item) for item in value] if isinstance(value, list) else value


def _cell(arm: Arm, value: Callable[[Summary], float], form: str) -> str:
    mean, spread = arm.mean(value), arm.spread(value)
    if math.isnan(mean):
        return "–"
    text = f"{mean:{form}}" if mean else "0"
    return f"{text} ± {spread:{form}}" if spread else text


_QUANTITIES: list[tuple[str, str, Callable[[Summary], float], str]] = [
    ("heldout_start", "held-out accuracy, start", lambda s: s.heldout_start, ".3f"),
    ("heldout_end", "held-out accuracy, end", lambda s: s.heldout_end, ".3f"),
    ("tmpe_excess", "TMPE − 1, median", lambda s: s.tmpe_median - 1.0, ".1e"),
    ("gen_kl", "generation KL, mean", lambda s: s.gen_kl, ".1e"),
    ("ess", "ESS, mean", lambda s: s.ess, ".4f"),
    ("rollout_rate", "rollout tok/s", lambda s: s.throughput.rollout, ",.0f"),
    ("train_rate", "train tok/s", lambda s: s.throughput.train, ",.0f"),
    ("end_to_end", "end-to-end tok/s", lambda s: s.throughput.end_to_end, ",.0f"),
    ("step_seconds", "seconds per step", lambda s: s.step_seconds, ".2f"),
]
