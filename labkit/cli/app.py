"""The application that the commands belong to, and what several of them need."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.terminal import console

if TYPE_CHECKING:
    from labkit.config import Experiment

app = typer.Typer(
    help="An FP8 reinforcement-learning lab. Runs are kept in ./runs, or in the folder named by LABKIT_RUNS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        from labkit import __version__

        console.print(__version__, highlight=False)
        raise typer.Exit


def experiment_from(source: str, assignments: list[str]) -> "Experiment":
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


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that can't be written before the work that would end in it."""
    if path and path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; give the name of a file")
    if path and not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: can't be written; choose another place")
