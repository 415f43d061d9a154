"""The command line: `labkit --help`.

A thin client like the notebook: it starts workers, watches run directories and draws, and imports no
torch (but for `fetch` and `warmstart`, which make models). Mistakes end in one line on stderr and exit
code 2; LABKIT_DEBUG=1 shows the traceback as well. A run that was stopped ends with exit code 130.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from labkit.config import Experiment
    from labkit.runs.process import Run
    from labkit.runs.record import StepRecord
    from labkit.runs.state import RunState
    from labkit.runs.store import RunDirectory

app = typer.Typer(
    help="An FP8 reinforcement-learning lab. Runs are kept in ./runs, or in the folder named by LABKIT_RUNS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
RunName = Annotated[str, typer.Argument(help="a run: its id, the beginning of its id, or its path", metavar="RUN")]
Detach = Annotated[bool, typer.Option("--detach", help="return at once; `labkit show` watches")]


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="a YAML file or a preset (see `labkit presets`)")],
    assignments: Annotated[
        list[str] | None, typer.Argument(help="settings to change", metavar="[KEY=VALUE]...")
    ] = None,
    detach: Detach = False,
) -> None:
    """Run an experiment: `labkit run fp8-e2e steps=20 seed=1`. Ctrl-C stops it, a second one kills it."""
    from labkit.runs.process import Run

    started = Run.start(_experiment(experiment, assignments or []))
    _follow(started, detach)


@app.command()
def resume(run: RunName, detach: Detach = False) -> None:
    """Continue a stopped, failed or killed run from its last checkpoint."""
    from labkit.runs.process import Run

    opened = Run.open(run)
    records = opened.records()
    opened.resume_from_checkpoint()
    _follow(opened, detach, seen=records[-1].step if records else -1)


@app.command()
def stop(run: RunName) -> None:
    """Stop a run after its current micro-step, with a checkpoint. A second stop kills it."""
    from labkit.runs.process import Run

    opened = Run.open(run)
    opened.stop()
    console.print(f"{opened.id}: {'killed' if opened.status.reason == 'killed' else 'stopping'}")


@app.command("list")
def list_runs() -> None:
    """All runs, the newest first."""
    from labkit.runs.store import list_directories, runs_root

    directories = list_directories()
    table = Table(title=f"{len(directories)} runs in {runs_root()}", title_justify="left")
    table.add_column("run", no_wrap=True)
    table.add_column("state", overflow="fold")
    for column in ("step", "held-out", "TMPE"):
        table.add_column(column, no_wrap=True)
    table.add_column("recipe", no_wrap=True, overflow="ellipsis")
    for directory in directories:
        try:
            cells = _row(directory)
        except (ValueError, OSError) as error:
            cells = [f"unreadable: {' '.join(str(error).split())}"]
        table.add_row(directory.id, *map(escape, cells))
    console.print(table)


def _row(directory: "RunDirectory") -> list[str]:
    from labkit.runs.process import Run

    found = Run(directory)
    records = found.records()
    heldout = [value for record in records if (value := record.metrics.get("heldout_accuracy")) is not None]
    tmpe = [value for record in records if (value := record.metrics.get("token_mult_prob_error")) is not None]
    return [
        str(found.status),
        f"{records[-1].step if records else 0}/{found.experiment.steps}",
        f"{heldout[-1]:.3f}" if heldout else "",
        f"{tmpe[-1]:.4f}" if tmpe else "",
        found.experiment.recipe.short_str(),
    ]


@app.command()
def show(run: RunName) -> None:
    """What a run is, where it stands and what was really active in its last step."""
    from labkit.runs.compare import compare
    from labkit.runs.process import Run

    opened = Run.open(run)
    records = opened.records()
    step = f"step {records[-1].step if records else 0}/{opened.experiment.steps}"
    console.print(f"[bold]{opened.id}[/bold]  {opened.status}  {step}")
    console.print(f"{opened.path}\n{opened.experiment.recipe.short_str()}", highlight=False)
    if not records:
        console.print(opened.log(lines=10) or "no step is complete yet", markup=False)
        return
    table = Table(title=f"active in step {records[-1].step}", title_justify="left")
    for column in ("component", "state", "detail"):
        table.add_column(column)
    for component, active in records[-1].active.items():
        table.add_row(component, active["state"], active["detail"])
    console.print(compare([opened]).table())
    console.print(table)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="runs: ids, beginnings of ids or paths", metavar="RUN...")],
    html: Annotated[Path | None, typer.Option(help="write the curves to this page too")] = None,
) -> None:
    """Compare runs: the settings that differ and what came of them."""
    from labkit.runs.compare import compare as compare_runs
    from labkit.runs.process import Run

    _check_output("--html", html)
    opened = [Run.open(name) for name in runs]
    console.print(compare_runs(opened).table())
    if html:
        from labkit.runs.report import write_html

        console.print(f"curves: {write_html(html, opened)}")


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="GRPO steps per run; the model's own number if not given")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="seeds per recipe")] = 1,
    model: Annotated[str, typer.Option(help="tiny or smollm2")] = "tiny",
    json: Annotated[Path | None, typer.Option(help="write the numbers to this file")] = None,
    html: Annotated[
        Path | None, typer.Option(help="page for the curves; demo.html among the runs if not given")
    ] = None,
) -> None:
    """BF16, FP8 rollouts and end-to-end FP8 side by side on this machine."""
    from labkit import demo as demonstration
    from labkit.runs.report import write_html
    from labkit.runs.store import runs_root

    _check_output("--json", json)
    _check_output("--html", html)
    try:
        with _StepDisplay() as display:
            runs = demonstration.run_demo(steps, seeds, model, progress=display.step)
    except KeyboardInterrupt:
        console.print("the demo was interrupted and its runs ended; `labkit list` shows them", highlight=False)
        raise typer.Exit(130) from None
    console.print(demonstration.table(runs))
    lines = demonstration.reading(runs)
    for line in lines:
        console.print(line, highlight=False)
    if json:
        demonstration.write_json(json, runs)
        console.print(f"numbers: {json}")
    title = "BF16, FP8 rollouts, end-to-end FP8"
    page = write_html(html or runs_root() / "demo.html", runs, title=title, notes=lines)
    console.print(f"curves: {page} (open it in a browser)", highlight=False)


@app.command()
def presets() -> None:
    """The named recipes."""
    from labkit.config.presets import DESCRIPTIONS, RECIPES

    table = Table(title="presets", title_justify="left")
    for column in ("name", "recipe", "what it is for"):
        table.add_column(column)
    for name, recipe in RECIPES.items():
        table.add_row(name, recipe.short_str(), DESCRIPTIONS[name])
    console.print(table)


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Fetch a model's weights once, for all later runs."""
    if model != "smollm2":
        raise ValueError(f"cannot fetch {model!r}: smollm2 is the only model to fetch")
    from labkit.models.smollm2 import fetch as fetch_smollm2

    console.print(f"smollm2 is in {fetch_smollm2()}")


