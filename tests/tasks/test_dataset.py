import json
import random
import time

import pytest

from labkit.tasks import Problem, TaskError, load_task
from labkit.tasks.dataset import DatasetOptions, DatasetTask

ROWS = [{"prompt": f"{a} times {b}?", "answer": str(a * b)} for a in range(12) for b in range(12)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "questions.jsonl", ROWS)


def test_jsonl(questions):
    task = load_task(f"dataset:{questions}", {"template": "Q: {prompt} {x}\nA:", "stop": "\n", "max_new_tokens": 8})
    assert (task.name, task.stop, task.max_new_tokens) == (f"dataset:{questions}", "\n", 8)
    held_out = {problem.prompt for problem in task.heldout(1000)}
    rng = random.Random(0)
    training = {task.sample(rng).prompt for _ in range(3000)}
    assert len(training | held_out) == len(ROWS)
    assert not training & held_out
    assert 4 <= len(held_out) <= 30
    assert task.heldout(5) == task.heldout(5)
    assert next(iter(training)).startswith("Q: ")
    assert next(iter(training)).endswith(" {x}\nA:")


def test_every_problem_has_its_place(questions):
    task = DatasetTask(str(questions))
    problems = dict(task.problems())
    assert len(problems) == len(ROWS)
    assert problems[f"{questions}, line 3"] == Problem(ROWS[2]["prompt"], ROWS[2]["answer"])


def test_parquet_gives_the_same_problems(questions, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "questions.parquet")
    task = load_task(f"dataset:{tmp_path / 'questions.parquet'}")
    assert task.heldout(1000) == load_task(f"dataset:{questions}").heldout(1000)


def test_a_folder_of_data_files(questions):
    task = load_task(f"dataset:{questions.parent}")
    assert {problem.prompt for problem in task.heldout(1000)} == {
        problem.prompt for problem in load_task(f"dataset:{questions}").heldout(1000)
    }


def test_columns_can_be_named(tmp_path):
    path = write(tmp_path / "named.jsonl", [{"q": row["prompt"], "a": row["answer"], "id": 1} for row in ROWS])
    task = DatasetTask(str(path), DatasetOptions(prompt_column="q", answer_column="a"))
    assert task.sample(random.Random(0)) in [Problem(row["prompt"], row["answer"]) for row in ROWS]


def test_a_column_inside_another_is_named_with_dots(tmp_path):
    rows = [{"p": row["prompt"], "reward_model": {"ground_truth": row["answer"], "style": "rule"}} for row in ROWS]
    path = write(tmp_path / "nested.jsonl", rows)
    options = {"prompt_column": "p", "answer_column": "reward_model.ground_truth"}
    assert load_task(f"dataset:{path}", options).heldout(5) == DatasetTask(
        str(write(tmp_path / "flat.jsonl", ROWS))
    ).heldout(5)
    with pytest.raises(TaskError, match=r"no column 'reward_model.truth'; did you mean reward_model\.ground_truth"):
        load_task(f"dataset:{path}", options | {"answer_column": "reward_model.truth"})


def test_chat_messages_stay_a_chat(tmp_path):
    def chat(question):
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]

    path = write(tmp_path / "chat.jsonl", [{"prompt": chat(row["prompt"]), "answer": row["answer"]} for row in ROWS])
    task = load_task(f"dataset:{path}", {"template": "Q: {prompt}", "chat_options": {"enable_thinking": False}})
    problem = task.sample(random.Random(0))
    question = problem.chat.messages[-1]["content"]
    assert question.startswith("Q: ")
    assert problem.prompt == f"Be brief.\n\n{question}"
    assert problem.chat.messages == chat(question)
    assert problem.chat.options == {"enable_thinking": False}


def test_text_becomes_a_chat_when_it_is_to(questions):
    plain, chat = load_task(f"dataset:{questions}"), load_task(f"dataset:{questions}", {"chat": True})
    assert [p.prompt for p in plain.heldout(99)] == [p.prompt for p in chat.heldout(99)]
    assert plain.sample(random.Random(0)).chat is None
    problem = chat.sample(random.Random(0))
    assert problem.chat.messages == [{"role": "user", "content": problem.prompt}]


def test_rows_that_repeat_count_once(tmp_path):
    path = write(tmp_path / "again.jsonl", ROWS * 3)
    assert len(list(DatasetTask(str(path)).problems())) == len(ROWS)


def test_a_split_of_its_own_is_held_out(tmp_path):
    write(tmp_path / "train.jsonl", [*ROWS[:100], ROWS[120]])
    write(tmp_path / "test.jsonl", ROWS[100:])
    task = load_task(f"dataset:{tmp_path}", {"heldout_split": "test"})
    assert {p.prompt for p in task.heldout(1000)} == {row["prompt"] for row in ROWS[100:]}
    rng = random.Random(0)
    training = {task.sample(rng).prompt for _ in range(3000)}
    assert training == {row["prompt"] for row in ROWS[:100]}, "a prompt of both splits is only held out"
    with pytest.raises(TaskError, match=r"can't be loaded \(split dev\): Unknown split"):
        load_task(f"dataset:{tmp_path}", {"heldout_split": "dev"})
    with pytest.raises(TaskError, match=r"is one file, without splits; drop task_options\.heldout_split"):
        load_task(f"dataset:{tmp_path / 'train.jsonl'}", {"heldout_split": "test"})


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("12", "Answer: 12", 1),
        ("12", "Answer: 3\nAnswer: 12.0\nthat is 5", 1),
        ("because\nAnswer: 12", "Answer: 12", 1),
        ("12", "12", 0),
        ("12", "Answer:", 0),
    ],
)
def test_a_pattern_says_where_the_answer_stands(questions, answer, completion, reward):
    task = load_task(f"dataset:{questions}", {"answer_pattern": "(?m)^Answer:(.*)$"})
    assert task.reward(Problem("?", answer), completion, finished=True) == reward


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("it is 3*4 #### 12", "3*4 is 12 #### 12", 1),
        ("it is 3*4 #### 12", "so 13 #### 12.0", 1),
        ("it is 3*4 #### 12", "12 #### 13", 0),
        ("#### 1,200", "The total is $1200.", 1),
        ("1200", "first 3, then 1,200.00", 1),
        ("1200", "1200 and then 3", 0),
        ("1200", "none", 0),
        ("-7", "it is -7", 1),
        ("7", "it is -7", 0),
        ("12", "", 0),
        ("New  York", "new york.", 1),
        ("New York", "It is New York", 0),
        ("New York", "It is #### New York", 1),
        ("#### yes", "#### Yes", 1),
    ],
)
def test_reward(questions, answer, completion, reward):
    task = load_task(f"dataset:{questions}")
    assert task.reward(Problem("?", answer), completion, finished=True) == reward
    assert task.reward(Problem("?", answer), completion, finished=False) == 0


