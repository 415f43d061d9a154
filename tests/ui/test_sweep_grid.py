"""The grid over real folders, and over a real sweep that another process drives."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.config import preset
from labkit.runs.process import Run
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory
from labkit.sweeps.sweep import Sweep, sweep_of
from labkit.ui.sweep_grid import SweepGrid

SMALL: dict[str, Any] = {
    **{"steps": 3, "eval_every": 1, "eval_prompts": 4, "sampling.max_new_tokens": 4},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 2},
}


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    made = sweep_of(
        preset("bf16").override(SMALL),
        {"preset": ["bf16", "fp8-rollout"]},
        seeds=2,
        question="What <b>?",
        root=tmp_path,
    )
    yield made
    for run in Run.all(made.path):
        run.kill()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_every_standing_has_its_mark_and_reasons_are_escaped(sweep: Sweep) -> None:
    states = {"bf16-s0": RunState("failed", "no <room>"), "bf16-s1": RunState("stopped")}
    for cell in sweep.cells:
        if cell.id in states:
            RunDirectory.create(cell.experiment, sweep.path, cell.id).write_state(states[cell.id])
    grid = SweepGrid(sweep)
    assert "✗" in grid.body.value
    assert "no &lt;room&gt;" in grid.body.value
    assert "title='unfinished'" in grid.body.value
    assert grid.body.value.count("title='missing'") == 2
    assert "What &lt;b&gt;?" in grid.status.value
    assert "0 of 4 cells done · 1 unfinished · 1 failed · nobody drives it" in grid.status.value
    grid.close()


def test_the_grid_follows_a_sweep_without_blocking_and_a_new_one_closes_it(sweep: Sweep) -> None:
    began = time.monotonic()
    grid = SweepGrid(str(sweep.path))
    assert time.monotonic() - began < 5
    sweep.start(parallel=1)
    until(lambda: "driven by process" in grid.status.value)
    until(lambda: "1 of 4 cells done" in grid.status.value)
    assert "(n = 1)" in grid.body.value
    assert "<path d='M" in grid.body.value
    sweep.stop()
    until(lambda: sweep.driver is None)
    until(lambda: "nobody drives it" in grid.status.value)
    later = SweepGrid(sweep)
    until(lambda: [thread.name for thread in threading.enumerate()].count("labkit-sweep-grid") == 1)
    assert "is closed" in grid.status.value
    later.close()
