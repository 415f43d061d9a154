"""Draw a token and report its log-probability under exactly the distribution it was drawn from.

Inversion: with u uniform in [0, 1), the token is the first v whose cumulative probability exceeds u. One random
number a row, whatever the vocabulary; the sum runs in FP64, so that the rarest of 50,000 tokens keeps its probability.
`restrict` has put probability 0 on every token outside top-k / top-p, and inversion never draws one.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.models.logprobs import restrict

if TYPE_CHECKING:
    from labkit.config import Sampling


def sample(logits_NV: Tensor, sampling: "Sampling", generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [N] and their log-probabilities g [N] (FP32, nats)."""
    logprobs_NV = restrict(logits_NV, sampling).log_softmax(-1)
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    uniform_N1 = torch.rand(len(logits_NV), 1, dtype=torch.float64, generator=generator)
    uniform_N1 = uniform_N1.to(logits_NV.device)  # drawn on the CPU: the same numbers wherever the engine computes
    if not bool(cumulative_NV[:, -1].isfinite().all()):
        raise RuntimeError("the engine's logits hold NaN or infinity: have the weights diverged, are the scales sane?")
    # Rounding leaves the last sum a little off 1: u is scaled to it, so that some token always exceeds it.
    tokens_N = torch.searchsorted(cumulative_NV, uniform_N1 * cumulative_NV[:, -1:], right=True)[:, 0]
    return tokens_N, logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]
