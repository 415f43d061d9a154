import random

import pytest

from labkit.config import ConfigError
from labkit.tasks import TaskError, load_task
from labkit.tasks.reasoning_gym import available

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])


def test_rewards_follow_the_dataset():
    task = load_task("reasoning-gym:chain_sum", {"params": {"min_terms": 2, "max_terms": 3}})
    problem = task.sample(random.Random(0))
    assert "<answer>" in problem.prompt
    assert task.reward(problem, f"so <answer> {problem.answer} </answer>", True) == 1.0
    assert task.reward(problem, f"<answer>0</answer> no: <answer>{problem.answer}</answer>", True) == 1.0
    assert task.reward(problem, f"<answer>{problem.answer}</answer>", False) == 0.0
    assert task.reward(problem, problem.answer, True) == 0.0
    assert task.reward(problem, "<answer>x</answer>", True) == 0.0


def test_training_and_held_out_are_disjoint_even_in_a_small_dataset():
    task = load_task("reasoning-gym:chain_sum", {"params": {"max_terms": 2, "max_digits": 1}})
    held_out = task.heldout(60)
    assert held_out == task.heldout(60)
    rng = random.Random(0)
    training = {task.sample(rng).prompt for _ in range(200)}
    assert not training & {problem.prompt for problem in held_out}


def test_the_template_is_used_as_it_is():
    task = load_task("reasoning-gym:chain_sum", {"template": " {x} {question}\n"})
    prompt = task.sample(random.Random(0)).prompt
    assert prompt.startswith(" {x} State")
    assert prompt.endswith("\n")


def test_a_puzzle_with_many_solutions_has_no_one_answer():
    task = load_task("reasoning-gym:graph_color")
    assert task.sample(random.Random(0)).answer == ""


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("chain_sums", {}, TaskError, "reasoning-gym: no dataset 'chain_sums'; did you mean chain_sum"),
        ("zzzz", {}, TaskError, "reasoning-gym: no dataset 'zzzz'; the "),
        (
            "chain_sum",
            {"params": {"min_term": 2}},
            ConfigError,
            "task_options.params.min_term: chain_sum has no such parameter; did you mean min_terms",
        ),
        (
            "chain_sum",
            {"params": {"min_terms": 9, "max_terms": 2}},
            ConfigError,
            "task_options.params: chain_sum does not accept",
        ),
        (
            "chain_sum",
            {"params": {"min_terms": "two"}},
            ConfigError,
            "task_options.params: chain_sum does not accept",
        ),
        (
            "chain_sum",
            {"params": {"seed": 2}},
            ConfigError,
            "task_options.params.seed: chain_sum has no such parameter",
        ),
    ],
)
def test_bad_names_and_parameters(name, options, error, message):
    with pytest.raises(error) as caught:
        load_task(f"reasoning-gym:{name}", options)
    assert str(caught.value).startswith(message)
