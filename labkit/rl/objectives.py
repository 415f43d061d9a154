"""Objectives: what the update maximises, per token, from the ratio of the current policy to an older one.

    rho = exp(c - old)     c current log-prob (differentiable); old: p, g or sg(c), see labkit.config.Correction

    ppo         max(-A rho, -A clip(rho, 1 - low, 1 + high))            Schulman et al. 2017
                and with dual clip k > 1, where A < 0: min(that, -A k)  Ye et al. 2020: bounds the loss of a bad
                                                                        answer that became likely
    ratio       -A rho                                                  no clip: filters do its work (prime-rl)
    reinforce   -A c                                                    the ratio is the correction's weight alone
    cispo       -A sg(clip(rho, 1 - low, 1 + high)) c                   MiniMax-M1: clipped tokens keep a gradient
    gspo        ppo of s = exp(mean_t (c - old)) for every token of a   Zheng et al. 2025: clips whole responses, at
                response                                                3e-4 / 4e-4 rather than 0.2

Each returns the loss to minimise and where a clip is in force, [B, T]. Dual clip is ppo's and gspo's alone.

Calibrated clipping (arXiv 2609.22870, known here from descriptions only): FP8 noise in rho pushes tokens past a
bound that the same policy in BF16 would not have reached. With q the share of BF16 ratios below 1 - low, the lower
bound becomes the q-quantile of the noisy ratios (half way between the last that is clipped and the next); the upper
likewise. So noise doesn't change how often the clip acts. Bounds stay on their own side of 1; one that BF16 never
reaches moves out to the furthest noisy ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.rl.ratio import ratio


@dataclass(frozen=True)
class Clip:
    low: float  # the ratio may fall to 1 - low
    high: float  # and rise to 1 + high
    dual: float | None = None

    def __call__(self, rho: Tensor) -> Tensor:
        return rho.clamp(1 - self.low, 1 + self.high)

    def of(self, rho: float) -> float:
        return min(max(rho, 1 - self.low), 1 + self.high)


@dataclass(frozen=True)
class Tokens:
    """[B, T]; log-probs and the log-ratio are 0 where a token doesn't count."""

    current: Tensor  # c, differentiable
    log_rho: Tensor  # c - old, differentiable
    advantages: Tensor  # [B, 1]
    count: Tensor  # bool


Loss = tuple[Tensor, Tensor]


def ppo(tokens: Tokens, clip: Clip) -> Loss:
    return _clipped(ratio(tokens.log_rho), tokens.advantages, clip)


def unclipped_ratio(tokens: Tokens, clip: Clip) -> Loss:
    return -tokens.advantages * ratio(tokens.log_rho), torch.zeros_like(tokens.count)


def reinforce(tokens: Tokens, clip: Clip) -> Loss:
    return -tokens.advantages * tokens.current, torch.zeros_like(tokens.count)


def cispo(tokens: Tokens, clip: Clip) -> Loss:
    rho = ratio(tokens.log_rho.detach())
    return -tokens.advantages * clip(rho) * tokens.current, clip(rho) != rho


def gspo(tokens: Tokens, clip: Clip) -> Loss:
    length = tokens.count.sum(-1, keepdim=True).clamp(min=1)
    of_response = ratio(tokens.log_rho.sum(-1, keepdim=True) / length)
    return _clipped(of_response.expand_as(tokens.log_rho), tokens.advantages, clip)


def _clipped(rho: Tensor, advantages: Tensor, clip: Clip) -> Loss:
    free = -advantages * rho
    loss = torch.maximum(free, -advantages * clip(rho))
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    return loss, (loss != free).detach()


OBJECTIVES: dict[str, Callable[[Tokens, Clip], Loss]] = {
    "ppo": ppo,
    "ratio": unclipped_ratio,
    "reinforce": reinforce,
    "cispo": cispo,
    "gspo": gspo,
}


@torch.no_grad()
def calibrated(clip: Clip, log_rho_N: Tensor, log_rho_bf16_N: Tensor) -> Clip:
    """The bounds at which the noisy ratios are clipped as often as the BF16 ones are by `clip`; N tokens each.

    Tokens with a ratio that isn't finite are left out.
    """
    finite = torch.isfinite(log_rho_N) & torch.isfinite(log_rho_bf16_N)
    if not finite.any():
        return clip
    noisy, shadow = (ratio(x[finite].double()) for x in (log_rho_N, log_rho_bf16_N))
    low = _bound(noisy.sort().values, int((shadow < 1 - clip.low).sum()), 1 - clip.low)
    high = -_bound((-noisy).sort().values, int((shadow > 1 + clip.high).sum()), -1 - clip.high)
    return Clip(1 - min(low, 1.0), max(high, 1.0) - 1, clip.dual)


def _bound(ascending: Tensor, num_clipped: int, usual: float) -> float:
    """A lower bound that has `num_clipped` values below it."""
    if num_clipped == 0:
        return min(float(ascending[0]), usual)
    if num_clipped == len(ascending):
        return max(float(ascending[-1]), usual)
    return float(ascending[num_clipped - 1 : num_clipped + 1].mean())
