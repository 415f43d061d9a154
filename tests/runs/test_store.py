import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.config import Experiment, Recipe
from labkit.runs.record import SCHEMA, StepRecord
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory, RunError, Tail, list_directories

Make = Callable[..., StepRecord]


@pytest.fixture
def directory(small: Experiment, tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(small, tmp_path)


def test_a_new_directory_holds_its_experiment_and_is_idle(directory: RunDirectory, small: Experiment) -> None:
    assert directory.experiment == small
    assert directory.read_state().name == "idle"
    assert directory.records() == []


def test_ids_are_readable_and_unique(small: Experiment, tmp_path: Path) -> None:
    named = small.override({"name": "Föö / bar"})
    ids = {RunDirectory.create(named, tmp_path).id for _ in range(3)}
    assert len(ids) == 3
    assert all(run_id.startswith("f-bar-2") for run_id in ids), ids


def test_a_refused_experiment_leaves_nothing_behind(
    small: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Experiment) -> str:
        raise ValueError("refused")

    monkeypatch.setattr(Experiment, "to_yaml", refuse)
    with pytest.raises(ValueError, match="refused"):
        RunDirectory.create(small, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_root_comes_from_the_environment(
    small: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "elsewhere"))
    assert RunDirectory.create(small).path.parent == tmp_path / "elsewhere"


def test_a_run_is_found_by_path_id_and_unique_beginning(small: Experiment, tmp_path: Path) -> None:
    one = RunDirectory.create(small.override({"name": "alpha"}), tmp_path)
    RunDirectory.create(small.override({"name": "beta"}), tmp_path)
    assert RunDirectory.find(one.path) == RunDirectory.find(one.id, tmp_path) == one
    assert RunDirectory.find("al", tmp_path) == one


def test_an_id_that_begins_another_is_found(small: Experiment, tmp_path: Path) -> None:
    one = RunDirectory.create(small.override({"name": "alpha"}), tmp_path)
    two = one.path.rename(tmp_path / "alpha")
    RunDirectory.create(small.override({"name": "alpha"}), tmp_path)
    assert RunDirectory.find("alpha", tmp_path).path == two
    with pytest.raises(RunError, match="the beginning of 2 runs"):
        RunDirectory.find("alp", tmp_path)


def test_an_unknown_run_names_near_ones(small: Experiment, tmp_path: Path) -> None:
    made = RunDirectory.create(small.override({"name": "alpha"}), tmp_path)
    with pytest.raises(RunError, match=made.id):
        RunDirectory.find("alhpa" + made.id.removeprefix("alpha"), tmp_path)
    with pytest.raises(RunError, match="empty"):
        RunDirectory.find("x", tmp_path / "none")


def test_runs_are_listed_newest_first(small: Experiment, tmp_path: Path) -> None:
    made = [RunDirectory.create(small, tmp_path) for _ in range(3)]
    assert list_directories(tmp_path) == made[::-1]


def test_records_and_their_samples_are_read_back(directory: RunDirectory, record: Make) -> None:
    written = [record(step) for step in range(4)]
    for one in written:
        directory.append_record(one)
    assert directory.records() == written
    assert directory.records(since=2) == written[2:]
    assert directory.samples(2) == list(written[2].samples)
    assert directory.samples() == list(written[3].samples)
    assert directory.samples(99) == []


def test_a_tail_returns_each_record_once_and_notices_a_cut(directory: RunDirectory, record: Make) -> None:
    tail = Tail(directory.path / "metrics.jsonl")
    assert tail.read() == []
    directory.append_record(record(0))
    directory.append_record(record(1))
    assert [one.step for one in tail.read()] == [0, 1]
    with (directory.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "st')
    assert tail.read() == []
    directory.append_record(record(2))
    assert [one.step for one in tail.read()] == [2]
    directory.cut_records(0)
    directory.append_record(record(1))
    assert [one.step for one in tail.read()] == [0, 1]


def test_cutting_keeps_records_and_rollouts_together(directory: RunDirectory, record: Make) -> None:
    for step in range(4):
        directory.append_record(record(step))
    with (directory.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"half')
    directory.cut_records(1)
    assert [one.step for one in directory.records()] == [0, 1]
    assert directory.samples() == directory.samples(1) != []
    assert directory.samples(2) == []
    with pytest.raises(RunError, match="2 steps up to step 3"):
        directory.cut_records(3)


def test_a_bad_line_is_named(directory: RunDirectory, record: Make) -> None:
    directory.append_record(record(0))
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: not JSON"):
        directory.records()


def test_a_newer_run_says_to_update(directory: RunDirectory, record: Make) -> None:
    line = json.loads(record(0).to_json()) | {"schema": SCHEMA + 1}
    (directory.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RunError, match="update labkit"):
        directory.records()


def test_a_state_is_read_back(directory: RunDirectory) -> None:
    state = RunState("failed", "No space left on device: ü", pid=1)
    directory.write_state(state)
    assert directory.read_state() == state
    assert str(state) == "failed (No space left on device: ü)"


def test_a_state_is_overwritten_in_place_when_no_file_can_be_made(directory: RunDirectory) -> None:
    (directory.path / f"state.{os.getpid()}").mkdir()
    directory.write_state(RunState("failed", "disk full " * 1000))
    assert directory.read_state().reason.startswith("disk full")
    assert (directory.path / "state.json").stat().st_size == 4096


@pytest.mark.parametrize(
    "content",
    [
        *[
            None,
            "",
            "[]",
            '{"unknown": 1}',
            '{"name": "flying"}',
            '{"name": ["done"]}',
            '{"name": "done", "reason": 3}',
        ],
        *[
            '{"name": "running", "pid": "12"}',
            '{"name": "running", "pid": -1}',
            '{"name": "running", "updated": "now"}',
        ],
    ],
)
def test_a_lost_or_damaged_state_is_a_failure_with_a_reason(directory: RunDirectory, content: str | None) -> None:
    path = directory.path / "state.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    state = directory.read_state()
    assert (state.name, state.active) == ("failed", False)
    assert "state.json" in state.reason


def test_switches_after_the_checkpoint_are_forgotten(directory: RunDirectory) -> None:
    recipe = Recipe().model_dump(mode="json")
    for version, step in ((1, 3), (2, 6)):
        directory.append_event("switched", step=step, version=version, changes={}, recipe=recipe)
    directory.append_event("checkpoint", path="step-00004")
    directory.cut_switches(1)
    assert [switch.step for switch in directory.switches()] == [3]
    assert [event["event"] for event in directory.events()] == ["switched", "checkpoint"]


def test_commands_are_read_once(directory: RunDirectory) -> None:
    assert directory.commands() == ([], 0)
    directory.append_command("pause")
    commands, offset = directory.commands()
    assert [command["command"] for command in commands] == ["pause"]
    directory.append_command("switch", recipe={"name": "x"})
    (last,), _ = directory.commands(offset)
    assert (last["command"], last["recipe"]) == ("switch", {"name": "x"})


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"schema": 1}', '{"schema": 1, "step": "x"}'])
def test_cutting_names_a_bad_line_and_the_way_out(directory: RunDirectory, record: Make, line: str) -> None:
    directory.append_record(record(0))
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: .*; restore the line, or remove it"):
        directory.cut_records(0)


@pytest.mark.parametrize("changes", [{"step": "1"}, {"metrics": []}, {"tokens": 3}])
def test_a_record_of_wrong_types_is_named(directory: RunDirectory, record: Make, changes: dict) -> None:
    line = json.loads(record(0).to_json()) | changes
    (directory.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RunError, match=f"line 1: no step record: {next(iter(changes))} is a"):
        directory.records()


def test_steps_out_of_order_are_not_resumed(directory: RunDirectory, record: Make) -> None:
    for step in (0, 2, 2):
        directory.append_record(record(step))
    with pytest.raises(RunError, match="changed by hand: restore it, or start anew with `labkit run"):
        directory.cut_records(2)


@pytest.mark.parametrize("root", ["file", "file/runs"])
def test_a_root_that_cannot_hold_runs_is_named(small: Experiment, tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=f"cannot make a run in .*/{root}: .*LABKIT_RUNS"):
        RunDirectory.create(small, tmp_path / root)


def test_a_root_that_is_a_file_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"no folder.*LABKIT_RUNS"):
        list_directories(tmp_path / "file")
