import random

import pytest
import torch

from labkit.models.huggingface import read_folder
from labkit.models.tokenizer import CHARACTERS, Tokenizer
from labkit.models.warmstart import TINY, TINY_MOE, _examples, initial_weights, learning_rate, warmstart
from labkit.tasks import arithmetic
from labkit.tasks.arithmetic import Arithmetic


def test_a_seed_gives_the_same_bits_on_any_number_of_threads(tmp_path):
    losses = []
    first = warmstart(tmp_path / "a", seed=3, steps=8, progress=lambda step, loss: losses.append(loss))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(1)  # the global generator must play no part
    try:
        warmstart(tmp_path / "b", seed=3, steps=8)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    a, b = ((tmp_path / run / "model.safetensors").read_bytes() for run in "ab")
    assert a == b
    assert len(losses) == 8
    assert losses[-1] < losses[0]

    policy = read_folder(tmp_path / "a", torch.bfloat16)
    assert policy.config == TINY
    assert all(torch.equal(w, policy.weights[name]) for name, w in first.weights.items())


def test_initial_weights_depend_on_the_seed_alone():
    a, b, c = initial_weights(TINY, 0), initial_weights(TINY, 0), initial_weights(TINY, 1)
    assert sum(w.numel() for w in a.values()) == 796_032
    assert all(torch.equal(a[name], b[name]) for name in a)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(a[q], c[q])
    assert a[q].std().item() == pytest.approx(128**-0.5, rel=0.03)
    down = "model.layers.2.mlp.down_proj.weight"
    assert a[down].std().item() == pytest.approx((384 * 8) ** -0.5, rel=0.03)


def test_the_experts_are_warmed_up_too_and_load_as_a_mixture(tmp_path):
    made = warmstart(tmp_path / "moe", seed=3, steps=2, config=TINY_MOE)
    assert sum(w.numel() for w in made.weights.values()) == 1_487_232
    policy = read_folder(tmp_path / "moe", torch.bfloat16)
    assert (policy.config, policy.family) == (TINY_MOE, "qwen3_moe")
    start = initial_weights(TINY_MOE, 3)
    moved = [name for name, w in policy.weights.items() if not torch.equal(w, start[name].bfloat16())]
    assert len([name for name in moved if ".experts." in name]) == 3 * 8 * 3, "no expert is left out"
    assert "model.layers.1.mlp.gate.weight" in moved


def test_learning_rate_schedule():
    rates = [learning_rate(step, 400) for step in range(1, 401)]
    assert rates[0] == pytest.approx(2e-3 / 30)
    assert rates[29] == rates[279] == 2e-3
    assert rates[340] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(2e-4)


def test_examples_are_half_direct_half_scratchpad_with_slips():
    tokenizer, rng = Tokenizer.char_level(), random.Random(0)
    right = steps = wrong_steps = 0
    for _ in range(8):
        direct, scratchpad = _examples(Arithmetic(), tokenizer, rng)
        assert len(direct) == len(scratchpad) == 32
        for prompt, response in direct + scratchpad:
            assert prompt[0] == tokenizer.bos_id
            assert response[-1] == tokenizer.eos_id
            assert tokenizer.bos_id not in response
        assert all(tokenizer.decode(response)[0] == "#" for _, response in direct)
        for _, response in scratchpad:
            *lines, answer = tokenizer.decode(response).split(";")
            assert answer == "#" + lines[-1][-1]
            slips = [eval(line.split("=")[0]) % 10 != int(line[-1]) for line in lines]
            steps, wrong_steps = steps + len(slips), wrong_steps + sum(slips)
            right += not any(slips)
    # a slip draws any digit, so a tenth of them is right by luck
    assert wrong_steps / steps == pytest.approx(0.2 * 0.9, abs=0.04)
    assert 0.2 < right / 256 < 0.55


def test_the_tokenizer_and_the_task_share_one_alphabet():
    assert arithmetic.CHARACTERS == CHARACTERS
