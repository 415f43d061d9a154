"""Small batches of the shipped tiny policy, each collected once."""

from collections.abc import Callable
from functools import cache

import pytest

from labkit.analysis import Batch, collect
from labkit.config import Experiment, preset

SMALL = {
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "eval_prompts": 1,
    "sampling.max_new_tokens": 20,
    "steps": 4,
    "eval_every": 4,
}


def small(recipe: str, **changes: object) -> Experiment:
    return preset(recipe, **{**SMALL, **changes})


@pytest.fixture(scope="session")
def batch_of() -> Callable[[str], Batch]:
    return cache(lambda recipe: collect(small(recipe)))
