"""Real cells in real processes: alone and side by side, interrupted, killed, failing."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment
from labkit.runs import lock
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.store import RunError
from labkit.sweeps.drive import Finished
from labkit.sweeps.executor import LocalProcesses
from labkit.sweeps.plan import Cell
from labkit.sweeps.sweep import Sweep, sweep_of

BOTH = {"preset": ["bf16", "fp8-rollout"]}


def numbers(run: Run) -> list[str]:
    """All that a run found out: everything but times."""
    return [str((record.step, record.metrics, record.tokens, record.kv_scales)) for record in run.records()]


def runs(finished: list[Finished]) -> dict[str, Run]:
    assert [each.standing for each in finished] == ["done"] * len(finished), [str(each) for each in finished]
    return {each.cell.id: each.run for each in finished}


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_alone_side_by_side_and_killed_on_the_way_a_cell_gives_the_same_bits(small: Experiment, root: Path) -> None:
    experiment = small.override({"steps": 4, "checkpoint_every": 1, "eval_every": 4})
    together = sweep_of(experiment, BOTH, seeds=1, name="together", root=root)
    side_by_side = runs(list(together.run(LocalProcesses(2))))
    assert set(side_by_side) == {"bf16-s0", "fp8-rollout-s0"}

    alone = sweep_of(experiment, BOTH, seeds=1, name="alone", root=root)
    alone.start(parallel=1)
    first = root / "alone" / "bf16-s0"
    until(lambda: list((first / "checkpoints").glob("step-*")))
    assert alone.driver is not None
    os.kill(alone.driver, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # its worker goes on without it; as in a power cut, it is gone too
        os.killpg(int((first / "lock").read_text()), signal.SIGKILL)
    until(lambda: alone.standings()["bf16-s0"] != "running")
    assert alone.standings() == {"bf16-s0": "unfinished", "fp8-rollout-s0": "missing"}

    after = runs(list(Sweep.open(root / "alone").run(LocalProcesses(1))))
    assert "resumed" in [event["event"] for event in after["bf16-s0"].events()]
    assert {name: numbers(run) for name, run in after.items()} == {
        name: numbers(run) for name, run in side_by_side.items()
    }
    again = list(alone.run())
    assert [each.before for each in again] == [True, True]


def test_an_interrupt_stops_the_cells_with_a_checkpoint(small: Experiment, root: Path) -> None:
    sweep = sweep_of(small.override({"steps": 1000}), BOTH, seeds=1, name="stopped", root=root)

    def interrupt(cell: Cell, record: StepRecord) -> None:
        with pytest.raises(RunError, match=f"driven by another process \\({os.getpid()}\\)"):
            list(Sweep.open("stopped", root).run())
        if record.step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(sweep.run(LocalProcesses(1), on_record=interrupt))
    assert sweep.standings() == {"bf16-s0": "unfinished", "fp8-rollout-s0": "missing"}
    run = sweep.run_of(sweep.cells[0])
    assert run is not None
    assert run.state == "stopped"
    assert run.checkpoints()
    assert sweep.driver is None
    os.close(lock.take(sweep.path))


def test_a_cell_that_failed_is_reported_and_done_again_only_when_asked(small: Experiment, root: Path) -> None:
    sweep = sweep_of(
        small, arms={"nothing": {"preset": "fp8-rollout", "recipe.keep_bf16.first_layers": 9}}, seeds=1, root=root
    )
    (failed,) = sweep.run()
    assert (failed.standing, failed.before) == ("failed", False)
    assert "leave none of the model's 4 layers in FP8" in str(failed)
    (reported,) = sweep.run()
    assert (reported.standing, reported.before) == ("failed", True)
    (retried,) = sweep.run(retry=True)
    assert (retried.standing, retried.before) == ("failed", False)
