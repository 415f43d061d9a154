"""The distribution a token is sampled from, and the log-probability of a token under it.

    logits z_V  --/T-->  --top-k-->  --top-p-->  log_softmax over what is left

The engine samples from this distribution and reports g, its log-probability, from the very same numbers. The
trainer computes p and c through the same function, so an importance ratio exp(p - g) compares like with like.
Leaving the temperature or the top-p renormalisation out on one side biases every ratio (mean r far from 1).

top-k keeps the k largest logits; top-p then keeps the smallest set of most probable tokens whose probability sums
to at least p. The trainer's set comes from the trainer's own logits; a token that was sampled but lies just
outside that set (its rank may differ by a rounding) is put back, so that p is finite. The kept set is a constant
for the gradient. Units: nats. All in FP32.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from labkit.config import Sampling


def restrict(logits_NV: Tensor, sampling: "Sampling", always_keep_N: Tensor | None = None) -> Tensor:
    """Temperature, top-k and top-p: logits with -inf where the sampler can't go."""
    logits_NV = logits_NV / sampling.temperature if sampling.temperature != 1.0 else logits_NV
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return logits_NV
    with torch.no_grad():
        keep_NV = _kept(logits_NV, sampling)
        if always_keep_N is not None:
            keep_NV.scatter_(-1, always_keep_N[:, None], True)
    return logits_NV.masked_fill(~keep_NV, -torch.inf)


def _kept(logits_NV: Tensor, sampling: "Sampling") -> Tensor:
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    keep_NV = torch.ones_like(sorted_NV, dtype=torch.bool)
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        keep_NV[:, sampling.top_k :] = False
    if sampling.top_p < 1.0:
        prob_NV = sorted_NV.masked_fill(~keep_NV, -torch.inf).softmax(-1)
        keep_NV &= prob_NV.cumsum(-1) - prob_NV < sampling.top_p
    return torch.zeros_like(keep_NV).scatter(-1, order_NV, keep_NV)


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, sampling: "Sampling") -> tuple[Tensor, Tensor]:
    """Log-probability of each token and the entropy of its distribution (no gradient), both [N] in nats."""
    logprobs_NV = restrict(logits_NV, sampling, always_keep_N=tokens_N).log_softmax(-1)
    chosen_N = logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]
    with torch.no_grad():
        prob_NV = logprobs_NV.exp()
        entropy_N = -torch.where(prob_NV > 0, prob_NV * logprobs_NV, 0.0).sum(-1)
    return chosen_N, entropy_N
