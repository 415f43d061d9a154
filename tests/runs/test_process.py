import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import cache_layout

from labkit.config import Experiment
from labkit.config.locations import TINY_FOLDER
from labkit.runs import lock, process
from labkit.runs.process import HEARTBEAT_LIMIT, Run
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory, RunError


@pytest.fixture
def run(small: Experiment, tmp_path: Path) -> Run:
    return Run(RunDirectory.create(small, tmp_path))


def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_a_run_whose_process_is_gone_has_failed_with_its_last_words(run: Run) -> None:
    run.directory.beat()
    run.directory.write_state(RunState("running", pid=dead_pid()))
    (run.path / "worker.log").write_text("first\nlast words\n")
    assert str(run.status) == "failed (worker ended without a word: last words)"
    assert not run.alive


def test_a_stranger_with_the_number_of_the_worker_is_not_the_worker(run: Run) -> None:
    run.directory.beat()
    run.directory.write_state(RunState("running", pid=os.getpid()))
    assert run.state == "failed"
    run.kill()  # must not kill the process that runs this test
    assert run.status.reason == "killed"


def test_a_run_on_another_node_lives_by_its_heartbeat(run: Run) -> None:
    run.directory.beat()
    run.directory.write_state(RunState("running", pid=1, host="elsewhere"))
    assert run.alive
    run.pause()
    assert [command["command"] for command in run.directory.commands()[0]] == ["pause"]
    with pytest.raises(RunError, match="elsewhere"):
        run.kill()
    old = time.time() - HEARTBEAT_LIMIT - 2
    os.utime(run.path / "heartbeat", (old, old))
    assert run.state == "failed"
    assert "no sign of life" in run.status.reason


def test_commands_to_a_run_that_is_not_active_are_refused(run: Run) -> None:
    for command in (run.pause, run.resume, run.stop):
        with pytest.raises(RunError, match="it is idle"):
            command()
    run.kill()  # nothing to kill: no error
    assert run.state == "idle"


def test_a_finished_run_is_not_resumed(run: Run) -> None:
    run.directory.write_state(RunState("done"))
    with pytest.raises(RunError, match="is done"):
        run.resume_from_checkpoint()


def test_waiting_for_a_finished_run_returns_its_records(run: Run, record) -> None:
    run.directory.append_record(record(0))
    run.directory.write_state(RunState("stopped"))
    seen = []
    assert run.wait(timeout=0, on_record=seen.append).name == "stopped"
    assert [one.step for one in seen] == [0]


def test_waiting_is_limited(run: Run) -> None:
    run.directory.beat()
    run.directory.write_state(RunState("running", host="elsewhere"))
    with pytest.raises(TimeoutError, match="still running"):
        run.wait(timeout=0.2)


def test_a_directory_with_missing_files_still_opens(run: Run) -> None:
    for name in ("state.json", "checkpoints"):
        path = run.path / name
        path.rmdir() if path.is_dir() else path.unlink()
    opened = Run.open(run.path)
    assert opened.records() == opened.samples() == []
    assert opened.log() == ""
    assert opened.status.reason == "state.json is missing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "smollm2"}, "run `labkit fetch smollm2`"),
        ({"model": "no/such/folder", "task": "arithmetic"}, "there is no model 'no/such/folder'"),
        ({"model": "Qwen/Qwen3-0.6B", "task": "arithmetic"}, "run `labkit fetch Qwen/Qwen3-0.6B` once"),
        ({"task": "dataset:missing.jsonl"}, "no such file"),
        ({"task_options": {"operators": 3}}, "no such setting"),
    ],
)
def test_a_refused_experiment_leaves_nothing_behind(
    small: Experiment, changes: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=message):
        Run.start(small.override(changes), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def held(run: Run) -> Iterator[int]:
    """The lock of the run, as a worker holds it."""
    descriptor = lock.take(run.path)
    lock.sign(descriptor, os.getpid())
    yield descriptor
    os.close(descriptor)


def test_a_directory_that_has_a_worker_gets_no_second_one(
    run: Run, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_EXIT", 0.2)
    (run.path / "state.json").unlink()
    files = sorted(path.name for path in run.path.iterdir())
    moved = Run.open(run.path.rename(tmp_path / "moved"))
    for one in (moved, moved):
        with pytest.raises(RunError, match=f"still has a worker, process {os.getpid()}: kill it first"):
            one.resume_from_checkpoint()
    by_hand = subprocess.run(
        [sys.executable, "-m", "labkit.runs.worker", str(moved.path)], capture_output=True, text=True, check=False
    )
    assert by_hand.returncode == 1
    assert by_hand.stderr.count("\n") == 1
    assert f"already has a worker (process {os.getpid()})" in by_hand.stderr
    assert sorted(path.name for path in moved.path.iterdir()) == files


def test_a_lock_ends_with_its_holder(run: Run) -> None:
    descriptor = lock.take(run.path)
    lock.sign(descriptor, 1)
    with pytest.raises(BlockingIOError):
        lock.take(run.path)
    os.close(descriptor)
    os.close(lock.take(run.path))
    assert lock.holder(run.path) is None


def test_a_run_with_a_line_that_cannot_be_read_is_not_resumed(run: Run) -> None:
    run.directory.write_state(RunState("stopped"))
    (run.path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1: not JSON.*; restore the line"):
        run.resume_from_checkpoint()
    assert run.state == "stopped"
    assert not (run.path / "worker.log").exists()


def test_a_stop_that_was_obeyed_is_no_reason_to_say_stopping_again(run: Run) -> None:
    run.directory.append_command("stop")
    run.directory.write_state(RunState("stopped"))
    with pytest.raises(RunError, match=r"cannot stop .*: it is stopped"):
        run.stop()


def test_all_leaves_out_what_cannot_be_read(run: Run, tmp_path: Path, small: Experiment) -> None:
    damaged = RunDirectory.create(small, tmp_path)
    (damaged.path / "experiment.yaml").write_bytes(b"\xff: [")
    assert [one.id for one in Run.all(tmp_path)] == [run.id]


def test_a_run_keeps_absolute_paths(
    small: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches_nothing: None
) -> None:
    shutil.copytree(TINY_FOLDER, tmp_path / "tiny-copy")
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    options = {"prompt_column": "question"}
    given = small.override({"model": "tiny-copy", "task": "dataset:rows.jsonl", "task_options": options})
    kept = Run.start(given, "runs").experiment
    assert kept.model == str(tmp_path / "tiny-copy")
    assert kept.task == f"dataset:{tmp_path / 'rows.jsonl'}"
    assert kept.task_options == options
    assert kept.name == given.name
    named = Run.start(small, "runs").experiment
    assert named == small


def test_a_model_of_the_hub_keeps_its_name(
    small: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches_nothing: None
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cache_layout(TINY_FOLDER, "Owner/tiny", tmp_path / "hub")
    given = small.override({"model": "Owner/tiny", "task": "arithmetic"})
    assert Run.start(given, tmp_path / "runs").experiment.model == "Owner/tiny"


@pytest.fixture
def launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_launch", lambda self, held: None)
