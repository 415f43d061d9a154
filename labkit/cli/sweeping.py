"""Commands that ask a question of many runs: sweeps, their reports, NVIDIA's claims."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from labkit.cli.app import app, check_output
from labkit.terminal import console

if TYPE_CHECKING:
    from labkit.runs.record import StepRecord
    from labkit.sweeps import Cell, Finished, Sweep

Parallel = Annotated[int | None, typer.Option(min=1, help="cells at once, if cores and memory allow as many")]
Retry = Annotated[bool, typer.Option("--retry", help="do cells that failed again")]
Html = Annotated[Path | None, typer.Option(help="write the report to this page")]


class _FileOrCommand(TyperGroup):
    """`labkit sweep FILE` is `labkit sweep run FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


sweeps = typer.Typer(
    cls=_FileOrCommand, no_args_is_help=True, help="Arms crossed with seeds from a YAML file: labkit sweep FILE."
)
app.add_typer(sweeps, name="sweep")


@sweeps.command("run")
def run(
    file: Annotated[Path, typer.Argument(help="a YAML file: preset or experiment, axes or arms, seeds, question")],
    parallel: Parallel = None,
    retry: Retry = False,
    html: Html = None,
) -> None:
    """Carry a sweep out, or go on with it. Ctrl-C stops its cells with a checkpoint, a second one kills them."""
    from labkit.sweeps import Plan, Sweep

    check_output("--html", html)
    if not file.is_file():
        raise ValueError(f"no file {file}")
    drive(Sweep.create(Plan.from_file(file)), parallel, retry, again=f"labkit sweep {file}")
    show(Sweep.create(Plan.from_file(file)), html)


@sweeps.command("report")
def report(
    folder: Annotated[str, typer.Argument(help="a sweep: its folder or its name", metavar="DIR")],
    html: Html = None,
    md: Annotated[Path | None, typer.Option("--md", help="write the report as Markdown")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="write a line for each cell")] = None,
) -> None:
    """What a sweep shows so far: intervals, verdicts in words, curves."""
    from labkit.sweeps import Sweep
    from labkit.sweeps.report import write_csv, write_markdown

    for option, path in (("--html", html), ("--md", md), ("--csv", csv)):
        check_output(option, path)
    sweep = Sweep.open(folder)
    show(sweep, html)
    if md:
        console.print(f"Markdown: {write_markdown(md, sweep)}", highlight=False)
    if csv:
        console.print(f"cells: {write_csv(csv, sweep)}", highlight=False)


def drive(sweep: "Sweep", parallel: int | None, retry: bool, again: str) -> None:
    """Drive a sweep with a bar for every cell at work, and a line for each that ended."""
    from labkit.sweeps import LocalProcesses

    executor = LocalProcesses(parallel)
    console.print(f"{len(sweep.cells)} cells in {sweep.path}", highlight=False)
    console.print(executor.capacity([cell.experiment for cell in sweep.cells]).why, highlight=False)
    try:
        with SweepDisplay(len(sweep.cells)) as display:
            for finished in sweep.run(executor, retry, display.step):
                display.finished(finished)
    except KeyboardInterrupt:
        console.print(f"interrupted; its cells have stopped with a checkpoint. Go on with: {again}", highlight=False)
        raise typer.Exit(130) from None


def show(sweep: "Sweep", html: Path | None) -> None:
    results = sweep.results()
    console.print(results.table())
    for line in results.reading():
        console.print(f"- {line}", highlight=False, markup=False)
    if html:
        from labkit.sweeps.report import write_html

        console.print(f"report: {write_html(html, sweep)} (open it in a browser)", highlight=False)


class SweepDisplay:
    """On a terminal a bar for the whole and one for each cell at work; elsewhere a line for each cell that ends."""

    def __init__(self, cells: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._whole = self._progress.add_task("cells", total=cells, said="")
        self._bars: dict[str, TaskID] = {}
        self._ended = 0

    def __enter__(self) -> "SweepDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, cell: "Cell", record: "StepRecord") -> None:
        if cell.id not in self._bars:
            self._bars[cell.id] = self._progress.add_task(cell.id, total=cell.experiment.steps, said="")
        heldout = record.metrics.get("heldout_accuracy")
        said: dict[str, Any] = {} if heldout is None else {"said": f"held-out {heldout:.3f}"}
        self._progress.update(self._bars[cell.id], completed=record.step, **said)

    def finished(self, ended: "Finished") -> None:
        if bar := self._bars.pop(ended.cell.id, None):
            self._progress.remove_task(bar)
        self._ended += 1
        self._progress.update(self._whole, completed=self._ended)
        colour = {"done": "green", "unfinished": "yellow"}.get(ended.standing, "red")
        what = f"{ended.standing} before" if ended.before else ended.standing
        reason = f": {ended.reason}" if ended.reason else ""
        text = f"[{colour}]{what}[/{colour}] {escape(ended.cell.id)}{escape(reason)} {_last(ended)}"
        self._progress.console.print(text, highlight=False)


def _last(ended: "Finished") -> str:
    records = ended.run.records()
    values = [value for record in records if (value := record.metrics.get("heldout_accuracy")) is not None]
    minutes = sum(sum(record.timings.values()) for record in records) / 60
    return f"held-out {values[-1]:.3f}, {minutes:.1f} min" if values else ""
