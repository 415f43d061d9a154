import pytest

from labkit.config import ConfigError
from labkit.tasks import load_task


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetics", {}, "task: no task 'arithmetics'; did you mean arithmetic?"),
        (
            "countdown",
            {},
            "task: no task 'countdown'; choose one of arithmetic, sums, gsm8k, reasoning-gym:NAME, dataset:PATH",
        ),
        ("arithmetic:x", {}, "task: no task 'arithmetic:x'"),
        ("dataset:", {}, "task: no task 'dataset:'"),
        (
            "arithmetic",
            {"max_operator": 4},
            "task_options.max_operator: no such setting; did you mean max_operators",
        ),
        ("arithmetic", {"min_operators": 9}, "task_options.min_operators: 9 is above max_operators 8"),
        ("arithmetic", {"max_operators": 17}, "task_options.max_operators: must be less than or equal to 16"),
        ("sums", {"digits": 2}, "task_options.digits: no such setting; there are none here"),
        ("dataset:x.jsonl", {"template": "Q:"}, "task_options.template: must hold {prompt}, got 'Q:'"),
        ("dataset:x.jsonl", {"heldout_fraction": 1}, "task_options.heldout_fraction: must be less than 1"),
        (
            "dataset:x.jsonl",
            {"answer_colum": "a"},
            "task_options.answer_colum: no such setting; did you mean answer_column",
        ),
        ("dataset:x.jsonl", {"reward": "exact"}, "task_options.reward: must be 'match' or 'math-verify', got 'exact'"),
        ("dataset:x.jsonl", {"answer_pattern": "("}, "task_options.answer_pattern: is no regular expression (missing"),
        ("dataset:x.jsonl", {"answer_pattern": "(a)(b)"}, "task_options.answer_pattern: has 2 groups; mark the answer"),
        (
            "reasoning-gym:chain_sum",
            {"template": "Q"},
            "task_options.template: must hold {question}, got 'Q'",
        ),
    ],
)
def test_bad_names_and_options(name, options, message):
    with pytest.raises(ConfigError) as caught:
        load_task(name, options)
    assert str(caught.value).startswith(message)


def test_tasks_by_name():
    assert load_task("arithmetic", {"max_operators": 4}).max_new_tokens == 28
    assert load_task("sums").name == "sums"
