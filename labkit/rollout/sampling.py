"""Draw a token and report its log-probability under exactly the distribution it was drawn from.

Exponential race: with E_v ~ Exp(1) independent, argmax_v p_v / E_v is distributed as p. Done in log space:
argmax_v (log p_v - log E_v). `restrict` has put -inf on every token outside top-k / top-p.
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
    race_NV = torch.empty_like(logprobs_NV).exponential_(generator=generator).log_()
    tokens_N = (logprobs_NV - race_NV).argmax(-1)
    return tokens_N, logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]
