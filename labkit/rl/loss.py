"""The GRPO loss: an objective, times a correction, plus pulls towards other policies.

Per sampled token, with c the current log-prob (differentiable), A the advantage of the answer, w the applied weight of
the correction (data, no gradient):

    loss = aggregate(w L(c, A)) + kl_coef aggregate(KL(c, r)) + anchor aggregate((c - g)^2)

    L       the correction's objective (labkit.rl.objectives); PPO's clipped ratio unless it says otherwise
    KL      to the reference policy r (labkit.rl.kl), never times w
    anchor  a pull towards the engine's log-probs g (prime-rl); both pulls act on rejected tokens too

    aggregate, loss_level "token":     sum over tokens / num_tokens           long answers weigh more
               loss_level "sequence":  sum over sequences (mean over its tokens) / num_sequences

num_tokens and num_sequences are those of the WHOLE batch of the optimizer step, so that the losses and
gradients of micro-batches add up to those of the batch, whatever its split. Rejected tokens (w = 0) stay in
them (denominator "keep": rejecting lowers the effective step size) or leave the whole loss ("drop").

Shapes [B, T] FP32, advantages [B]. Tokens with a non-finite log-prob are left out and reported as
``nonfinite``: c or p being NaN means a broken trainer, which must be seen. Ratios saturate (labkit.rl.ratio)
and tokens without weight are cut by torch.where, so that no gradient is inf * 0. Raises ValueError when
kl_coef > 0 and no reference is given.

On the first update after a rollout c = p, rho = 1 and, since advantages average to 0, the loss is about 0:
that is right, its gradient is not 0. Source: Schulman et al. 2017 (PPO), Shao et
al. 2024 (GRPO), Yu et al. 2025 (DAPO: clip_high > clip_low, token level), NeMo RL's ClippedPGLossFn. Left
out: NLL term.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.rl.corrections import Weights
from labkit.rl.kl import kl_penalty
from labkit.rl.objectives import OBJECTIVES, Clip, Tokens
from labkit.rl.ratio import counted, log_ratio, ratio

if TYPE_CHECKING:
    from labkit.config import GRPO, Correction


@dataclass(frozen=True)
class LossTerms:
    """What one micro-batch adds to its batch: 0-d tensors that add up, but for the two extremes."""

    loss: Tensor  # differentiable; all others are detached
    policy_loss: Tensor
    kl: Tensor  # before kl_coef; 0 without a reference
    tokens: Tensor  # tokens that count
    kept: Tensor  # those that the correction keeps
    clipped_good: Tensor  # kept ones of good answers (A > 0) where a clip is in force
    clipped_bad: Tensor  # and of bad ones (A < 0)
    ratio_sum: Tensor  # sum of the rho of tokens that count
    ratio_min: Tensor  # inf without tokens
    ratio_max: Tensor  # -inf without tokens
    clamped_sum: Tensor  # sum of rho inside the clip
    nonfinite: Tensor  # tokens left out
    clip: Clip

    @property
    def clipped(self) -> Tensor:
        return self.clipped_good + self.clipped_bad

    @staticmethod
    def summary(terms: "Sequence[LossTerms]", num_updates: int = 1) -> dict[str, float]:
        """Metrics (labkit.rl.metrics.METRICS) of a step from its micro-batches; losses: means over updates.

        Ratios are over the tokens that went through the update, shares over those of them that are kept; NaN if
        there are none.
        """

        def total(name: str) -> float:
            return sum(float(getattr(term, name).detach()) for term in terms)

        def share(name: str) -> float:
            return total(name) / total("kept") if total("kept") else math.nan

        tokens = total("tokens")
        low, high = (
            (min(float(term.ratio_min) for term in terms), max(float(term.ratio_max) for term in terms))
            if tokens
            else (math.nan, math.nan)
        )
        return {
            "loss": total("loss") / num_updates,
            "policy_loss": total("policy_loss") / num_updates,
            "kl": total("kl") / num_updates,
            "kept_in_update": total("kept") / tokens if tokens else math.nan,
            "clip_share": share("clipped"),
            "clip_share_positive": share("clipped_good"),
            "clip_share_negative": share("clipped_bad"),
            "probs_ratio": total("ratio_sum") / tokens if tokens else math.nan,
            "probs_ratio_min": low,
            "probs_ratio_max": high,
            "probs_ratio_clamped": total("clamped_sum") / tokens if tokens else math.nan,
            "probs_ratio_clamped_min": terms[0].clip.of(low) if tokens else math.nan,
            "probs_ratio_clamped_max": terms[0].clip.of(high) if tokens else math.nan,
            "loss_nan_count": total("nonfinite"),
        }


def clip_of(settings: "GRPO", correction: "Correction") -> Clip:
    """The clip in force: the correction's, where it has one, else that of the GRPO settings."""
    low, high = correction.clip_low, correction.clip_high
    return Clip(
        settings.clip_low if low is None else low, settings.clip_high if high is None else high, settings.dual_clip
    )


