"""The command line: `labkit --help`.

A thin client like the notebook: it starts workers, watches run directories and draws, and imports no
torch (but for `fetch` and `warmstart`, which make models, and `whatif` and `attribute`, which score a batch).
Mistakes end in one line on stderr and exit code 2; LABKIT_DEBUG=1 shows the traceback as well. A run that was
stopped ends with exit code 130.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from labkit.terminal import StepDisplay, console, follow, print_alarms, watch

if TYPE_CHECKING:
    from labkit.analysis import Batch
    from labkit.config import Experiment
    from labkit.runs.store import RunDirectory

app = typer.Typer(
    help="An FP8 reinforcement-learning lab. Runs are kept in ./runs, or in the folder named by LABKIT_RUNS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    """Run a preset or a YAML file: `labkit run fp8-e2e steps=20 seed=1`. Ctrl-C stops it, a second one kills it."""
    from labkit.runs.process import Run

    started = Run.start(_experiment(experiment, assignments or []))
    follow(started, detach)


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
    print_alarms(opened.alarms())


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


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        from labkit import __version__

        console.print(__version__, highlight=False)
        raise typer.Exit


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
def corrections(
    of: Annotated[str, typer.Argument(help="only names that contain this, such as verl", metavar="[TEXT]")] = "",
) -> None:
    """The named corrections: what each does, its bounds and where it comes from."""
    from labkit.config import CORRECTIONS, Correction

    found = {name: known for name, known in CORRECTIONS.items() if of.lower() in name}
    if not found:
        raise ValueError(f"no correction has {of!r} in its name; `labkit corrections` lists all")
    table = Table(
        title="corrections", title_justify="left", caption_justify="left",
        caption="r = exp(p − g) of a token, p the trainer's log-prob and g the engine's; W the product of r over the "
        "response, G its geometric mean; c the current policy's log-prob; k3 = r − 1 − log r",
    )  # fmt: skip
    table.add_column("name", no_wrap=True)
    table.add_column("bounds")
    table.add_column("what it does")
    for name, known in found.items():
        bounds = ", ".join(f"{bound} {value:.6g}" for bound, value in Correction(name=name).bounds.items())
        table.add_row(name, bounds, known.text if "/" in name or not known.source else f"{known.text} ({known.source})")
    console.print(table)


@app.command()
def metrics(
    of: Annotated[str, typer.Argument(help="only names that contain this", metavar="[TEXT]")] = "",
) -> None:
    """The metrics of a step: definition, unit, which way is better, and the healthy band."""
    from labkit.runs.metrics import METRICS, describe

    found = {name: metric for name, metric in METRICS.items() if of.lower() in name} or {of: describe(of)}
    table = Table(title="metrics", title_justify="left")
    for column in ("name", "definition", "unit", "better", "healthy"):
        table.add_column(column, overflow="fold")
    for name, metric in found.items():
        healthy = "" if metric.healthy is None else "{:g} to {:g}".format(*metric.healthy)
        table.add_row(name, metric.definition, metric.unit, metric.better, healthy)
    console.print(table)


@app.command()
def whatif(
    source: Annotated[str, typer.Argument(help="a preset, a YAML file, a run, or a batch that was saved")],
    recipes: Annotated[str, typer.Option(help="presets, with commas between; the batch's own if not given")] = "",
    corrections: Annotated[str, typer.Option(help="names or projects, with commas between; all if not given")] = "",
    save: Annotated[Path | None, typer.Option(help="keep the batch in this file")] = None,
) -> None:
    """One batch of rollouts under every recipe and correction, without new rollouts."""
    from labkit.analysis import whatif as what_if
    from labkit.config import CORRECTIONS, Correction
    from labkit.config.presets import recipe

    _check_output("--save", save)
    named = _names(corrections)
    for name in named or []:
        if name != "custom" and not any(known.startswith(f"{name}/") for known in CORRECTIONS):
            Correction(name=name)  # a wrong name is better met before a batch is sampled
    asked = None if recipes == "" else [recipe(name) for name in _names(recipes) or []]
    console.print(what_if(_batch(source, save), recipes=asked, corrections=named).table())


@app.command()
def attribute(
    source: Annotated[str, typer.Argument(help="a preset, a YAML file, a run, or a batch that was saved")],
    compute: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="bf16: as the run computes, with its noise floor")
    ] = "fp32",
    save: Annotated[Path | None, typer.Option(help="keep the batch in this file")] = None,
) -> None:
    """Where the mismatch of one batch comes from: every component alone, and left out."""
    from labkit.analysis import attribute as attribute_mismatch

    _check_output("--save", save)
    console.print(attribute_mismatch(_batch(source, save), compute=compute).table())


@app.command()
def gallery(
    name: Annotated[str, typer.Argument(help="a fault; all are listed if not given", metavar="[NAME]")] = "",
    assignments: Annotated[
        list[str] | None, typer.Argument(help="settings to change", metavar="[KEY=VALUE]...")
    ] = None,
) -> None:
    """Faults that real systems had in silence. With a name: run one beside its control."""
    from labkit import gallery as faults
    from labkit.config.overrides import parse_assignments

    if not name:
        console.print(faults.table())
        return
    console.print(faults.text(name, console.width), highlight=False)
    runs = faults.run(name, **parse_assignments(assignments or []))
    for each in runs:
        watch(each)
    console.print(faults.reading(name, runs))
    for label, each in zip(("control", "faulty"), runs, strict=True):
        console.print(f"[bold]alarms of the {label} run[/bold] {each.id}", highlight=False)
        print_alarms(each.alarms())


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
    from labkit.config.yaml_io import load

    changes = parse_assignments(assignments)
    if Path(source).suffix in (".yaml", ".yml") or Path(source).is_file():
        if not Path(source).is_file():
            raise ValueError(f"no file {source}")
        settings = load(Path(source))
        if start := settings.pop("preset", None):  # a file may change a preset instead of saying everything
            return preset(start, settings.pop("model", "tiny")).override(settings).override(changes)
        return Experiment(**settings).override(changes)
    return preset(source, changes.pop("model", "tiny"), **changes)


def _batch(source: str, save: Path | None) -> "Batch":
    """A stored batch from a file, or the next one that a run or an experiment would sample."""
    from labkit.analysis import Batch, collect
    from labkit.config.presets import RECIPES
    from labkit.runs.process import Run

    if Path(source).suffix == ".safetensors":
        batch = Batch.load(source)
    elif source in RECIPES or Path(source).suffix in (".yaml", ".yml"):
        batch = collect(_experiment(source, []))
    else:
        batch = collect(Run.open(source))
    if save:
        batch.save(save)
        console.print(f"batch: {save}", highlight=False)
    return batch


def _names(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


def _check_output(option: str, path: Path | None) -> None:
    """Refuse a file that can't be written before the work that would end in it."""
    if path and path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; give the name of a file")
    if path and not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: can't be written; choose another place")


if __name__ == "__main__":
    main()
