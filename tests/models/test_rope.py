"""Llama 3.1's frequencies: those of transformers, and the three regimes by hand."""

import math

import pytest
import torch

from labkit.models.rope import Llama3Scaling, rope_table

transformers = pytest.importorskip("transformers")

LLAMA_3_1 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_llama_3_1_8b_has_the_frequencies_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** (-torch.arange(0, 128, 2).float() / 128)
    ours = LLAMA_3_1(plain)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert ours[0] == plain[0]
    assert ours[-1] == plain[-1] / 8
    between = (ours < plain) & (ours > plain / 8)
    assert 0 < between.sum() < 64


def test_the_three_regimes():
    turns = torch.tensor([8.0, 2.5, 0.5])  # within 8192 tokens
    frequency = turns * 2 * math.pi / 8192
    torch.testing.assert_close(LLAMA_3_1(frequency) / frequency, torch.tensor([1.0, 0.5 + 0.5 / 8, 1 / 8]))


def test_scaling_reaches_the_table():
    positions = torch.tensor([[0, 1000]])
    plain, _ = rope_table(positions, 8, 1e6, None, torch.float32)
    scaled, _ = rope_table(positions, 8, 1e6, LLAMA_3_1, torch.float32)
    assert torch.equal(plain[:, :, 0], scaled[:, :, 0])
    torch.testing.assert_close(scaled[0, 0, 1, 3], torch.tensor(1000 * 1e6**-0.75 / 8).cos())
