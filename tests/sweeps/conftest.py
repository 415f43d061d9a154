"""Sweeps of the tiny policy, small enough for seconds, each cell with the worker process that it has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment, preset
from labkit.runs.process import Run

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
