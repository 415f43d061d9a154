"""The failure gallery: faults of real FP8 RL systems, each to be run beside its control.

    from labkit import gallery

    gallery.table()                                  # what there is
    print(gallery.text("scales-stale-growth"))       # one of them: what is wrong, where to look, what was seen here
    control, faulty = gallery.run("scales-stale-growth")      # two Runs, started side by side

A fault is a case of `labkit.config.faults`. Nothing turns one on but its name in `Experiment.faults`, or the settings
it is made of; a run that has one says so in every record and in its first event.
"""

import contextlib
import math
import os
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from labkit.config import ConfigError, Experiment, preset
from labkit.config.errors import did_you_mean
from labkit.config.faults import CASES, Case
from labkit.runs.metrics import describe
from labkit.runs.process import Run


def faults() -> list[Case]:
    return list(CASES.values())


def find(name: str) -> Case:
    if name not in CASES:
        raise ConfigError(f"gallery: no fault {name!r}; {did_you_mean(name, CASES)}")
    return CASES[name]


def experiments(name: str, **overrides: Any) -> tuple[Experiment, Experiment]:
    """(control, faulty): they differ in the fault alone. `overrides` go to both."""
    case = find(name)
    control = preset(case.preset, **{**case.settings, "eval_every": case.settings["steps"], **overrides})
    faulty = control.override(case.faulty)
    return control.override({"name": f"{name}-control"}), faulty.override({"name": name})


def run(name: str, root: str | Path | None = None, **overrides: Any) -> tuple[Run, Run]:
    """Start control and faulty run side by side, each on half of the cores. Returns at once."""
    overrides = {"threads": max(1, (os.cpu_count() or 1) // 2), **overrides}
    control, faulty = experiments(name, **overrides)
    first = Run.start(control, root)
    try:
        return first, Run.start(faulty, root)
    except BaseException:
        with contextlib.suppress(OSError):
            first.kill()
        raise


def table() -> Table:
    drawn = Table(title="failure gallery", title_justify="left", show_lines=True)
    drawn.add_column("fault", no_wrap=True)
    drawn.add_column("what is wrong")
    drawn.add_column("what it does here")
    for case in faults():
        drawn.add_row(case.name, case.wrong, case.finding)
    drawn.caption = "labkit gallery NAME runs one beside its control"
    return drawn


def reading(name: str, runs: Sequence[Run]) -> Table:
    """What to look at, in the control and in the faulty run: the median over the steps, and the last."""
    case = find(name)
    drawn = Table(title=f"{name}: median over the steps (last)", title_justify="left")
    drawn.add_column("metric", overflow="fold")
    for heading in ("control", "faulty"):
        drawn.add_column(heading, justify="right")
    for metric in dict.fromkeys([*case.look_at, "heldout_accuracy"]):
        drawn.add_row(metric, *(_median_and_last(each, metric) for each in runs))
    drawn.add_row("ended", *(str(each.status) for each in runs))
    return drawn


def _median_and_last(of: Run, metric: str) -> str:
    values = [value for record in of.records() if not math.isnan(value := record.metric(metric))]
    return f"{statistics.median(values):.4g} ({values[-1]:.4g})" if values else "–"


def text(name: str, width: int = 100) -> str:
    """Everything that is known about one fault."""
    case = find(name)
    settings = {**case.settings, **case.faulty}
    lines = {
        "what is wrong": case.wrong,
        "reported": case.reported,
        "how": "code broken on purpose" if case.injected else "settings that go wrong",
        "shown with": f"{case.preset}, " + ", ".join(f"{key}={value}" for key, value in settings.items()),
        "look at": "; ".join(f"{metric} ({describe(metric).definition})" for metric in case.look_at) or "how it ends",
        "alarm": case.alarm or "none",
        "cure": case.cure,
        "what it does here": case.finding,
    }
    labels = max(map(len, lines))
    wrapped = (
        textwrap.fill(f"{label:{labels}}  {line}", width, subsequent_indent=" " * (labels + 2))
        for label, line in lines.items()
    )
    return "\n".join([case.name, *wrapped])
