"""Problem and Task: prompts whose answers can be checked, in two sets that share no prompt."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class TaskError(ValueError):
    """A task that isn't there, or data that can't be used."""


@dataclass(frozen=True)
class Chat:
    """A prompt as messages (role, content), for the model's own chat template, and what that is to be told."""

    messages: list[dict[str, str]]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    chat: Chat | None = None  # what the model gets instead of `prompt`


class Task(Protocol):
    name: str
    max_new_tokens: int
    stop: str  # generation ends at this text; "" for the end-of-sequence token

    def sample(self, rng: random.Random) -> Problem:
        """A training problem; never one of the held-out set."""

    def heldout(self, n: int, seed: int = 0) -> list[Problem]:
        """n held-out problems, the same for the same seed."""

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        """In [0, 1]. `completion` is without the stop text; `finished`: not cut off at max_new_tokens."""


def is_heldout(prompt: str, fraction: float) -> bool:
    """Whether a prompt belongs to the held-out set.

    It does if the first 64 bits of its SHA-256, read as a number in [0, 1), are below `fraction`. So the
    split is the same in every process, on every machine and for every seed, and equal prompts share a side.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction


def draw(make: Callable[[], Problem], heldout: bool, fraction: float, tries: int = 1000) -> Problem:
    """The first problem on the wanted side of the split."""
    for _ in range(tries):
        problem = make()
        if is_heldout(problem.prompt, fraction) == heldout:
            return problem
    side = "held-out" if heldout else "training"
    raise TaskError(f"no {side} problem in {tries} tries: too few different prompts; make the task larger")
