"""sums: one-digit sums for a language model, which sees one worked example and has to stop after the number.

    4+4=8
    3+5=          answer: 8, then a newline

There are 81 sums of two digits from 1 to 9. They are held out by unordered pair, so 3+5 and 5+3 are on the
same side: 12 of the 44 pairs, those whose SHA-256 is smallest. The example's own pair is always in training.
"""

import hashlib
import random

from labkit.config.settings import Settings
from labkit.tasks.task import Problem

EXAMPLE = (4, 4)
HELDOUT_PAIRS = 12


class SumsOptions(Settings):
    """There is nothing to set."""


class Sums:
    name = "sums"
    max_new_tokens = 4
    stop = "\n"

    def __init__(self, options: SumsOptions | None = None) -> None:
        held_out = heldout_pairs()
        problems = all_problems()
        self._heldout = [problem for problem in problems if _pair(problem) in held_out]
        self._training = [problem for problem in problems if _pair(problem) not in held_out]

    def sample(self, rng: random.Random) -> Problem:
        return rng.choice(self._training)

    def heldout(self, n: int, seed: int = 0) -> list[Problem]:
        """In a shuffled order that is repeated when n is above their number: each counts equally often."""
        shuffled = random.Random(seed).sample(self._heldout, len(self._heldout))
        return [shuffled[i % len(shuffled)] for i in range(n)]

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        return float(finished and completion.strip() == problem.answer)


def all_problems() -> list[Problem]:
    """The 81 sums, for an exact evaluation."""
    return [_problem(a, b) for a in range(1, 10) for b in range(1, 10)]


def heldout_pairs() -> frozenset[tuple[int, int]]:
    """The unordered pairs (a <= b) that training never shows."""
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10) if (a, b) != EXAMPLE]
    return frozenset(sorted(pairs, key=_digest)[:HELDOUT_PAIRS])


def _digest(pair: tuple[int, int]) -> bytes:
    return hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest()


def _problem(a: int, b: int) -> Problem:
    left, right = EXAMPLE
    return Problem(f"{left}+{right}={left + right}\n{a}+{b}=", str(a + b), {"a": a, "b": b})


def _pair(problem: Problem) -> tuple[int, int]:
    a, b = problem.metadata["a"], problem.metadata["b"]
    return min(a, b), max(a, b)
