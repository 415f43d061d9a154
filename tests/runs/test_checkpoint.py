from pathlib import Path

import pytest
import torch

from labkit.config import Experiment
from labkit.runs import checkpoint
from labkit.runs.store import RunDirectory, RunError


@pytest.fixture
def directory(small: Experiment, tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(small, tmp_path)


def test_a_state_is_loaded_bit_for_bit(directory: RunDirectory, small: Experiment) -> None:
    state = {"weights": torch.randn(3, 3), "rng": (3, (1, 2, 3), None), "step_index": 11, "none": None}
    path = checkpoint.save(directory, small, 10, state)
    assert path.name == "step-00010"
    step, loaded = checkpoint.load(path, small)
    assert step == 10
    assert torch.equal(loaded.pop("weights"), state.pop("weights"))
    assert loaded == state


def test_the_latest_counts_by_number_and_ignores_other_names(directory: RunDirectory, small: Experiment) -> None:
    assert checkpoint.latest(directory) is None
    for step in (9, 100000, 20):
        checkpoint.save(directory, small, step, {})
    for name in (".step-200000", "step-foo", "step-", "step-99999999-copy"):
        (directory.path / "checkpoints" / name).mkdir()
    latest = checkpoint.latest(directory)
    assert latest is not None
    assert latest.name == "step-100000"


def test_saving_a_step_again_replaces_it(directory: RunDirectory, small: Experiment) -> None:
    checkpoint.save(directory, small, 1, {"x": 1})
    assert checkpoint.load(checkpoint.save(directory, small, 1, {"x": 2}), small) == (1, {"x": 2})


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(directory: RunDirectory, small: Experiment) -> None:
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(directory, small, 1, {"x": lambda: None})
    assert list((directory.path / "checkpoints").iterdir()) == []


def test_a_damaged_checkpoint_says_what_to_do(directory: RunDirectory, small: Experiment) -> None:
    path = checkpoint.save(directory, small, 1, {"x": torch.zeros(100)})
    (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:50])
    with pytest.raises(RunError, match="remove it to resume from the one before"):
        checkpoint.load(path, small)


@pytest.mark.parametrize("limit", [100, 100_000])  # where torch's own writer ends the process, and where it raises
def test_a_checkpoint_on_a_full_disk_says_so(directory: RunDirectory, small: Experiment, limit: int) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            checkpoint.save(directory, small, 1, {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(directory.path / "checkpoints" / "step-00001")
    assert list((directory.path / "checkpoints").iterdir()) == []


def test_a_checkpoint_of_another_experiment_is_refused(directory: RunDirectory, small: Experiment) -> None:
    path = checkpoint.save(directory, small, 1, {})
    assert checkpoint.load(path, small.override({"name": "another name changes nothing"})) == (1, {})
    with pytest.raises(
        RunError, match=r"\(grpo.lr was 0.00015 and is 0.5; seed was 0 and is 7\): restore it to resume"
    ):
        checkpoint.load(path, small.override({"seed": 7, "grpo.lr": 0.5}))


def test_a_checkpoint_under_another_step_s_name_is_refused(directory: RunDirectory, small: Experiment) -> None:
    path = checkpoint.save(directory, small, 1, {})
    copy = path.rename(path.with_name("step-00009"))
    with pytest.raises(RunError, match="step-00009 holds step 1, so it was copied or renamed: remove it"):
        checkpoint.load(copy, small)
