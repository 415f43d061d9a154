"""Sweeps whose cells are placed by Ray, beside the same sweeps in local processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labkit.config import Experiment
from labkit.runs.process import Run
from labkit.runs.store import RunError
from labkit.sweeps import LocalProcesses, Sweep, executor_for, sweep_of
from tests.cluster.conftest import comparable

psutil = pytest.importorskip("psutil")
BOTH = {"preset": ["bf16", "fp8-e2e"]}
LIMIT = 240.0


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    for folder in tmp_path.iterdir():
        for run in Run.all(folder):
            run.kill()


def until(condition: Callable[[], object], sweep: Sweep) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"{sweep.standings()}\n{(sweep.path / 'sweep.log').read_text()}"
        time.sleep(0.05)


def numbers(sweep: Sweep) -> dict[str, list[object]]:
    runs = {cell.id: sweep.run_of(cell) for cell in sweep.cells}
    return {name: [comparable(record) for record in run.records()] for name, run in runs.items() if run}


def alone(experiment: Experiment, root: Path) -> dict[str, list[object]]:
    sweep = sweep_of(experiment, BOTH, seeds=1, name="alone", root=root)
    assert [each.standing for each in sweep.run(LocalProcesses(1))] == ["done", "done"]
    return numbers(sweep)


def test_a_cluster_gives_the_cells_of_local_processes(small: Experiment, address: str, tmp_path: Path) -> None:
    experiment = small.override({"steps": 2, "eval_every": 2, "checkpoint_every": 0})
    sweep = sweep_of(experiment, BOTH, seeds=1, name="placed", root=tmp_path)
    sweep.start(ray_address=address)
    until(lambda: list(sweep.standings().values()) == ["done", "done"], sweep)
    until(lambda: sweep.driver is None, sweep)
    assert numbers(sweep) == alone(experiment, tmp_path)
    for cell in sweep.cells:
        assert sweep.run_of(cell).experiment.diff(cell.experiment) == {}


def test_where_no_ray_answers_nothing_is_begun(small: Experiment, tmp_path: Path) -> None:
    sweep = sweep_of(small, BOTH, seeds=1, name="nowhere", root=tmp_path)
    with pytest.raises(RunError, match="no Ray cluster can be reached there"), executor_for(None, "localhost:1"):
        pass
    assert set(sweep.standings().values()) == {"missing"}


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_ray_and_another_goes_on(small: Experiment, tmp_path: Path) -> None:
    experiment = small.override({"checkpoint_every": 1, "steps": 6})
    sweep = sweep_of(experiment, BOTH, seeds=1, name="killed", root=tmp_path)
    sweep.start(ray_address="local")
    first = sweep.path / sweep.cells[0].id
    until(lambda: list((first / "checkpoints").glob("step-*")), sweep)
    driver = psutil.Process(sweep.driver)
    started = driver.children(recursive=True)
    assert any("labkit.runs.worker" in " ".join(child.cmdline()) for child in started)
    agents = {child for child in started if child.name().endswith("Agent")}  # idle; they look for their parent rarely
    os.kill(driver.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(set(started) - agents, timeout=30)
    assert not left
    assert "running" not in sweep.standings().values()
    assert [each.standing for each in sweep.run(LocalProcesses(2))] == ["done", "done"]
    assert numbers(sweep) == alone(experiment, tmp_path)
