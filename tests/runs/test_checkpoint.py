from pathlib import Path

import pytest
import torch

from labkit.config import Experiment
from labkit.runs import checkpoint
from labkit.runs.store import RunDirectory, RunError


@pytest.fixture
def directory(small: Experiment, tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(small, tmp_path)


def test_a_state_is_loaded_bit_for_bit(directory: RunDirectory) -> None:
    state = {"weights": torch.randn(3, 3), "rng": (3, (1, 2, 3), None), "step_index": 11, "none": None}
    path = checkpoint.save(directory, 10, state)
    assert path.name == "step-00010"
    step, loaded = checkpoint.load(path)
    assert step == 10
    assert torch.equal(loaded.pop("weights"), state.pop("weights"))
    assert loaded == state


def test_the_latest_counts_by_number_and_ignores_unfinished(directory: RunDirectory) -> None:
    assert checkpoint.latest(directory) is None
    for step in (9, 100000, 20):
        checkpoint.save(directory, step, {})
    (directory.path / "checkpoints" / ".step-200000").mkdir()
    latest = checkpoint.latest(directory)
    assert latest is not None
    assert latest.name == "step-100000"


def test_saving_a_step_again_replaces_it(directory: RunDirectory) -> None:
    checkpoint.save(directory, 1, {"x": 1})
    assert checkpoint.load(checkpoint.save(directory, 1, {"x": 2})) == (1, {"x": 2})


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(directory: RunDirectory) -> None:
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(directory, 1, {"x": lambda: None})
    assert list((directory.path / "checkpoints").iterdir()) == []


def test_a_damaged_checkpoint_says_what_to_do(directory: RunDirectory) -> None:
    path = checkpoint.save(directory, 1, {"x": torch.zeros(100)})
    (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:50])
    with pytest.raises(RunError, match="remove it to resume from the one before"):
        checkpoint.load(path)
