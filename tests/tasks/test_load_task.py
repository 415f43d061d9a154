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
        ("dataset:x.jsonl", {"reward": "exact"}, "task_options.reward: must be 'match', 'math-verify', or your own as"),
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


OWN = """
from labkit.tasks import Arithmetic

class Longer(Arithmetic):
    name = "longer"
    def __init__(self, extra: int = 1) -> None:
        super().__init__()
        self.max_new_tokens += extra

class Half:
    name = "half"
    def sample(self, rng):
        pass
"""


def test_a_task_of_ones_own_is_made_with_its_options(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    task = load_task(f"{tmp_path}/mine.py:Longer", {"extra": 5})
    assert (task.name, task.max_new_tokens) == ("longer", load_task("arithmetic").max_new_tokens + 5)
    with pytest.raises(ConfigError, match=r"task_options: .*'extr'; mine.py:Longer takes \(extra: int = 1\)"):
        load_task(f"{tmp_path}/mine.py:Longer", {"extr": 5})
    with pytest.raises(ConfigError, match=r"task: mine.py:Half lacks heldout, max_new_tokens, reward, stop; labkit"):
        load_task(f"{tmp_path}/mine.py:Half")
    with pytest.raises(ConfigError, match=r"task: .*mine.py defines no None at its top level; it has Arithmetic, Half"):
        load_task(f"{tmp_path}/mine.py:None")
