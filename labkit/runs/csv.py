"""write_csv(path, runs): every step of every run and every number of it, one row a step, for a spreadsheet or pandas.

Nothing is sampled or smoothed. Columns, in this order:

    run, recipe, seed                 which run
    step, recipe_version, ...         the record's own counters; time in seconds since 1970, elapsed in seconds
    <metric>                          as in metrics.jsonl (`labkit metrics` says what each means)
    tokens_<kind>, seconds_<phase>    counts of the batch, wall-clock seconds
    scale_<q|k|v>_<layer>             of the FP8 cache that the step sampled with
    active_<component>                what really ran: fp8, emulated, bf16, off or fault
    events                            separated by "; "

An empty cell was not measured in that step; nan, inf and -inf are written as such. Floats have all their digits. A
column is there if any of the runs has it.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.runs.compare import Recorded
from labkit.runs.record import StepRecord

_COUNTERS = ("step", "recipe_version", "weight_version", "time", "elapsed")


def write_csv(path: str | Path, runs: Sequence[Recorded]) -> Path:
    """Raises ValueError if there are no runs."""
    if not runs:
        raise ValueError("nothing to write: give at least one run")
    rows = [row for run in runs for row in _rows(run)]
    groups: list[dict[str, None]] = [{} for _ in range(6)]
    for row in rows:
        for group, cells in zip(groups, row, strict=True):
            group |= dict.fromkeys(cells)
    columns = [column for group in groups for column in group]
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({column: value for cells in row for column, value in cells.items()})
    return path


def _rows(run: Recorded) -> Iterator[list[dict[str, Any]]]:
    """The cells of each step, in the groups that the columns are ordered by."""
    experiment = run.experiment
    for record in run.records():
        which = {"run": run.id, "recipe": experiment.recipe.name, "seed": experiment.seed}
        counters = {name: getattr(record, name) for name in _COUNTERS}
        yield [which | counters, dict(record.metrics), _amounts(record), _scales(record), _active(record), _end(record)]


def _amounts(record: StepRecord) -> dict[str, float]:
    tokens = {f"tokens_{kind}": count for kind, count in record.tokens.items()}
    return tokens | {f"seconds_{phase}": seconds for phase, seconds in record.timings.items()}


def _scales(record: StepRecord) -> dict[str, float]:
    return {
        f"scale_{part}_{layer}": scale
        for part, by_layer in (record.kv_scales or {}).items()
        for layer, scale in enumerate(by_layer)
    }


def _active(record: StepRecord) -> dict[str, str]:
    return {f"active_{component}": active["state"] for component, active in record.active.items()}


def _end(record: StepRecord) -> dict[str, str]:
    return {"events": "; ".join(record.events)}