GOOD = '{"prompt": "a", "answer": "b"}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, '{"prompt": "a", "answer": '], "{path}, line 2, column 27: not JSON: Expecting value"),
        (
            [GOOD, "", '{"prompt": "a"}'],
            "{path}, line 3: no column 'answer'; it has prompt (set the task option answer_column)",
        ),
        (['{"prompt": "a", "anwser": "b"}'], "{path}, line 1: no column 'answer'; did you mean anwser?"),
        (
            [GOOD, '{"prompt": "a", "answer": null}'],
            "{path}, line 2, column 'answer': must be text, got null",
        ),
        (
            [GOOD, '{"prompt": "a", "answer": 12}'],
            "{path}, line 2, column 'answer': must be text, got int 12",
        ),
        (
            ['{"prompt": "a", "answer": {"text": "b"}}'],
            "{path}, line 1, column 'answer': must be text, got dict",
        ),
        (['{"prompt": ["a"], "answer": "b"}'], "{path}, line 1, column 'prompt': must be text, got list"),
        (['{"prompt": " ", "answer": "b"}'], "{path}, line 1, column 'prompt': is empty"),
        (
            [GOOD, '{"prompt": "a\\ud800", "answer": "b"}'],
            "{path}, line 2, column 'prompt': '\\ud800' is half a character",
        ),
        ([GOOD, '{"id": ' + "1" * 5000 + "}"], "{path}, line 2: a number too long or brackets too deep to read"),
        ([GOOD, "[" * 100_000], "{path}, line 2: a number too long or brackets too deep to read"),
        ([GOOD, '["a", "b"]'], "{path}, line 2: is a list; every row is an object"),
        ([""], "{path}: holds no rows"),
        ([GOOD], "{path}: no held-out rows, with 1 in all and heldout_fraction 0.1; give more rows"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(TaskError) as caught:
        load_task(f"dataset:{path}")
    assert str(caught.value).startswith(message.format(path=path))


def test_files_that_cannot_be_read(tmp_path):
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(GOOD.encode() + b'\n{"prompt": "\xe9"}\n')
    with pytest.raises(TaskError, match="line 2: not UTF-8 text at byte 12"):
        load_task(f"dataset:{latin}")
    (tmp_path / "x.csv").write_text("prompt,answer\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"can read \.jsonl and \.parquet files"):
        load_task(f"dataset:{tmp_path / 'x.csv'}")
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(TaskError, match="not a Parquet file"):
        load_task(f"dataset:{tmp_path / 'x.parquet'}")
    with pytest.raises(TaskError, match="no such file"):
        load_task("dataset:missing.jsonl")
    with pytest.raises(TaskError, match=r"^~nosuch/x\.jsonl: no such file"):
        load_task("dataset:~nosuch/x.jsonl")


def test_a_null_in_parquet_names_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "holes.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([ROWS[0], {"prompt": "a", "answer": None}]), path)
    with pytest.raises(TaskError, match=r"holes\.parquet, row 2, column 'answer': must be text, got null"):
        load_task(f"dataset:{path}")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row) for row in ROWS).encode())
    assert load_task(f"dataset:{path}").heldout(3)


def test_a_hub_name_without_a_network_fails_soon(monkeypatch):
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    start = time.monotonic()
    with pytest.raises(TaskError, match=r"(?s)nobody/nothing: .*can't be reached; .*labkit fetch"):
        load_task("dataset:nobody/nothing")
    assert time.monotonic() - start < 30


def test_a_reward_of_ones_own(questions, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def near(response, answer):\n    return 1 / (1 + abs(int(response) - int(answer)))\n"
        "def wild(response, answer):\n    return 2\n"
    )
    task = load_task(f"dataset:{questions}", {"reward": f"{tmp_path}/mine.py:near"})
    problem = Problem("", "12")
    assert task.reward(problem, "12", True) == 1
    assert task.reward(problem, "13", True) == 0.5
    assert task.reward(problem, "12", False) == 0  # cut off
    with pytest.raises(TaskError, match=r"mine.py:wild gave a reward of 2.0; scale rewards to \[0, 1\]"):
        load_task(f"dataset:{questions}", {"reward": f"{tmp_path}/mine.py:wild"}).reward(problem, "12", True)
    with pytest.raises(ValueError, match=r"answer_pattern: mine.py:near reads completions itself; drop the pattern"):
        load_task(f"dataset:{questions}", {"reward": "mine.py:near", "answer_pattern": "x"})
