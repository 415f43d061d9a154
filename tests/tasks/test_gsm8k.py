"""gsm8k from a hub on this machine, by the real `datasets`: fetched once, then read from the cache alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_hub import hub

datasets = pytest.importorskip("datasets")
pytest.importorskip("math_verify")

ROWS = [
    {"question": f"What is {a} plus {b}?", "answer": f"They are <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"}
    for a in range(10)
    for b in range(10)
]
CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the data set in its cache, and no network."""
    folder = tmp_path_factory.mktemp("repository")
    for split, rows in {"main/train": ROWS[:80], "main/test": ROWS[80:], "socratic/train": ROWS[:3]}.items():
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    (folder / "README.md").write_text(CARD)
    environment = {**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("home"))}
    with hub({"openai/gsm8k": folder}) as endpoint:
        online = environment | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        before = python(LOAD, environment | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"})
        assert "openai/gsm8k: no such file, and the Hugging Face hub can't be reached" in before.stderr
        assert "labkit fetch" in before.stderr
        said = subprocess.run([sys.executable, "-m", "labkit.cli", "fetch", "gsm8k"], env=online, capture_output=True)
        assert said.stdout.decode() == "openai/gsm8k, split train: 80 rows\nopenai/gsm8k, split test: 20 rows\n", said
    return environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}


LOAD = """
import json, sys
from labkit.tasks import load_task
task = load_task(*json.loads(sys.argv[1] if len(sys.argv) > 1 else '["gsm8k", {}]'))
problems = [problem for _, problem in task.problems()]
print(json.dumps([task.name, len(problems), sorted(p.prompt for p in task.heldout(99)), problems[0].answer,
    problems[0].chat and problems[0].chat.messages,
    [task.reward(problems[0], text, True) for text in json.loads(sys.argv[2])] if len(sys.argv) > 2 else []]))
"""


def python(code: str, environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    given = [json.dumps(argument) for argument in arguments]
    return subprocess.run([sys.executable, "-c", code, *given], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_DATASETS_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0"}])
def test_the_cached_copy_is_all_it_takes(fetched: dict[str, str], offline: dict[str, str]) -> None:
    answers = ["It is \\boxed{0}.", "#### 0", "0 plus 0 is 1", "\\boxed{0} \\boxed{1}", "no idea", "\\boxed{0.0}"]
    said = python(LOAD, fetched | offline, ["gsm8k", {}], answers)
    assert said.returncode == 0, said.stderr
    name, number, heldout, answer, messages, rewards = json.loads(said.stdout)
    assert (name, number, len(heldout)) == ("gsm8k", 100, 20)
    assert heldout[0].startswith("What is 8 plus 0?\nPlease reason step by step")
    assert answer.endswith("#### 0"), "the reward looks for the mark itself"
    (message,) = messages
    assert message["content"] == (
        "What is 0 plus 0?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert rewards[:3] == [1, 1, 0]
    assert rewards[4:] == [0, 1]


def test_its_options_can_be_changed(fetched: dict[str, str]) -> None:
    said = python(LOAD, fetched, ["gsm8k", {"chat": False, "template": "Q: {prompt}\nA:", "reward": "match"}], ["0"])
    _, _, heldout, _, messages, rewards = json.loads(said.stdout)
    assert (heldout[0], messages, rewards) == ("Q: What is 8 plus 0?\nA:", None, [1])


def test_the_general_path_reads_the_same_copy(fetched: dict[str, str]) -> None:
    options = {"prompt_column": "question", "subset": "main"}
    said = python(LOAD, fetched | {"HF_HUB_OFFLINE": "1"}, ["dataset:openai/gsm8k", options])
    assert json.loads(said.stdout)[:2] == ["dataset:openai/gsm8k", 80]


def test_what_the_copy_lacks_is_named(fetched: dict[str, str]) -> None:
    for options, words in (
        ({"heldout_split": "dev"}, """(in the cache: Unknown split "dev". Should be one of ['train', 'test'].)"""),
        ({"subset": "socratic"}, "for config 'socratic' Available configs in the cache: ['main'])"),
    ):
        said = python(LOAD, fetched | {"HF_HUB_OFFLINE": "1"}, ["gsm8k", options])
        assert "openai/gsm8k: no such file, and HF_HUB_OFFLINE is set; " in said.stderr
        assert words in said.stderr


def test_a_data_set_that_the_hub_lacks(tmp_path: Path) -> None:
    with hub({}) as endpoint:
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "labkit.cli", "fetch", "dataset:no/such", "main"]
        said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 2
    assert said.stderr.startswith("labkit: no/such: not found, neither as a file nor on the Hugging Face hub")