@app.command()
def warmstart(
    out: Annotated[Path, typer.Option(help="folder for the policy, in Hugging Face layout")],
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train the tiny policy from nothing, as the shipped one was (some minutes)."""
    from labkit.models.warmstart import warmstart as train

    with console.status("warm start") as status:
        train(out, seed, progress=lambda step, loss: status.update(f"step {step}, loss {loss:.3f}"))
    console.print(f"the tiny policy of seed {seed} is in {out}")


def main() -> None:
    """Entry point of the `labkit` command."""
    try:
        app()
    except Exception as error:
        if os.environ.get("LABKIT_DEBUG") == "1":
            raise
        known = isinstance(error, ValueError | OSError | ImportError)
        text = str(error) if known else f"{type(error).__name__}: {error} (LABKIT_DEBUG=1 shows where)"
        print(f"labkit: {text}", file=sys.stderr)
        sys.exit(2)


def _experiment(source: str, assignments: list[str]) -> "Experiment":
    """From a YAML file or a preset's name, with the assignments applied."""
    from labkit.config import Experiment
    from labkit.config.overrides import parse_assignments
    from labkit.config.presets import preset

    changes = parse_assignments(assignments)
    if Path(source).suffix in (".yaml", ".yml") or Path(source).is_file():
        if not Path(source).is_file():
            raise ValueError(f"no file {source}")
        return Experiment.from_yaml(Path(source)).override(changes)
    return preset(source, changes.pop("model", "tiny"), **changes)


def _check_output(option: str, path: Path | None) -> None:
    """Refuse a file that can't be written before the work that would end in it."""
    if path and path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; give the name of a file")
    if path and not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: can't be written; choose another place")


def _follow(run: "Run", detach: bool, seen: int = -1) -> None:
    """Watch a run to its end, its steps after `seen`. Ctrl-C asks it to stop; a second one kills it."""
    console.print(f"run {run.id} in {run.path}", highlight=False)
    if detach:
        return
    status = _until_ended(run, seen)
    if status.name == "failed":
        raise ValueError(f"{run.id} failed: {status.reason}")
    if status.name == "stopped":
        records = run.records()
        when = f"after step {records[-1].step}" if records else "before step 0"
        console.print(f"stopped {when}; go on with: labkit resume {run.id}", highlight=False)
        raise typer.Exit(130)
    from labkit.runs.compare import compare

    console.print(compare([run]).table())


def _until_ended(run: "Run", seen: int) -> "RunState":
    with _StepDisplay() as display:
        while True:
            try:
                return run.wait(on_record=lambda record: display.step(run, record) if record.step > seen else None)
            except KeyboardInterrupt:
                if run.alive:
                    run.stop()
                    display.say(f"{run.id} is stopping after this micro-step; Ctrl-C again kills it")


class _StepDisplay:
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

    def __enter__(self) -> "_StepDisplay":
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
        if not console.is_terminal:
            print(f"{run.id} step {record.step}/{run.experiment.steps} {metrics}", flush=True)
        rate = f"{sum(record.timings.values()):.1f} s/step"
        self._progress.update(self._bars[run.id], completed=record.step, rate=rate, metrics=metrics)


def _live_metrics(record: "StepRecord") -> str:
    shown: list[tuple[str, str, Callable[[float], str]]] = [
        ("accuracy", "accuracy", lambda value: f"{value:.2f}"),
        ("heldout_accuracy", "held-out", lambda value: f"{value:.3f}"),
        ("token_mult_prob_error", "TMPE", lambda value: f"{value:.4f}"),
    ]
    values = [(label, show, record.metrics.get(name)) for name, label, show in shown]
    return " · ".join(f"{label} {show(value)}" for label, show, value in values if value is not None)


if __name__ == "__main__":
    main()
