import pytest

from labkit.models import Tokenizer
from labkit.rl.episodes import Prompter
from labkit.tasks import Problem, load_task
from labkit.tasks.task import Chat

TEMPLATE = "{% for message in messages %}{{ message.content }}{% if mark %}?{% endif %}{% endfor %}="


def test_a_chat_goes_through_the_models_template_and_text_does_not():
    tokenizer = Tokenizer.char_level()
    prompter = Prompter(load_task("arithmetic"), tokenizer)
    said = Chat([{"role": "user", "content": "1+2"}], {"mark": True})
    problem = Problem("as it is in the records", "3", chat=said)
    with pytest.raises(ValueError, match="no chat template"):
        prompter.encode(problem)
    tokenizer.settings["chat_template"] = TEMPLATE
    assert tokenizer.decode(prompter.encode(problem)) == "1+2?="
    assert prompter.encode(Problem("1+2", "3")) == tokenizer.encode("1+2")


def test_a_row_whose_chat_the_model_cannot_take_is_named_before_anything_runs(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+{n}", "answer": "{2 * n}"}}\n' for n in range(40)))
    prompter = Prompter(load_task(f"dataset:{rows}", {"chat": True}), Tokenizer.char_level())
    with pytest.raises(ValueError, match=r"rows\.jsonl, line \d+: the model's tokenizer has no chat template"):
        prompter.check(100)
