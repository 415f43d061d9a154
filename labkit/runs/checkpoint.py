"""Checkpoints: all that a bit-exact resume needs, one folder per checkpoint.

    checkpoints/step-00010/state.pt    {"schema": 1, "step": 10, "loop": Loop.state_dict()}

A folder is written under another name and renamed when it is complete and on the disk, so a checkpoint
that can be seen is whole. Files are loaded with `weights_only=True`: a checkpoint from a stranger cannot
run code.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from labkit.runs.store import RunDirectory, RunError

SCHEMA = 1


def save(directory: RunDirectory, step: int, loop_state: dict[str, Any]) -> Path:
    """Write the loop's state after `step`; an earlier checkpoint of the same step is replaced."""
    folder = directory.path / "checkpoints"
    path = folder / f"step-{step:05d}"
    draft = folder / f".{path.name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with (draft / "state.pt").open("wb") as file:
            torch.save({"schema": SCHEMA, "step": step, "loop": loop_state}, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.rmtree(path)
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path


def latest(directory: RunDirectory) -> Path | None:
    paths = (directory.path / "checkpoints").glob("step-*")
    return max(paths, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def load(path: Path) -> tuple[int, dict[str, Any]]:
    """(last completed step, Loop.state_dict()) of a checkpoint folder."""
    try:
        content = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        schema, step, loop_state = content["schema"], content["step"], content["loop"]
    except Exception as error:  # torch raises many kinds for a damaged file
        raise RunError(f"checkpoint {path} cannot be read ({error}): remove it to resume from the one before") from None
    if schema > SCHEMA:
        raise RunError(f"checkpoint {path} was written by a newer labkit: update labkit to resume from it")
    return step, loop_state
