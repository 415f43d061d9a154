import random
import subprocess
import sys
from itertools import pairwise

import pytest

from labkit.tasks import Problem, is_heldout, load_task
from labkit.tasks.arithmetic import CHARACTERS, Arithmetic

PROBLEM = Problem("7+2*3-8=", "9")


def test_worked_example():
    task = Arithmetic()
    assert task.direct(PROBLEM) == "#9"
    assert task.scratchpad(PROBLEM, 0.0, random.Random(0)) == "7+2=9;9*3=7;7-8=9;#9"
    assert (task.name, task.stop, task.max_new_tokens) == ("arithmetic", "", 52)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("#9", 1),
        ("7+2=9;9*3=7;7-8=9;#9", 1),
        ("#1#9", 1),
        ("#8", 0),
        ("9", 0),
        ("#9;", 0),
        ("#", 0),
        ("", 0),
        ("#99", 0),
    ],
)
def test_reward_is_for_the_text_after_the_last_mark(completion, reward):
    assert Arithmetic().reward(PROBLEM, completion, finished=True) == reward
    assert Arithmetic().reward(PROBLEM, completion, finished=False) == 0


def test_problems_are_right_and_within_the_characters():
    task, rng = Arithmetic(), random.Random(1)
    for _ in range(300):
        problem = task.sample(rng)
        value = int(problem.prompt[0])
        for operator, digit in zip(problem.prompt[1:-1:2], problem.prompt[2:-1:2], strict=True):
            value = eval(f"{value}{operator}{digit}") % 10
        assert str(value) == problem.answer
        assert 3 <= sum(operator in "+-*" for operator in problem.prompt) <= 8
        text = problem.prompt + task.scratchpad(problem, 0.5, rng)
        assert set(text) <= set(CHARACTERS)
        assert len(task.scratchpad(problem, 0.5, rng)) < task.max_new_tokens
        assert task.reward(problem, task.scratchpad(problem, 0.0, rng), True) == 1.0


def test_noise_is_carried_through_the_scratchpad():
    rng, task = random.Random(0), Arithmetic()
    texts = {task.scratchpad(PROBLEM, 1.0, rng) for _ in range(50)}
    assert len(texts) > 25
    for text in texts:
        steps = text.split(";")
        assert steps[-1] == "#" + steps[-2][-1]
        assert all(later[0] == earlier[-1] for earlier, later in pairwise(steps[:-1]))


def test_training_and_held_out_are_disjoint_and_the_held_out_set_is_fixed():
    task = Arithmetic()
    held_out = task.heldout(400)
    assert held_out == task.heldout(400)
    assert held_out[:50] == task.heldout(50)
    assert task.heldout(20, seed=1) != task.heldout(20)
    rng = random.Random(0)
    training = {task.sample(rng).prompt for _ in range(2000)}
    assert not training & {problem.prompt for problem in held_out}
    assert all(is_heldout(problem.prompt, 0.25) for problem in held_out)


def test_the_split_does_not_depend_on_the_process():
    code = "from labkit.tasks.arithmetic import *; print([p.prompt for p in Arithmetic().heldout(5)])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{[problem.prompt for problem in Arithmetic().heldout(5)]}\n"}


def test_known_sides():
    assert is_heldout("a", 0.8)  # SHA-256 of "a" begins ca978112
    assert not is_heldout("a", 0.79)


def test_few_operators_still_split():
    task = load_task("arithmetic", {"min_operators": 1, "max_operators": 1})
    assert task.max_new_tokens == 10
    assert len({problem.prompt for problem in task.heldout(300)}) > 30
