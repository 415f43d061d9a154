"""The GRPO loss: PPO's clipped objective, times a correction, plus a KL penalty.

Per sampled token, with c the current log-prob (differentiable), p the trainer's log-prob before the update, A
the advantage of the answer, w the weight of the correction (data, no gradient):

    rho = exp(c - p)
    L   = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
    L   = min(L, -A k) where A < 0       dual clip, k > 1: bounds the loss of a bad answer that became likely
    loss = aggregate(w L) + kl_coef * aggregate(KL(c, r))          KL: labkit.rl.kl, never times w

    aggregate, loss_level "token":     sum over tokens / num_tokens           long answers weigh more
               loss_level "sequence":  sum over sequences (mean over its tokens) / num_sequences

num_tokens and num_sequences are those of the WHOLE batch of the optimizer step, so that the losses and
gradients of micro-batches add up to those of the batch, whatever its split. Rejected tokens (w = 0) stay in
the denominators.

Shapes [B, T] FP32, advantages [B]. Tokens with a non-finite log-prob are left out and reported as
``nonfinite``: c or p being NaN means a broken trainer, which must be seen. rho saturates (labkit.rl.ratio)
and tokens without weight are cut by torch.where, so that no gradient is inf * 0. Raises ValueError when
kl_coef > 0 and no reference is given.

On the first update after a rollout c = p, rho = 1 and, since advantages average to 0, the loss is about 0:
that is right, its gradient is not 0. Source: Schulman et al. 2017 (PPO), Ye et al. 2020 (dual clip), Shao et
al. 2024 (GRPO), Yu et al. 2025 (DAPO: clip_high > clip_low, token level), NeMo RL's ClippedPGLossFn. Left
out: CISPO, GSPO, NLL term.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.rl.kl import kl_penalty
from labkit.rl.ratio import counted, log_ratio, ratio

if TYPE_CHECKING:
    from labkit.config import GRPO


@dataclass(frozen=True)
class LossTerms:
    """What one micro-batch adds to its batch: 0-d tensors that add up, but for the two extremes."""

    loss: Tensor  # differentiable; all others are detached
    policy_loss: Tensor
    kl: Tensor  # before kl_coef; 0 without a reference
    tokens: Tensor  # tokens that count
    clipped: Tensor  # those where a clip is in force
    ratio_sum: Tensor  # sum of their rho
    ratio_min: Tensor  # inf without tokens
    ratio_max: Tensor  # -inf without tokens
    nonfinite: Tensor  # tokens left out

    @staticmethod
    def summary(terms: "Sequence[LossTerms]", num_updates: int = 1) -> dict[str, float]:
        """Metrics (labkit.rl.metrics.METRICS) of a step from its micro-batches; losses: means over updates.

        Shares and ratios are over the tokens that went through the update; NaN if none did.
        """

        def total(name: str) -> float:
            return sum(float(getattr(term, name).detach()) for term in terms)

        tokens = total("tokens")
        return {
            "loss": total("loss") / num_updates,
            "policy_loss": total("policy_loss") / num_updates,
            "kl": total("kl") / num_updates,
            "clip_share": total("clipped") / tokens if tokens else math.nan,
            "probs_ratio": total("ratio_sum") / tokens if tokens else math.nan,
            "probs_ratio_min": min(float(term.ratio_min) for term in terms) if tokens else math.nan,
            "probs_ratio_max": max(float(term.ratio_max) for term in terms) if tokens else math.nan,
            "loss_nan_count": total("nonfinite"),
        }


def grpo_loss(
    current: Tensor,
    p: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    reference: Tensor | None = None,
    *,
    settings: "GRPO",
    num_tokens: int,
    num_sequences: int,
) -> LossTerms:
    if reference is None and settings.kl_coef > 0:
        raise ValueError("kl_coef > 0 needs the reference log-probs: pass reference, or set kl_coef to 0")
    assert weights.shape == mask.shape
    assert advantages.shape == mask.shape[:1]
    count = counted(mask, current, p)
    total = _Total(settings.loss_level, max(num_tokens, 1), max(num_sequences, 1))
    rho = ratio(log_ratio(current, p.detach(), count))
    surrogate, clipped = _surrogate(rho, advantages.detach()[:, None], settings)
    policy_loss = total(weights.detach() * surrogate, count)
    if reference is None:
        kl = torch.zeros_like(policy_loss)
    else:
        count_kl = count & counted(mask, reference)
        kl = total(kl_penalty(current, reference.detach(), count_kl, settings.kl_type), count_kl)
    seen = rho.detach()
    return LossTerms(
        loss=policy_loss + settings.kl_coef * kl,
        policy_loss=policy_loss.detach(),
        kl=kl.detach(),
        tokens=count.sum(),
        clipped=(clipped & count).sum(),
        ratio_sum=torch.where(count, seen, 0.0).sum(),
        ratio_min=torch.where(count, seen, torch.inf).amin(),
        ratio_max=torch.where(count, seen, -torch.inf).amax(),
        nonfinite=(mask.bool() & ~count).sum(),
    )


def _surrogate(rho: Tensor, advantages: Tensor, settings: "GRPO") -> tuple[Tensor, Tensor]:
    """The clipped objective to minimise, and where a clip is in force."""
    free = -advantages * rho
    bounded = -advantages * rho.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.maximum(free, bounded)
    if settings.dual_clip is not None:
        ceiling = torch.minimum(surrogate, -advantages * settings.dual_clip)
        surrogate = torch.where(advantages < 0, ceiling, surrogate)
    return surrogate, (surrogate != free).detach()


@dataclass(frozen=True)
class _Total:
    """A micro-batch's share of the batch's mean, of the values where ``count`` is True."""

    loss_level: str
    num_tokens: int
    num_sequences: int

    def __call__(self, values: Tensor, count: Tensor) -> Tensor:
        values = torch.where(count, values, 0.0)
        if self.loss_level == "token":
            return values.sum() / self.num_tokens
        return (values.sum(-1) / count.sum(-1).clamp(min=1)).sum() / self.num_sequences
