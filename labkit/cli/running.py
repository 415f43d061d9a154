"""Commands that start, watch, stop and compare runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from labkit.cli.app import app, check_output, experiment_from
from labkit.terminal import StepDisplay, console, follow, print_alarms

if TYPE_CHECKING:
    from labkit.runs.store import RunDirectory

RunName = Annotated[str, typer.Argument(help="a run: its id, the beginning of its id, or its path", metavar="RUN")]
Detach = Annotated[bool, typer.Option("--detach", help="return at once; `labkit show` watches")]


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="a YAML file or a preset (see `labkit presets`)")],
    assignments: Annotated[
        list[str] | None, typer.Argument(help="settings to change", metavar="[KEY=VALUE]...")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="carry it out on this Ray cluster, in one actor unless cluster.placement says separate",
        ),
    ] = None,
    detach: Detach = False,
) -> None:
    """Run a preset or a YAML file: `labkit run fp8-e2e steps=20 seed=1`. Ctrl-C stops it, a second one kills it."""
    from labkit.runs.process import Run

    chosen = experiment_from(experiment, assignments or [])
    if ray_address:
        placement = "separate" if chosen.cluster.placement == "separate" else "colocated"
        chosen = chosen.override({"cluster.address": ray_address, "cluster.placement": placement})
    follow(Run.start(chosen), detach)


@app.command()
def resume(run: RunName, detach: Detach = False) -> None:
    """Continue a stopped, failed or killed run from its last checkpoint."""
    from labkit.runs.process import Run

    opened = Run.open(run)
    records = opened.records()
    opened.resume_from_checkpoint()
    follow(opened, detach, seen=records[-1].step if records else -1)


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
    title = f"{len(directories)} runs in {runs_root()}"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", ratio=3)
    table.add_column("state", overflow="fold", min_width=7)
    for column in ("step", "held-out", "TMPE"):
        table.add_column(column, no_wrap=True, min_width=len(column))
    table.add_column("recipe", overflow="fold", ratio=2)
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
        f"{tmpe[-1]:.5g}" if tmpe else "",
        found.experiment.short_str(),
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
    console.print(f"{opened.path}\n{opened.experiment.short_str()}", highlight=False)
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
    print_alarms(opened.alarms())


@app.command()
def save(
    run: RunName, folder: Annotated[Path, typer.Argument(help="where to, in Hugging Face layout", metavar="FOLDER")]
) -> None:
    """Write the policy of a run's last checkpoint to a folder that `model=FOLDER` and transformers load."""
    from labkit.analysis.trained import save as save_policy
    from labkit.analysis.trained import trained
    from labkit.runs.process import Run

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is there already; give the name of a new folder")
    opened = Run.open(run)
    save_policy(trained(opened), opened.experiment, folder)
    console.print(f"the policy of {opened.id} is in {folder}", highlight=False)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="runs: ids, beginnings of ids or paths", metavar="RUN...")],
    html: Annotated[Path | None, typer.Option(help="write the curves to this page too")] = None,
) -> None:
    """Compare runs: the settings that differ and what came of them."""
    from labkit.runs.compare import compare as compare_runs
    from labkit.runs.process import Run

    check_output("--html", html)
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

    check_output("--json", json)
    check_output("--html", html)
    try:
        with StepDisplay() as display:
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
