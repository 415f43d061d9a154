"""Commands that explain: presets, corrections, metrics, one batch under others, faults."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from labkit.cli.app import app, check_output, experiment_from
from labkit.terminal import console, print_alarms, watch

if TYPE_CHECKING:
    from labkit.analysis import Batch


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
    from labkit.config.own import FORM, installed

    found = {name: known for name, known in CORRECTIONS.items() if of.lower() in name}
    own = [name for name in installed("correction") if of.lower() in name.lower()]
    if not found and not own:
        raise ValueError(f"no correction has {of!r} in its name; `labkit corrections` lists all")
    table = Table(
        title="corrections", title_justify="left", caption_justify="left",
        caption="r = exp(p − g) of a token, p the trainer's log-prob and g the engine's; W the product of r over the "
        f"response, G its geometric mean; c the current policy's log-prob; k3 = r − 1 − log r. Your own weight: {FORM}",
    )  # fmt: skip
    table.add_column("name", no_wrap=True)
    table.add_column("bounds")
    table.add_column("what it does")
    for name, known in found.items():
        bounds = ", ".join(f"{bound} {value:.6g}" for bound, value in Correction(name=name).bounds.items())
        table.add_row(name, bounds, known.text if "/" in name or not known.source else f"{known.text} ({known.source})")
    for name in own:
        table.add_row(name, "", "a weight of your own, from an installed package")
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
    from labkit.config import CORRECTIONS, Recipe
    from labkit.config.own import checked_recipe
    from labkit.config.presets import recipe

    check_output("--save", save)
    named = _names(corrections)
    for name in named or []:
        if name != "custom" and not any(known.startswith(f"{name}/") for known in CORRECTIONS):
            checked_recipe(
                Recipe().override({"correction": name})
            )  # a wrong name is better met before a batch is sampled
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

    check_output("--save", save)
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


def _batch(source: str, save: Path | None) -> "Batch":
    """A stored batch from a file, or the next one that a run or an experiment would sample."""
    from labkit.analysis import Batch, collect
    from labkit.config.presets import RECIPES
    from labkit.runs.process import Run

    if Path(source).suffix == ".safetensors":
        batch = Batch.load(source)
    elif source in RECIPES or Path(source).suffix in (".yaml", ".yml"):
        batch = collect(experiment_from(source, []))
    else:
        batch = collect(Run.open(source))
    if save:
        batch.save(save)
        console.print(f"batch: {save}", highlight=False)
    return batch


def _names(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None
