"""The real worker on the real loop: a small tiny-policy experiment with everything in FP8."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.config import Experiment, preset
from labkit.rl.loop import Loop
from labkit.runs import process
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory, RunError
from labkit.runs.worker import Boundary, Commands, StopRequested

resource = pytest.importorskip("resource")
LIMIT = 120.0


@pytest.fixture(scope="module")
def uninterrupted(small: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run.start(small, tmp_path_factory.mktemp("runs"))
    assert run.wait(LIMIT).name == "done", run.log()
    return run


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    for run in Run.all(tmp_path):
        run.kill()


def until(condition: Callable[[], bool], run: Run) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert run.alive, f"{run.status}\n{run.log()}"
        assert time.monotonic() < deadline, f"{run.status} for too long"
        time.sleep(0.02)


def until_dead(run: Run) -> None:
    deadline = time.monotonic() + 5
    while run.alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def at_step(run: Run, step: int) -> Callable[[], bool]:
    return lambda: any(record.step >= step for record in run.tail())


def without_times(record: StepRecord) -> dict:
    timed = ("time", "elapsed", "timings", "samples")
    return {name: value for name, value in vars(record).items() if name not in timed}


def same(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same(state[key], other[key]) for key in state)
    if isinstance(state, list | tuple):
        return len(state) == len(other) and all(map(same, state, other))
    return state == other


def assert_same(run: Run, other: Run) -> None:
    assert [without_times(r) for r in run.records()] == [without_times(r) for r in other.records()]
    assert [run.samples(r.step) for r in run.records()] == [other.samples(r.step) for r in other.records()]


def test_a_run_completes_all_steps_and_learns(uninterrupted: Run, small: Experiment) -> None:
    records = uninterrupted.records()
    assert [record.step for record in records] == list(range(small.steps + 1))
    assert any(record.metric("grad_norm") > 0 for record in records), "nothing was trained, so nothing is tested"
    assert len({record.metric("token_mult_prob_error") for record in records[1:]}) > 1
    assert len(uninterrupted.samples(3)) == small.keep_rollouts
    assert [event["event"] for event in uninterrupted.directory.events()] == [
        *["started", "checkpoint", "checkpoint", "checkpoint", "done"]
    ]


def test_stopped_in_a_step_and_resumed_is_bit_for_bit_the_same(
    uninterrupted: Run, small: Experiment, tmp_path: Path
) -> None:
    run = Run.start(small, tmp_path)
    until(at_step(run, 2), run)
    run.stop()
    assert run.wait(LIMIT).name == "stopped", run.log()
    stopped_at = run.records()[-1].step
    assert 2 <= stopped_at < small.steps
    assert (run.path / "checkpoints" / f"step-{stopped_at:05d}").is_dir()

    again = Run.open(run.id, tmp_path)
    again.resume_from_checkpoint()
    with pytest.raises(RunError, match="nothing to resume"):
        again.resume_from_checkpoint()
    assert again.wait(LIMIT).name == "done", again.log()
    assert_same(again, uninterrupted)


def test_paused_killed_and_resumed_is_bit_for_bit_the_same(
    uninterrupted: Run, small: Experiment, tmp_path: Path
) -> None:
    run = Run.start(small, tmp_path)
    until(at_step(run, 3), run)
    run.pause()
    until(lambda: run.state == "paused", run)
    steps = len(run.records())
    time.sleep(0.5)
    assert len(run.records()) == steps
    Run.open(run.path).resume()
    until(lambda: len(run.records()) > steps, run)
    os.kill(run.status.pid or 0, signal.SIGKILL)  # as the system does when memory runs out
    until_dead(run)
    assert str(run.status).startswith("failed (worker ended without a word: ")
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "step": 99, "metr')
    assert [record.step for record in run.records()] == list(range(len(run.records())))

    run.resume_from_checkpoint()
    assert run.wait(LIMIT).name == "done", run.log()
    assert "resumed" in [event["event"] for event in run.directory.events()]
    assert_same(run, uninterrupted)


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == name]


def test_a_switch_acts_from_the_next_step_on_or_is_refused_with_the_reason(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(small.override({"steps": 5}), tmp_path)
    bf16 = preset("bf16").recipe
    until(at_step(run, 1), run)
    run.switch(small.recipe.override({"keep_bf16.first_layers": 2, "keep_bf16.last_layers": 2}))
    run.switch(bf16)
    assert run.wait(LIMIT).name == "done", run.log()
    assert "leave none of the model's 4 layers" in events(run, "refused")[0]["reason"]
    (switch,) = run.switches()
    assert switch.changes["rollout.linears"] == [True, False]
    assert run.recipe == bf16
    versions = [record.recipe_version for record in run.records()]
    assert versions == [0] * switch.step + [1] * (6 - switch.step)
    first = run.records()[switch.step]
    assert first.active["rollout.linears"]["state"] == "bf16"
    assert first.events[0].startswith("recipe v1: rollout.linears on → off")


def test_a_stop_right_after_a_switch_does_not_lose_it(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(small.override({"checkpoint_every": 1}), tmp_path)
    until(at_step(run, 1), run)
    run.switch(preset("bf16").recipe)
    until(lambda: bool(run.switches()), run)
    run.stop()
    assert run.wait(LIMIT).name == "stopped", run.log()
    run.resume_from_checkpoint()
    assert run.wait(LIMIT).name == "done", run.log()
    assert run.records()[-1].recipe_version == 1
    assert run.records()[-1].active["rollout.linears"]["state"] == "bf16"


def test_a_fork_goes_on_from_a_checkpoint_with_the_same_data(
    uninterrupted: Run, small: Experiment, tmp_path: Path
) -> None:
    same_recipe = uninterrupted.fork(small.recipe, 3, root=tmp_path)
    assert same_recipe.parent == (uninterrupted.id, 3)
    assert same_recipe.wait(LIMIT).name == "done", same_recipe.log()
    assert_same(same_recipe, uninterrupted)
    other = uninterrupted.fork(preset("bf16").recipe, steps=10, root=tmp_path)
    assert other.wait(LIMIT).name == "done", other.log()
    records = other.records()
    assert [record.step for record in records] == list(range(11))
    assert records[:9] == uninterrupted.records()
    assert [record.recipe_version for record in records[7:]] == [0, 0, 1, 1]
    assert records[9].active["rollout.linears"]["state"] == "bf16"
    assert [switch.step for switch in other.switches()] == [9]
    for step, steps, message in [(2, None, "choose one of 3, 6, 8"), (8, 8, "give it more steps")]:
        with pytest.raises(RunError, match=message):
            uninterrupted.fork(small.recipe, step, steps=steps, root=tmp_path)
    assert len(Run.all(tmp_path)) == 2, "a refused fork leaves nothing behind"


def test_a_boundary_calls_itself_intact_only_while_it_is(small: Experiment) -> None:
    """Whenever a stop may drop the unfinished step, the state to be saved must be that of the step before."""
    claims: list[tuple[bool, bool]] = []
    boundary: Boundary | None = None
    copy: dict = {}

    def compare() -> None:
        if boundary:
            claims.append((boundary.intact(), same(boundary.state, copy)))

    loop = Loop(small.override({"threads": None}), on_microstep=compare)
    steps = loop.steps()
    for _ in range(3):  # from the second step on the optimizer has a state
        boundary = Boundary(loop, next(steps).step)
        copy = deepcopy(boundary.state)
    next(steps)
    assert {intact for intact, _ in claims} == {True, False}
    assert all(unchanged for intact, unchanged in claims if intact)


def test_a_stop_before_the_first_step_and_resume_begins_anew(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(small.override({"steps": 1}), tmp_path)
    run.pause()
    until(lambda: run.state == "paused", run)
    assert run.records() == []
    run.stop()
    assert run.wait(LIMIT).name == "stopped"
    run.resume_from_checkpoint()
    assert run.wait(LIMIT).name == "done", run.log()
    assert [record.step for record in run.records()] == [0, 1]


def test_the_cluster_s_signal_is_a_stop_and_a_second_stop_kills(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(small.override({"steps": 10_000}), tmp_path)
    until(at_step(run, 1), run)
    pid = run.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # a worker that hangs
    run.stop()
    assert run.alive
    run.stop()
    assert str(run.status) == "failed (killed)"
    assert not Path(f"/proc/{pid}/cmdline").exists()

    run.resume_from_checkpoint()
    until(at_step(run, 1), run)
    os.kill(run.status.pid or 0, signal.SIGTERM)
    assert run.wait(LIMIT).name == "stopped"


def test_a_full_disk_fails_with_its_reason_and_the_run_still_opens(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(small.override({"steps": 10_000, "checkpoint_every": 0, "keep_rollouts": 16}), tmp_path)
    until(at_step(run, 3), run)
    run.pause()
    until(lambda: run.state == "paused", run)
    size = (run.path / "rollouts.jsonl").stat().st_size
    assert size > 4096
    os.truncate(run.path / "worker.log", size + 200)  # the traceback doesn't fit either
    resource.prlimit(run.status.pid, resource.RLIMIT_FSIZE, (size + 100, size + 100))
    run.resume()
    status = run.wait(LIMIT)
    assert status.name == "failed"
    assert status.reason.startswith("File too large: "), status
    assert status.reason.endswith(".jsonl"), status
    assert len(Run.open(run.path).records()) >= 4
    assert run.samples() != []


def test_an_experiment_the_loop_refuses_fails_in_its_words(small: Experiment, tmp_path: Path) -> None:
    refused = small.override({"model": str(tmp_path / "no-model"), "task": "arithmetic"})
    run = Run(RunDirectory.create(refused, tmp_path))
    run.resume_from_checkpoint()
    status = run.wait(LIMIT)
    assert status.name == "failed"
    assert "no-model" in status.reason
    assert "Traceback" in run.log()


def test_two_clients_that_resume_at_once_start_one_worker(small: Experiment, tmp_path: Path) -> None:
    run = Run(RunDirectory.create(small.override({"steps": 10_000}), tmp_path))
    code = f"from labkit.runs import Run; Run.open({str(run.path)!r}).resume_from_checkpoint()"
    clients = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [client.communicate()[1] for client in clients]
    assert sorted(client.returncode for client in clients) == [0, 1, 1], said
    assert sum("there is nothing to resume" in text for text in said) == 2, said

    # a second client kills it, however early it is: the lock knows the worker before state.json does
    other = Run.open(run.path)
    other.stop()
    other.stop()
    assert str(other.status) == "failed (killed)"


def test_commands_after_a_stop_are_ignored(small: Experiment, tmp_path: Path) -> None:
    directory = RunDirectory.create(small, tmp_path)
    commands = Commands(directory)
    commands.may_stop = lambda: False
    for command in ("stop", "pause", "resume"):
        directory.append_command(command)
    commands.poll()
    assert directory.read_state().name == "stopping"
    assert [(e["event"], e["command"]) for e in directory.events()] == [
        *[("stopping", "stop"), ("ignored", "pause"), ("ignored", "resume")]
    ]
    commands.may_stop = lambda: True
    with pytest.raises(StopRequested):
        commands.poll()


def test_a_worker_that_is_only_just_starting_is_killed(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(small, tmp_path)
    run.directory.write_state(RunState("starting"))  # as it stands before the worker has said its number
    worker = process._workers.pop(run.path).process  # and as another client sees it
    run.kill()
    assert worker.wait(10) == -signal.SIGKILL
    assert str(run.status) == "failed (killed)"
