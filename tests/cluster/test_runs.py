"""Whole runs over Ray, beside the same Experiment in one process."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment
from labkit.rl.loop import Loop
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from tests.cluster.conftest import comparable

pytestmark = pytest.mark.slow  # each waits for whole runs over Ray

psutil = pytest.importorskip("psutil")
LIMIT = 240.0
HELD = {"recipe.recalibration.margin": 1.5}


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    for run in Run.all(tmp_path):
        run.kill()


def over_ray(experiment: Experiment, placement: str, address: str, **changes: Any) -> Experiment:
    settings = {f"cluster.{key}": value for key, value in changes.items()}
    return experiment.override({"cluster.placement": placement, "cluster.address": address, **settings})


def until(condition: Callable[[], bool], run: Run) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert run.alive, f"{run.status}\n{run.log()}"
        assert time.monotonic() < deadline, f"{run.status} for too long"
        time.sleep(0.02)


def at_step(run: Run, step: int) -> Callable[[], bool]:
    return lambda: any(record.step >= step for record in run.records())


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == name]


def placed(run: Run, actor: str) -> int:
    """The process of the actor, once there is one."""
    until(lambda: any(event["actor"] == actor for event in events(run, "placed")), run)
    return [event["pid"] for event in events(run, "placed") if event["actor"] == actor][-1]


def in_process(experiment: Experiment, switches: dict[int, Any] | None = None) -> list[StepRecord]:
    loop, records = Loop(experiment.override({"threads": None})), []
    for record in loop.steps():
        records.append(record)
        if switches and record.step in switches:
            loop.switch(switches[record.step])
    return records


def assert_same(run: Run, records: list[StepRecord]) -> None:
    assert [comparable(record) for record in run.records()] == [comparable(record) for record in records]
    assert [run.samples(record.step) for record in records] == [list(record.samples) for record in records]


@pytest.fixture(scope="module")
def plain(small: Experiment) -> list[StepRecord]:
    records = in_process(small)
    assert any(record.metric("grad_norm") > 0 for record in records), "nothing was trained, so nothing is tested"
    return records


def test_separate_and_a_lost_engine_give_the_records_of_one_process(
    plain: list[StepRecord], small: Experiment, address: str, tmp_path: Path
) -> None:
    run = Run.start(over_ray(small, "separate", address), tmp_path)
    until(at_step(run, 2), run)
    lost = placed(run, "rollout")
    os.kill(lost, signal.SIGKILL)
    assert run.wait(LIMIT).name == "done", run.log()
    assert_same(run, plain)
    assert [event["actor"] for event in events(run, "lost")] == ["rollout"]
    pids = {event["pid"] for event in events(run, "placed")}
    assert len(pids) == 3
    deadline = time.monotonic() + 10  # the cluster lives on, and ends actors when it gets to it
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_lost_trainer_is_replaced_and_its_switches_are_made_again(
    small: Experiment, address: str, tmp_path: Path
) -> None:
    run = Run.start(over_ray(small, "colocated", address).override({"steps": 6, "checkpoint_every": 3}), tmp_path)
    other = small.recipe.override({"recalibration.margin": 1.5})
    until(at_step(run, 0), run)
    run.switch(other)
    until(lambda: bool(run.switches()), run)
    run.pause()
    until(lambda: run.state == "paused", run)
    (switch,) = run.switches()
    os.kill(placed(run, "trainer"), signal.SIGKILL)
    until(lambda: len(events(run, "placed")) == 2 and run.state == "paused", run)
    run.resume()
    assert run.wait(LIMIT).name == "done", run.log()
    assert [event["actor"] for event in events(run, "lost")] == ["trainer"]
    assert [made.step for made in run.switches()] == [switch.step]
    assert_same(run, in_process(small.override({"steps": 6}), {switch.step - 1: other}))


def test_overlapped_paused_stopped_and_resumed_it_is_the_run_that_samples_between_steps(
    small: Experiment, address: str, tmp_path: Path
) -> None:
    stale = small.override({"grpo.staleness": 1, "steps": 8})
    run = Run.start(over_ray(stale, "separate", address, overlap=True), tmp_path)
    until(at_step(run, 2), run)
    run.pause()
    until(lambda: run.state == "paused", run)
    steps = len(run.records())
    time.sleep(0.5)
    assert len(run.records()) == steps
    run.resume()
    until(at_step(run, 3), run)
    asked = time.monotonic()
    run.stop()
    assert run.wait(LIMIT).name == "stopped", run.log()
    assert time.monotonic() - asked < 30
    run.resume_from_checkpoint()
    assert run.wait(LIMIT).name == "done", run.log()
    assert_same(run, in_process(stale))
    assert sum("generation_hidden" in record.metrics for record in run.records()) >= 5


def test_one_loss_too_many_fails_with_its_reason(small: Experiment, address: str, tmp_path: Path) -> None:
    run = Run.start(over_ray(small.override({"steps": 1000}), "colocated", address, restarts=0), tmp_path)
    os.kill(placed(run, "trainer"), signal.SIGKILL)
    status = run.wait(LIMIT)
    assert status.name == "failed"
    assert "lost the trainer actor (" in status.reason
    assert "cluster.restarts allows 0" in status.reason


def test_an_actor_that_no_node_can_take_is_refused(small: Experiment, address: str, tmp_path: Path) -> None:
    run = Run.start(over_ray(small.override({"threads": 64}), "colocated", address), tmp_path)
    assert "the run reserves 64 CPUs, the Ray cluster has 4" in run.wait(LIMIT).reason


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:10001"])
def test_an_address_where_nobody_answers_is_named(address: str, small: Experiment, tmp_path: Path) -> None:
    run = Run.start(over_ray(small, "colocated", address), tmp_path)
    status = run.wait(LIMIT)
    assert status.name == "failed"
    assert status.reason.startswith(f"cluster.address {address}: no Ray cluster can be reached there (")
    assert "ray start --head" in status.reason


def of_session(leader: int) -> list[str]:
    """What a worker has started and still lives: it leads a session of its own."""
    left = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.info["pid"]) == leader:
                left.append(process.info["name"])
        except (ProcessLookupError, PermissionError):
            continue
    return left


def test_a_ray_of_its_own_leaves_nothing_behind(small: Experiment, tmp_path: Path) -> None:
    run = Run.start(over_ray(small.override({"steps": 1000}), "separate", ""), tmp_path)
    until(at_step(run, 1), run)
    pid = run.status.pid
    assert pid
    assert {"raylet", "gcs_server"} <= set(of_session(pid)), "it is looked for in the wrong place"
    folders = list(Path("/tmp").glob(f"labkit-ray-{pid}-*"))
    assert len(folders) == 1
    run.stop()
    assert run.wait(LIMIT).name == "stopped", run.log()
    until_ended(pid)
    assert not folders[0].exists()

    run.resume_from_checkpoint()
    steps = len(run.records())
    until(lambda: len(run.records()) > steps, run)
    pid = run.status.pid
    assert pid
    run.kill()
    assert str(run.status) == "failed (killed)"
    until_ended(pid)
    time.sleep(0.5)
    assert str(run.status) == "failed (killed)", "something lived on and wrote"


def until_ended(leader: int) -> None:
    deadline = time.monotonic() + 10
    while left := of_session(leader):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
