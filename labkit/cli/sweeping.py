"""Commands that ask a question of many runs: sweeps, their reports, NVIDIA's claims."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from labkit.cli.app import app, check_output
from labkit.terminal import console

if TYPE_CHECKING:
    from labkit.runs.record import StepRecord
    from labkit.sweeps import Cell, Finished, Sweep
    from labkit.sweeps.campaign import Campaign
    from labkit.sweeps.executor import Executor

Parallel = Annotated[int | None, typer.Option(min=1, help="cells at once, if cores and memory allow as many")]
Retry = Annotated[bool, typer.Option("--retry", help="do cells that failed again")]
RayAddress = Annotated[
    str | None,
    typer.Option(help='cells over Ray: "local" for one of the sweep\'s own, or HOST:PORT of a cluster that is there'),
]
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
    ray_address: RayAddress = None,
    retry: Retry = False,
    html: Html = None,
) -> None:
    """Carry a sweep out, or go on with it. Ctrl-C stops its cells with a checkpoint, a second one kills them."""
    from labkit.sweeps import Plan, Sweep, executor_for
    from labkit.sweeps.executor import check_ray

    check_output("--html", html)
    if not file.is_file():
        raise ValueError(f"no file {file}")
    check_ray(ray_address)
    sweep = Sweep.create(Plan.from_file(file))
    with executor_for(parallel, ray_address) as where:
        drive(sweep, where, retry, again=f"labkit sweep {file}", then=lambda: show(sweep, html))


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


@app.command()
def claims(
    name: Annotated[str, typer.Argument(help="a claim, or all; they are listed if not given", metavar="[NAME]")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="seeds of each arm: 0, 1, …")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="GRPO steps of each cell; 60 if not given")] = None,
    model: Annotated[str, typer.Option(help="put them to this model; smollm2, for one")] = "tiny",
    parallel: Parallel = None,
    ray_address: RayAddress = None,
    retry: Retry = False,
    html: Annotated[Path | None, typer.Option(help="write the table and its sources to this page")] = None,
) -> None:
    """What NVIDIA says about FP8 RL beside what this lab finds. With a name: run it, or go on with it."""
    from labkit.sweeps import executor_for
    from labkit.sweeps.campaign import Campaign
    from labkit.sweeps.claims import CLAIMS, find

    check_output("--html", html)
    chosen = find(name or "all")
    campaign = Campaign(chosen, seeds, steps, model=model)
    if name:
        console.print(campaign.estimate(), highlight=False)
        options = f" --seeds {seeds}" + (f" --steps {steps}" if steps else "")
        options += f" --model {model}" if model != "tiny" else ""
        again = f"labkit claims {name}{options}"
        with executor_for(parallel, ray_address) as where:
            drive(campaign, where, retry, again, then=lambda: _table(campaign, html))
        return
    listed = Table(title="claims", title_justify="left", show_lines=True)
    for column in ("name", "what is claimed", "source"):
        listed.add_column(column, overflow="fold")
    for claim in CLAIMS.values():
        listed.add_row(claim.name, claim.statement, claim.source)
    console.print(listed)
    _table(campaign, html)
    console.print(f"labkit claims all: {campaign.estimate()}", highlight=False)


def _table(campaign: "Campaign", html: Path | None) -> None:
    """From the cells that are there, all or not."""
    from labkit.sweeps.campaign import HEAD
    from labkit.sweeps.document import as_html

    rows = campaign.rows()
    if any(row.n for row in rows):
        table = Table(title="published and found here", title_justify="left", show_lines=True)
        for column in HEAD:
            table.add_column(column, overflow="fold")
        for row in rows:
            if row.n:
                table.add_row(*row.texts())
        console.print(table)
    if html:
        html.write_text(as_html("Claims about FP8 reinforcement learning", campaign.blocks()), encoding="utf-8")
        console.print(f"claims: {html} (open it in a browser)", highlight=False)


def drive(sweep: "Sweep | Campaign", where: "Executor", retry: bool, again: str, then: Callable[[], None]) -> None:
    """Drive it with a bar for every cell at work, a line for each that ended, and, interrupted or not, `then`."""
    console.print(f"{len(sweep.cells)} cells in {sweep.path}", highlight=False)
    console.print(where.capacity([cell.experiment for cell in sweep.cells]).why, highlight=False)
    try:
        with SweepDisplay(len(sweep.cells)) as display:
            for finished in sweep.run(where, retry, display.step):
                display.finished(finished)
    except KeyboardInterrupt:
        then()
        console.print(f"interrupted; its cells have stopped with a checkpoint. Go on with: {again}", highlight=False)
        raise typer.Exit(130) from None
    then()


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
