"""Checkpoints: all that a bit-exact resume needs, one folder per checkpoint.

    checkpoints/step-00010/state.pt    {"schema": 1, "step": 10, "experiment": {...}, "loop": Loop.state_dict()}

A folder is written under another name and renamed when it is complete and on the disk, so a checkpoint
that can be seen is whole. Files are loaded with `weights_only=True`: a checkpoint from a stranger cannot
run code.
"""

import os
import shutil
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from labkit.config import Experiment
from labkit.runs.store import RunDirectory, RunError

SCHEMA = 1


class _Writing:
    """A file for torch.save, whose writer hides why a write failed and can end the process over it.

    The error waits here until torch has finished.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Torch flushes before it is done; `finish` is what counts."""

    def finish(self) -> None:
        if self._error:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())


def save(directory: RunDirectory, experiment: Experiment, step: int, loop_state: dict[str, Any]) -> Path:
    """Write the loop's state after `step`; an earlier checkpoint of the same step is replaced."""
    folder = directory.path / "checkpoints"
    path = folder / _name(step)
    draft = folder / f".{path.name}"
    content = {"schema": SCHEMA, "step": step, "experiment": experiment.model_dump(mode="json"), "loop": loop_state}
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        with (draft / "state.pt").open("wb") as file:
            writing = _Writing(file)
            torch.save(content, cast(IO[bytes], writing))
            writing.finish()
        if path.exists():
            shutil.rmtree(path)
        draft.rename(path)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path


def latest(directory: RunDirectory) -> Path | None:
    steps = directory.checkpoints()
    return directory.path / "checkpoints" / _name(steps[-1]) if steps else None


def load(path: Path, experiment: Experiment) -> tuple[int, dict[str, Any]]:
    """(last completed step, Loop.state_dict()) of a checkpoint folder.

    Raises RunError unless it was written by this experiment: resumed by another one, the run's records would
    be said to come from settings that they don't come from.
    """
    try:
        content = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        schema, step, loop_state = content["schema"], content["step"], content["loop"]
        written_by = Experiment(**content["experiment"])
    except Exception as error:  # torch raises many kinds for a damaged file
        raise RunError(f"checkpoint {path} cannot be read ({error}): remove it to resume from the one before") from None
    if schema > SCHEMA:
        raise RunError(f"checkpoint {path} was written by a newer labkit: update labkit to resume from it")
    if path.name != _name(step):
        raise RunError(f"checkpoint {path} holds step {step}, so it was copied or renamed: remove it or undo that")
    if changed := written_by.diff(experiment):
        settings = "; ".join(f"{key} was {old} and is {new}" for key, (old, new) in changed.items())
        raise RunError(
            f"experiment.yaml was changed since checkpoint {path.name} ({settings}): restore it to resume, "
            "or start a new run from it with `labkit run`"
        )
    return step, loop_state


def _name(step: int) -> str:
    return f"step-{step:05d}"
