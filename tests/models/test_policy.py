"""Loading by name, and what the shipped tiny policies can do before any reinforcement learning."""

import pytest
import torch

from labkit.config.locations import SHIPPED
from labkit.models import Policy, load
from labkit.models.huggingface import write_folder
from labkit.models.warmstart import TINY, TINY_MOE
from labkit.tasks.arithmetic import Arithmetic


@pytest.fixture(scope="module", params=SHIPPED)
def tiny(request) -> Policy:
    return load(request.param, torch.bfloat16)


def right(problem, completion):
    return completion.rpartition("#")[2] == problem.answer and "#" in completion


def test_tiny_is_small_and_complete(tiny):
    assert tiny.config == {"tiny": TINY, "tiny-moe": TINY_MOE}[tiny.name]
    assert tiny.weights["lm_head.weight"].dtype == torch.bfloat16
    most = {"tiny": 1.7e6, "tiny-moe": 3.2e6}[tiny.name]
    assert sum(file.stat().st_size for file in SHIPPED[tiny.name].iterdir()) < most


def test_tiny_sampled_leaves_rl_something_to_do(tiny, complete):
    problems = Arithmetic().heldout(256)
    texts = complete(tiny.decoder(), tiny.tokenizer, [p.prompt for p in problems], 54, seed=0)
    accuracy = sum(map(right, problems, texts)) / len(problems)
    scratchpads = sum(";" in text for text in texts) / len(problems)
    assert 0.25 < accuracy < 0.40
    assert 0.35 < scratchpads < 0.65


def test_tiny_can_do_every_step_when_greedy(tiny, complete):
    """Started on a scratchpad, the most likely continuation is right: only the slips are left to unlearn."""
    problems = Arithmetic().heldout(256)
    texts = complete(tiny.decoder(), tiny.tokenizer, [p.prompt + p.prompt[0] for p in problems], 53, seed=None)
    assert sum(map(right, problems, texts)) / len(problems) >= 0.95


def test_load_dtype_and_name(tiny, tmp_path):
    assert load(tiny.name).weights["model.norm.weight"].dtype == torch.float32
    write_folder(tiny, tmp_path / "mine")
    again = load(tmp_path / "mine")
    assert again.name == "mine"
    assert torch.equal(again.weights["lm_head.weight"], tiny.weights["lm_head.weight"].float())


def test_unknown_model_names_the_choices():
    with pytest.raises(ValueError, match=r"no model 'tinny'.*smollm2.*Hugging Face folder"):
        load("tinny")
    with pytest.raises(ValueError, match="no model '~nosuch/model'"):
        load("~nosuch/model")
