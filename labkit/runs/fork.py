"""Fork: a new run that goes on from another's checkpoint under another Recipe.

    <fork>/origin/parent.yaml         {run, step, experiment}: where it comes from
           origin/step-00010/         a copy of the parent's checkpoint
           metrics.jsonl, ...         the parent's records up to that step

Weights, optimizer, data order and random numbers are the parent's, so what parts the two curves is the Recipe. The
parent may go on, or be deleted: the fork has all it needs.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from labkit.config import Experiment, Recipe, yaml_io
from labkit.runs.jsonl import complete_lines, load_object, replace_lines
from labkit.runs.store import RunDirectory, RunError


@dataclass(frozen=True)
class Origin:
    run: str  # id of the parent
    step: int
    experiment: Experiment  # the parent's
    checkpoint: Path


def origin(directory: RunDirectory) -> Origin | None:
    """Where a run was forked from; None for one that was started."""
    path = directory.path / "origin" / "parent.yaml"
    if not path.is_file():
        return None
    content = yaml_io.load(path)
    step = content["step"]
    return Origin(content["run"], step, Experiment(**content["experiment"]), path.parent / f"step-{step:05d}")


def fork(
    parent: RunDirectory, recipe: Recipe, step: int | None, steps: int | None, name: str | None, root: Path
) -> RunDirectory:
    """Raises RunError, and leaves nothing behind, if there is no such checkpoint."""
    found = parent.checkpoints()
    if not found:
        raise RunError(f"{parent.id} has no checkpoint to fork from: ask for one, or stop it, which makes one")
    if step is not None and step not in found:
        raise RunError(f"{parent.id} has no checkpoint of step {step}; choose one of {', '.join(map(str, found))}")
    step = found[-1] if step is None else step
    started = parent.experiment
    total = started.steps if steps is None else steps
    if total <= step:
        raise RunError(f"steps {total}: the fork begins after step {step}; give it more steps")
    name = name or f"{recipe.name}-from-{started.name}-{step}"
    experiment = started.override({"recipe": recipe, "steps": total, "name": name})
    directory = RunDirectory.create(experiment, root)
    try:
        _copy(parent, directory, step)
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return directory


def _copy(parent: RunDirectory, directory: RunDirectory, step: int) -> None:
    origin_folder = directory.path / "origin"
    checkpoint = f"step-{step:05d}"
    shutil.copytree(parent.path / "checkpoints" / checkpoint, origin_folder / checkpoint)
    content = {"run": parent.id, "step": step, "experiment": parent.experiment.model_dump()}
    (origin_folder / "parent.yaml").write_text(yaml_io.dump(content), encoding="utf-8")
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        replace_lines(directory.path / file, _up_to(parent.path / file, step))
    switched = [line for _, line in complete_lines(parent.path / "events.jsonl") if _is_switch(line, step)]
    replace_lines(directory.path / "events.jsonl", switched)


def _up_to(path: Path, step: int) -> list[bytes]:
    return [line for _, line in complete_lines(path) if load_object(line)["step"] <= step]


def _is_switch(line: bytes, step: int) -> bool:
    event = load_object(line)
    return event["event"] == "switched" and event["step"] <= step
