"""Importance-sampling corrections: what a token sampled by the engine is worth to the trainer.

The engine samples from its own numbers (log-prob g), the trainer differentiates its own (log-prob p). The
ratio r = exp(p - g) makes a policy gradient unbiased, and its variance ruins it, so every method truncates or
rejects:

    delta_t = p_t - g_t    r_t = exp(delta_t)    W = exp(sum_t delta_t)    G = exp(mean_t delta_t)

    name            weight of a token                       bounds                   source
    none            1                                       -
    tis             min(r_t, cap)                           cap 2.0                  Yao, Liu et al. 2025
    icepop          r_t if low <= r_t <= high else 0        low 0.5, high 5.0        Ant Ring 2025
    sequence-tis    min(W, cap)                             cap 2.0                  verl
    sequence-mask   W if low <= W <= high else 0            low 0.5, high 2.0        verl, TRL
    geometric-mask  r_t if low <= G <= high else 0          low 0.999, high 1.002    NeMo RL (seq-mask-tis)

Bounds are inclusive. W is a product over the response: many tiny mismatches add up with its length (delta =
0.012 goes past 3 at 92 tokens), whereas G doesn't depend on the length. A sequence's W and G are taken over
the tokens that count. A rejected token keeps its place in the loss's denominator (verl, NeMo RL): rejecting
lowers the effective step size.

Shapes [B, T] (or [T], one sequence). The ratios are computed in FP64 and saturate (see labkit.rl.ratio);
results are FP32 without gradient. Non-finite log-probs never raise. A wrong name or bound raises ValueError.

To add a correction: write a function (delta, count, **bounds) -> Weights like those below, give it a line in
CORRECTIONS, and its name and default bounds one in labkit.config.recipe, where bounds are checked.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.config.recipe import BOUNDS, Correction
from labkit.rl.ratio import counted, log_ratio, ratio


@dataclass(frozen=True)
class Weights:
    """What a correction did to each token. All [B, T], detached."""

    raw: Tensor  # float32: the ratio that the rule looks at (r, W or G), before the bounds; 0 if not valid
    applied: Tensor  # float32: what the loss is multiplied by; 0 where rejected
    keep: Tensor  # bool: False where rejected or not valid
    outside: Tensor  # bool: valid and outside the bounds (capped if kept, otherwise rejected)
    per_sequence: bool = False  # the rule judges sequences, so that shares are shares of sequences

    @property
    def valid(self) -> Tensor:
        """Sampled tokens whose log-probs are finite."""
        return self.keep | self.outside


def none(delta: Tensor, count: Tensor) -> Weights:
    return _weights(count, ratio(delta), torch.ones_like(delta), keep=count, outside=torch.zeros_like(count))


def tis(delta: Tensor, count: Tensor, cap: float) -> Weights:
    return _truncated(count, ratio(delta), cap)


def icepop(delta: Tensor, count: Tensor, low: float, high: float) -> Weights:
    r = ratio(delta)
    return _rejected(count, r, low, high, applied=r)


def sequence_tis(delta: Tensor, count: Tensor, cap: float) -> Weights:
    W = ratio(delta.sum(-1, keepdim=True)).expand_as(delta)
    return _truncated(count, W, cap, per_sequence=True)


def sequence_mask(delta: Tensor, count: Tensor, low: float, high: float) -> Weights:
    W = ratio(delta.sum(-1, keepdim=True)).expand_as(delta)
    return _rejected(count, W, low, high, applied=W, per_sequence=True)


def geometric_mask(delta: Tensor, count: Tensor, low: float, high: float) -> Weights:
    length = count.sum(-1, keepdim=True).clamp(min=1)
    G = ratio(delta.sum(-1, keepdim=True) / length).expand_as(delta)
    return _rejected(count, G, low, high, applied=ratio(delta), per_sequence=True)


def _truncated(count: Tensor, raw: Tensor, cap: float, per_sequence: bool = False) -> Weights:
    return _weights(count, raw, raw.clamp(max=cap), count, raw > cap, per_sequence)


def _rejected(
    count: Tensor, raw: Tensor, low: float, high: float, applied: Tensor, per_sequence: bool = False
) -> Weights:
    inside = (low <= raw) & (raw <= high)
    return _weights(count, raw, applied, count & inside, ~inside, per_sequence)


def _weights(
    count: Tensor, raw: Tensor, applied: Tensor, keep: Tensor, outside: Tensor, per_sequence: bool = False
) -> Weights:
    raw = torch.where(count, raw, 0.0).float()
    applied = torch.where(keep, applied, 0.0).float()
    return Weights(raw, applied, keep, count & outside, per_sequence)


CORRECTIONS: dict[str, Callable[..., Weights]] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "sequence-tis": sequence_tis,
    "sequence-mask": sequence_mask,
    "geometric-mask": geometric_mask,
}


def correction(name: str, **bounds: float) -> Callable[[Tensor, Tensor, Tensor], Weights]:
    """The correction called ``name``, as a function (g, p, mask) -> Weights; bounds have defaults."""
    if name not in CORRECTIONS:
        close = difflib.get_close_matches(name, CORRECTIONS, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown correction {name!r}{meant}: choose one of {', '.join(CORRECTIONS)}")
    settings: dict[str, Any] = {"name": name, **bounds}
    return correction_from(Correction(**settings))


def correction_from(settings: Correction) -> Callable[[Tensor, Tensor, Tensor], Weights]:
    """The correction of a recipe, which has checked and completed the bounds."""
    rule = CORRECTIONS[settings.name]
    bounds = {bound: getattr(settings, bound) for bound in BOUNDS[settings.name]}

    @torch.no_grad()
    def weigh(g: Tensor, p: Tensor, mask: Tensor) -> Weights:
        count = counted(mask, g, p)
        return rule(log_ratio(p.double(), g.double(), count), count, **bounds)

    return weigh
