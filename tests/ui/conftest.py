"""A run so small that a panel can be driven through many of its steps, and waiting for what it does."""

import time
from collections.abc import Callable
from typing import Any

from labkit.config import Experiment, preset

SMALL: dict[str, Any] = {
    **{"steps": 400, "eval_every": 400, "eval_prompts": 4, "threads": 1, "sampling.max_new_tokens": 4},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 4, "checkpoint_every": 2},
}


def small(**changes: Any) -> Experiment:
    return preset("fp8-rollout").override(SMALL | changes)


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value
