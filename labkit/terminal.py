"""What the command line shows while runs go on: a progress bar with live metrics, events and alarms.

Imports no torch. A run that is watched to its end by Ctrl-C is asked to stop; a second Ctrl-C kills it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from labkit.runs.alarms import Alarm
    from labkit.runs.process import Run
    from labkit.runs.record import StepRecord
    from labkit.runs.state import RunState

console = Console()


def follow(run: "Run", detach: bool, seen: int = -1) -> None:
    """Watch a run to its end, its steps after `seen`. Ctrl-C asks it to stop; a second one kills it."""
    console.print(f"run {run.id} in {run.path}", highlight=False)
    if detach:
        return
    status = watch(run, seen)
    if status.name == "failed":
        raise ValueError(f"{run.id} failed: {status.reason}")
    if status.name == "stopped":
        records = run.records()
        when = f"after step {records[-1].step}" if records else "before step 0"
        console.print(f"stopped {when}; go on with: labkit resume {run.id}", highlight=False)
        raise typer.Exit(130)
    from labkit.runs.compare import compare

    console.print(compare([run]).table())


def print_alarms(alarms: "Sequence[Alarm]") -> None:
    """Each alarm: since when, what was seen, why that happens and what to do about it."""
    if not alarms:
        console.print("no alarms")
    for alarm in alarms:
        colour = "red" if alarm.severity == "critical" else "yellow"
        steps = f"step {alarm.step}" if alarm.step == alarm.last_step else f"steps {alarm.step} to {alarm.last_step}"
        console.print(f"[{colour}]{alarm.severity}[/{colour}] [bold]{escape(alarm.name)}[/bold], {steps}: "
                      f"{escape(alarm.what)}", highlight=False)  # fmt: skip
        console.print(f"    cause: {escape(alarm.cause)}\n    cure:  {escape(alarm.cure)}", highlight=False)


def watch(run: "Run", seen: int = -1) -> "RunState":
    """Show a run's steps until it ends, however it ends."""
    with StepDisplay() as display:
        while True:
            try:
                return run.wait(on_record=lambda record: display.step(run, record) if record.step > seen else None)
            except KeyboardInterrupt:
                if run.alive:
                    run.stop()
                    display.say(f"{run.id} is stopping after this micro-step; Ctrl-C again kills it")


class StepDisplay:
    """A progress bar with rate, time left and live metrics on a terminal; a line per step elsewhere."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._records: dict[str, list[StepRecord]] = {}
        self._raised: set[tuple[str, str]] = set()

    def __enter__(self) -> "StepDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def step(self, run: "Run", record: "StepRecord") -> None:
        if run.id not in self._bars:
            name = f"{run.experiment.recipe.name}, seed {run.experiment.seed}"
            self._bars[run.id] = self._progress.add_task(name, total=run.experiment.steps, rate="", metrics="")
        metrics = _live_metrics(record)
        for event in record.events:
            self.say(f"{run.id} step {record.step}: {event}")
        self._raise_alarms(run, record)
        if not console.is_terminal:
            print(f"{run.id} step {record.step}/{run.experiment.steps} {metrics}", flush=True)
        rate = f"{sum(record.timings.values()):.1f} s/step"
        self._progress.update(self._bars[run.id], completed=record.step, rate=rate, metrics=metrics)

    def _raise_alarms(self, run: "Run", record: "StepRecord") -> None:
        """Say an alarm when it is first raised; `labkit show` has its cause and cure."""
        from labkit.runs.alarms import alarms_in_force

        records = self._records.setdefault(run.id, [])
        records.append(record)
        for alarm in alarms_in_force(records, run.experiment, run.switches()):
            if (run.id, alarm.name) not in self._raised:
                self._raised.add((run.id, alarm.name))
                self.say(f"{run.id} step {record.step}: {alarm.severity}: {alarm.what}. {alarm.cure}")


def _live_metrics(record: "StepRecord") -> str:
    shown: list[tuple[str, str, Callable[[float], str]]] = [
        ("accuracy", "accuracy", lambda value: f"{value:.2f}"),
        ("heldout_accuracy", "held-out", lambda value: f"{value:.3f}"),
        ("token_mult_prob_error", "TMPE", lambda value: f"{value:.4f}"),
    ]
    values = [(label, show, record.metrics.get(name)) for name, label, show in shown]
    return " · ".join(f"{label} {show(value)}" for label, show, value in values if value is not None)
