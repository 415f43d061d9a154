import json
from pathlib import Path

import pytest

from labkit import __version__
from labkit.config import ConfigError, Experiment
from labkit.runs.store import RunDirectory, RunError
from labkit.sweeps import provenance
from labkit.sweeps.sweep import Sweep, sweep_of

ARMS = {"slow": {"grpo.lr": 1e-5}, "fast": {"grpo.lr": 1e-4}}


def test_the_same_call_finds_the_same_sweep_and_more_seeds_extend_it(small: Experiment, root: Path) -> None:
    first = sweep_of(small, arms=ARMS, seeds=1, root=root)
    RunDirectory.create(first.cells[0].experiment, first.path, first.cells[0].id)
    assert first.standings() == {"slow-s0": "unfinished", "fast-s0": "missing"}
    more = sweep_of(small, arms=ARMS, seeds=2, root=root)
    assert more.path == first.path
    assert more.standings()["slow-s0"] == "unfinished"
    assert Sweep.open(first.path.name, root).plan == more.plan
    assert repr(more) == f"Sweep('{first.path.name}', 0 of 4 cells done)"


def test_a_folder_with_another_experiment_under_the_same_name_is_refused(small: Experiment, root: Path) -> None:
    sweep = sweep_of(small, arms=ARMS, seeds=1, name="mine", root=root)
    RunDirectory.create(sweep.cells[0].experiment, sweep.path, "slow-s0")
    with pytest.raises(RunError, match=r"grpo.lr is 1e-05 there and 2e-05 here\): give this sweep another name"):
        sweep_of(small, arms={"slow": {"grpo.lr": 2e-5}}, seeds=1, name="mine", root=root)
    assert Sweep.open("mine", root).plan == sweep.plan, "a refused plan must not replace the one that is there"
    with pytest.raises(RunError, match="is there already"):
        RunDirectory.create(sweep.cells[0].experiment, sweep.path, "slow-s0")
    with pytest.raises(RunError, match="is a run"):
        sweep_of(small, seeds=1, name="slow-s0", root=sweep.path)


def test_a_cell_that_can_not_run_here_is_refused_before_the_folder_is_made(small: Experiment, root: Path) -> None:
    arms = {"here": {}, "away": {"model": "nowhere", "task": "arithmetic"}}
    with pytest.raises(ConfigError, match="away: model: there is no model 'nowhere'"):
        sweep_of(small, arms=arms, seeds=1, root=root)
    assert list(root.iterdir()) == []


def test_a_name_that_is_no_sweep_says_which_there_are(small: Experiment, root: Path) -> None:
    sweep_of(small, seeds=1, name="mine", root=root)
    with pytest.raises(RunError, match=r"no sweep 'yours' in .*: there are mine"):
        Sweep.open("yours", root)
    with pytest.raises(RunError, match="isn't driven"):
        Sweep.open("mine", root).stop()


def test_a_machine_is_noted_once_and_again_when_something_changed(tmp_path: Path) -> None:
    provenance.note(tmp_path)
    provenance.note(tmp_path)
    (now,) = provenance.machines(tmp_path)
    assert now["versions"]["labkit"] == __version__
    assert "torch" in now["versions"]
    (tmp_path / "machine.json").write_text(json.dumps([now | {"cores": 99}]))
    provenance.note(tmp_path)
    assert [each["cores"] for each in provenance.machines(tmp_path)] == [99, now["cores"]]
