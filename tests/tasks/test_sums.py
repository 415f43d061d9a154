import random

import pytest

from labkit.tasks import Problem
from labkit.tasks.sums import Sums, all_problems, heldout_pairs


def pair(problem):
    return tuple(sorted((problem.metadata["a"], problem.metadata["b"])))


def test_all_81():
    problems = all_problems()
    assert len({problem.prompt for problem in problems}) == 81
    assert problems[0] == Problem("4+4=8\n1+1=", "2", {"a": 1, "b": 1})
    assert problems[-1] == Problem("4+4=8\n9+9=", "18", {"a": 9, "b": 9})


def test_the_split_is_by_unordered_pair():
    task, rng = Sums(), random.Random(0)
    training = {pair(task.sample(rng)) for _ in range(2000)}
    held_out = {pair(problem) for problem in task.heldout(81)}
    assert held_out == heldout_pairs()
    assert (len(held_out), len(training)) == (12, 33)
    assert not training & held_out
    assert (4, 4) in training


def test_the_held_out_set_is_repeated_evenly():
    problems = Sums().heldout(100)
    counts = {prompt: sum(p.prompt == prompt for p in problems) for prompt in {p.prompt for p in problems}}
    assert len(problems) == 100
    assert max(counts.values()) - min(counts.values()) <= 1
    assert problems == Sums().heldout(100)
    assert problems != Sums().heldout(100, seed=1)


@pytest.mark.parametrize(
    ("completion", "finished", "reward"),
    [("8", True, 1), (" 8", True, 1), ("8", False, 0), ("80", True, 0), ("8 9", True, 0), ("", True, 0)],
)
def test_reward(completion, finished, reward):
    assert Sums().reward(Problem("4+4=8\n3+5=", "8"), completion, finished) == reward


def test_what_the_engine_needs():
    assert (Sums().max_new_tokens, Sums().stop) == (4, "\n")
