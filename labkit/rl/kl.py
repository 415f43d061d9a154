"""Estimators of KL(P || Q) from one sampled token, and the KL penalty of the GRPO loss.

With x ~ P and d = log Q(x) - log P(x) (Schulman, "Approximating KL divergence", 2020):

    k1 = -d                unbiased, negative half of the time, high variance
    k2 = d^2 / 2           biased, low variance
    k3 = exp(d) - 1 - d    unbiased, never negative; about d^2 / 2 for small d

k3 is written expm1(d) - d, because exp(d) - 1 loses all digits in FP32 where |d| is small, which is the
healthy case.

The penalty pulls the current policy c to a frozen reference r (NeMo RL, ClippedPGLossFn):

    d   = clamp(r - c, -20, 20)
    KL  = clamp(exp(c - sg(c)) * k(d), -10, 10)            sg = stop gradient

The factor exp(c - sg(c)) equals 1 and carries the gradient of the sampling distribution. With it the expected
gradient is that of the KL itself (k3: dKL/dc = c - r per token); without it k1 would have no gradient at all
on average. The penalty is never multiplied by an importance-sampling weight. Shapes [B, T], nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.rl.ratio import MAX_LOG_RATIO

MAX_PENALTY_LOG_RATIO = 20.0
MAX_PENALTY = 10.0


def k1(d: Tensor) -> Tensor:
    return -d


def k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    return torch.expm1(d.clamp(max=MAX_LOG_RATIO)) - d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(current: Tensor, reference: Tensor, count: Tensor, kl_type: str) -> Tensor:
    """Per-token penalty, 0 where the token doesn't count (``count`` is False)."""
    current = torch.where(count, current, 0.0)
    reference = torch.where(count, reference, 0.0)
    d = (reference - current).clamp(-MAX_PENALTY_LOG_RATIO, MAX_PENALTY_LOG_RATIO)
    on_policy = torch.exp(current - current.detach())
    return (on_policy * ESTIMATORS[kl_type](d)).clamp(-MAX_PENALTY, MAX_PENALTY)