def grpo_loss(
    current: Tensor,
    g: Tensor,
    p: Tensor,
    advantages: Tensor,
    weights: Weights,
    mask: Tensor,
    reference: Tensor | None = None,
    *,
    settings: "GRPO",
    correction: "Correction",
    num_tokens: int,
    num_sequences: int,
    clip: Clip | None = None,
) -> LossTerms:
    """`clip`: bounds other than those of the settings, when they are calibrated."""
    if reference is None and settings.kl_coef > 0:
        raise ValueError("kl_coef > 0 needs the reference log-probs: pass reference, or set kl_coef to 0")
    assert weights.applied.shape == mask.shape
    assert advantages.shape == mask.shape[:1]
    count = counted(mask, current, p, g)
    weighted = count & weights.keep
    total = _Total(settings.loss_level, max(num_tokens, 1), max(num_sequences, 1), weights.counting)
    old = {"trainer": p, "rollout": g, "current": current}[correction.old_policy].detach()
    log_rho = log_ratio(current, old, count)
    advantages = advantages.detach()[:, None]
    tokens = Tokens(torch.where(count, current, 0.0), log_rho, advantages, count)
    clip = clip or clip_of(settings, correction)
    surrogate, clipped = OBJECTIVES[correction.objective](tokens, clip)
    policy_loss = total(torch.where(weighted, weights.applied * surrogate, 0.0), count)
    loss = policy_loss
    if reference is None:
        kl = torch.zeros_like(policy_loss)
    else:
        count_kl = count & weights.counting & counted(mask, reference)
        kl = total(kl_penalty(current, reference.detach(), count_kl, settings.kl_type), count_kl)
        loss = loss + settings.kl_coef * kl
    if correction.anchor:
        loss = loss + correction.anchor * total(
            log_ratio(current, g.detach(), count).square(), count & weights.counting
        )
    seen = ratio(log_rho.detach())
    return LossTerms(
        loss=loss,
        policy_loss=policy_loss.detach(),
        kl=kl.detach(),
        tokens=count.sum(),
        kept=weighted.sum(),
        clipped_good=(clipped & weighted & (advantages > 0)).sum(),
        clipped_bad=(clipped & weighted & (advantages < 0)).sum(),
        ratio_sum=torch.where(count, seen, 0.0).sum(),
        ratio_min=torch.where(count, seen, torch.inf).amin(),
        ratio_max=torch.where(count, seen, -torch.inf).amax(),
        clamped_sum=torch.where(count, clip(seen), 0.0).sum(),
        nonfinite=(mask.bool() & ~count).sum(),
        clip=clip,
    )


@dataclass(frozen=True)
class _Total:
    """A micro-batch's share of the batch's mean, of the values where ``count`` is True."""

    loss_level: str
    num_tokens: int
    num_sequences: int
    counting: Tensor  # tokens in the denominator

    def __call__(self, values: Tensor, count: Tensor) -> Tensor:
        values = torch.where(count, values, 0.0)
        if self.loss_level == "token":
            return values.sum() / self.num_tokens
        return (values.sum(-1) / (count & self.counting).sum(-1).clamp(min=1)).sum() / self.num_sequences
