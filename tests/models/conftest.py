"""A small sampler for these tests: the decoder, a growing KV cache and multinomial, nothing else."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers only ever reads folders the tests wrote

import pytest
import torch

from labkit.fp8 import math_attention
from labkit.models.attention import causal_bias
from labkit.models.decoder import Decoder
from labkit.models.tokenizer import Tokenizer


class GrowingCache:
    def __init__(self, starts_B):
        self.starts_B, self.kv = starts_B, {}

    def __call__(self, layer, q, k, v):
        if layer in self.kv:
            k, v = torch.cat([self.kv[layer][0], k], 2), torch.cat([self.kv[layer][1], v], 2)
        self.kv[layer] = k, v
        bias = causal_bias(self.starts_B, q.shape[2], k.shape[2])
        return math_attention(q, k, v, bias, sm_scale=q.shape[-1] ** -0.5)


@torch.no_grad()
def _complete(decoder: Decoder, tokenizer: Tokenizer, prompts: list[str], new_tokens: int, seed: int | None):
    """One completion per prompt as text, without EOS; greedy if seed is None, else at temperature 1."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    width = max(map(len, ids))
    starts = torch.tensor([width - len(row) for row in ids])
    tokens = torch.tensor([[tokenizer.pad_id] * (width - len(row)) + row for row in ids])
    positions = (torch.arange(width) - starts[:, None]).clamp(min=0)
    cache, columns = GrowingCache(starts), []
    for step in range(new_tokens):
        logits = decoder.logits(decoder(tokens, positions, cache)[:, -1])
        if generator is None:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        columns.append(chosen)
        tokens, positions = chosen[:, None], (width + step - starts)[:, None]
    rows = torch.stack(columns, 1).tolist()
    cut = [row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row for row in rows]
    return [tokenizer.decode(row) for row in cut]


@pytest.fixture(scope="session")
def complete():
    return _complete
