"""Run directories with real files, filled by hand, and a real experiment small enough to run in seconds."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment
from labkit.config.presets import preset
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory

SMALL = {
    "steps": 8,
    "eval_every": 4,
    "eval_prompts": 8,
    "checkpoint_every": 3,
    "keep_rollouts": 2,
    "threads": 1,
    "sampling.max_new_tokens": 12,
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "grpo.minibatches": 2,
}


def make_record(step: int, **changes: Any) -> StepRecord:
    trained = step > 0
    values: dict[str, Any] = {
        "step": step,
        "weight_version": max(step - 1, 0),
        "time": 1_700_000_000.0 + step,
        "elapsed": 2.0 * step,
        "metrics": {
            "heldout_accuracy": 0.3 + 0.01 * step if step % 2 == 0 else None,
            **({"accuracy": 0.25, "token_mult_prob_error": 1.002, "gen_kl_error": 1e-4} if trained else {}),
            **({"ess": 0.99, "kept_share": 0.5} if trained else {}),
        },
        "timings": {"generate": 1.0, "update": 0.5, "refit": 0.5, "evaluate": 9.0} if trained else {"evaluate": 9.0},
        "tokens": {"prompt": 100, "generated": 300, "trained": 200, "padded": 250} if trained else {},
        "active": {"rollout.linears": {"state": "emulated", "detail": "9 layers"}},
        "engine": {"weight_version": max(step - 1, 0), "scale_version": max(step - 1, 0)},
        "samples": [{"prompt": "1+1=", "completion": "#2", "reward": 1.0, "g": [-0.5], "p": [-0.25]}],
    }
    return StepRecord(**{**values, **changes})


@pytest.fixture
def record() -> Callable[..., StepRecord]:
    return make_record


@pytest.fixture(scope="session")
def small() -> Experiment:
    return preset("fp8-e2e-kv").override(SMALL)


@pytest.fixture
def finished_run(tmp_path: Path) -> Callable[..., Run]:
    """make(recipe, seed, exact) -> a finished Run of five steps under tmp_path."""

    def make(recipe: str = "fp8-e2e", seed: int = 0, exact: bool = False, records: int = 6) -> Run:
        experiment = preset(recipe).override({"seed": seed, "steps": 5})
        directory = RunDirectory.create(experiment, tmp_path)
        for step in range(records):
            done = make_record(step)
            if exact and step:
                done.metrics.update(token_mult_prob_error=1.0, gen_kl_error=0.0, ess=math.nan)
            if exact:
                done.active["rollout.linears"] = {"state": "bf16", "detail": ""}
            directory.append_record(done)
        directory.write_state(RunState("done"))
        return Run.open(directory.path)

    return make
