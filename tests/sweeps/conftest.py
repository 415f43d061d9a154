"""Sweeps of the tiny policy, small enough for seconds, each cell with the worker process that it has."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment, preset
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory
from labkit.sweeps.plan import Cell
from labkit.sweeps.sweep import Sweep, sweep_of

SMALL: dict[str, Any] = {
    **{"steps": 2, "eval_every": 2, "eval_prompts": 8, "sampling.max_new_tokens": 8, "keep_rollouts": 1},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 4},
}


@pytest.fixture(scope="session")
def small() -> Experiment:
    return preset("bf16").override(SMALL)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for folder in [path for path in tmp_path.iterdir() if path.is_dir()]:
        for run in Run.all(folder):
            run.kill()


@pytest.fixture(scope="session")
def fill() -> Callable[[Sweep, Cell, float, float], None]:
    """fill(sweep, cell, accuracy, excess): the folder of a cell that is done, written by hand."""

    def fill(sweep: Sweep, cell: Cell, accuracy: float, excess: float) -> None:
        run = RunDirectory.create(cell.experiment, sweep.path, cell.id)
        for step in range(5):
            run.append_record(_record(cell, step, accuracy, excess))
        run.write_state(RunState("done"))

    return fill


@pytest.fixture
def filled(root: Path, fill: Callable[[Sweep, Cell, float, float], None]) -> Callable[..., Sweep]:
    """make(accuracies, excess) -> a sweep of such cells: {arm: {seed: accuracy at the end}}, {arm: TMPE - 1}."""

    def make(accuracies: dict[str, dict[int, float]], excess: dict[str, float] | None = None, **plan: Any) -> Sweep:
        arms = {arm: {"preset": "fp8-rollout" if arm != "bf16" else arm, "grpo.lr": 1e-4 * (at + 1)}
                for at, arm in enumerate(accuracies)}  # fmt: skip
        seeds = sorted({seed for values in accuracies.values() for seed in values})
        sweep = sweep_of(preset("bf16", steps=4), arms=arms, seeds=seeds, name="filled", root=root, **plan)
        for cell in sweep.cells:
            if cell.seed in accuracies[cell.arm]:
                fill(sweep, cell, accuracies[cell.arm][cell.seed], (excess or {}).get(cell.arm, 0.0))
        return sweep

    return make


def _record(cell: Cell, step: int, accuracy: float, excess: float) -> StepRecord:
    heldout = 0.3 + (accuracy - 0.3) * step / 4 if step % 2 == 0 else None
    metrics: dict[str, float | None] = {"heldout_accuracy": heldout}
    if step:
        metrics |= {"token_mult_prob_error": 1 + excess * (1 + cell.seed / 10), "gen_kl_error": excess / 10, "ess": 0.9}
    fp8 = {"rollout.linears": {"state": "emulated", "detail": ""}} if cell.arm != "bf16" else {}
    return StepRecord(
        step=step, weight_version=max(step - 1, 0), time=float(step), elapsed=float(step), metrics=metrics,
        timings={"generate": 1.0, "update": 1.0, "evaluate": 9.0} if step else {"evaluate": 9.0},
        tokens={"prompt": 100, "generated": 300, "trained": 400, "padded": 400} if step else {},
        active=fp8, engine={"weight_version": max(step - 1, 0), "scale_version": 0},
    )  # type: ignore[arg-type]  # fmt: skip
