"""Importance-sampling corrections: what a token sampled by the engine is worth to the trainer.

The engine samples from its own numbers (log-prob g), the trainer differentiates its own (log-prob p). The
ratio r = exp(p - g) makes a policy gradient unbiased, and its variance ruins it, so every method truncates or
rejects. `labkit.config.Correction` composes the methods in use from three things, computed here:

    delta_t = p_t - g_t    r_t = exp(delta_t)    W = exp(sum_t delta_t)    G = exp(mean_t delta_t)

    weight          none: 1    token: r_t    sequence: W    geometric: G    or f(delta, mask), the user's own
    truncation      w = min(max(weight, floor), cap)
    normalisation   w / mean(w), over tokens, or over responses where the weight is W or G; rejected ones count
    filters         statistic, of a token or of a response by sum, mean or worst token, inside [low, high]:

                    token            sum             mean                 max
    ratio           r_t              W               G                    any r_t outside
    k1              -delta_t         -sum delta      -mean delta          any outside
    k2              delta_t^2 / 2    sum             mean                 any outside
    k3              r_t-1-delta_t    sum             mean                 any outside
    mult-error      exp|delta_t|     sum             mean                 any outside
    probability     exp(c) - exp(g)                                       any outside
    binary-kl       max(b(p, g), b(g, p)), b(x, y) = e^x (x - y) + (1 - e^x) log((1 - e^x) / (1 - e^y))

A token counts if all filters keep it: applied weight w, otherwise 0. Bounds are inclusive. W is a product over
the response: many tiny mismatches add up with its length (delta = 0.012 goes past 3 at 92 tokens), whereas G
doesn't depend on the length. Sums and means are over the tokens of a response that are sampled and finite.

Two kinds of verdict follow the update and are given on the current log-probs c, which before the first update
equal p: those of filters with `when` (they also need the advantages), and with old_policy "rollout" all of
them, since there is no third policy then and p is c.

A weight of the user's (labkit.config.own) gets delta, FP64 and 0 where a token doesn't count, and the bool mask of
those that do, both [B, T], and returns [B, T]; ValueError if that has another shape or isn't finite where they count.

Shapes [B, T] (or [T], one sequence). The ratios are computed in FP64 and saturate (see labkit.rl.ratio);
results are FP32 without gradient. Non-finite log-probs never raise: such tokens don't count. A wrong name or
bound raises ConfigError, a ValueError. Sources: verl (rollout_corr_helper), NeMo RL (ClippedPGLossFn), TRL,
prime-rl; `labkit.config.corrections` names whose method is which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.config import Correction, Filter
from labkit.config.own import KINDS, load, short
from labkit.rl.kl import k1, k2, k3
from labkit.rl.ratio import counted, ratio


@dataclass(frozen=True)
class Weights:
    """What a correction did to each token. All [B, T], detached."""

    raw: Tensor  # float32: the weight before bounds (r, W, G or the user's; r if there is none), 0 if not valid
    applied: Tensor  # float32: what the loss is multiplied by; 0 where rejected
    keep: Tensor  # bool: False where rejected or not valid
    clipped: Tensor  # bool: valid, and the weight was truncated
    rejected: dict[str, Tensor]  # bool, by filter: valid tokens outside its bounds
    judged: dict[str, Tensor]  # float32, by filter: the statistic it looked at; of a response, at all of its tokens
    counting: Tensor  # bool: tokens in the denominator of the loss
    per_sequence: bool = False  # responses are judged, so that shares are shares of responses

    @property
    def valid(self) -> Tensor:
        """Sampled tokens whose log-probs are finite."""
        return self.keep | self.rejected_by_any

    @property
    def outside(self) -> Tensor:
        """Valid tokens outside any bounds: truncated or rejected."""
        return self.clipped | self.rejected_by_any

    @property
    def rejected_by_any(self) -> Tensor:
        return torch.stack([torch.zeros_like(self.keep), *self.rejected.values()]).any(0)

    def __getitem__(self, rows: Tensor) -> "Weights":
        """The same for some sequences."""
        return Weights(
            self.raw[rows],
            self.applied[rows],
            self.keep[rows],
            self.clipped[rows],
            {key: mask[rows] for key, mask in self.rejected.items()},
            {key: statistic[rows] for key, statistic in self.judged.items()},
            self.counting[rows],
            self.per_sequence,
        )


class Rule(Protocol):
    def __call__(
        self, g: Tensor, p: Tensor, mask: Tensor, advantages: Tensor | None = None, current: Tensor | None = None
    ) -> Weights:
        """`advantages` [B] are needed by filters with `when`; `current` is c, p if not given."""


def correction(name: str, **bounds: Any) -> Rule:
    """The correction called ``name``, as a function (g, p, mask) -> Weights; bounds have defaults."""
    return correction_from(Correction(name=name, **bounds))


def correction_from(settings: Correction) -> Rule:
    own = load("correction", settings.weight) if KINDS["correction"].owns(settings.weight) else None

    @torch.no_grad()
    def weigh(
        g: Tensor, p: Tensor, mask: Tensor, advantages: Tensor | None = None, current: Tensor | None = None
    ) -> Weights:
        c = p if current is None else current
        batch = _Batch.of(g, c if settings.old_policy == "rollout" else p, c, mask, advantages)
        raw = _raw_weight(settings.weight, batch) if own is None else _own_weight(own, settings.weight, batch)
        return _weigh(settings, batch, raw)

    return weigh


@dataclass(frozen=True)
class _Batch:
    """FP64 [B, T]; log-probs are 0 where a token doesn't count."""

    count: Tensor  # bool
    length: Tensor  # [B, 1], at least 1
    g: Tensor
    p: Tensor
    c: Tensor
    advantages: Tensor | None  # [B, 1]

    @classmethod
    def of(cls, g: Tensor, p: Tensor, c: Tensor, mask: Tensor, advantages: Tensor | None) -> "_Batch":
        count = counted(mask, g, p, c)
        g, p, c = (torch.where(count, x.double(), 0.0) for x in (g, p, c))
        length = count.sum(-1, keepdim=True).clamp(min=1)
        return cls(count, length, g, p, c, None if advantages is None else advantages.double()[..., None])


def _weigh(settings: Correction, batch: _Batch, raw: Tensor) -> Weights:
    truncated = raw.clamp(min=settings.floor, max=settings.cap) if settings.floor or settings.cap else raw
    judged = {each.key: _judged(each, batch) for each in settings.filters}
    rejected = {each.key: batch.count & _outside(each, judged[each.key], batch) for each in settings.filters}
    keep = batch.count & ~torch.stack([torch.zeros_like(batch.count), *rejected.values()]).any(0)
    per_sequence = settings.weight in ("sequence", "geometric")
    applied = torch.ones_like(raw) if settings.weight == "none" else truncated
    if settings.normalize:
        applied = applied / _mean_weight(applied, batch, per_sequence)
    return Weights(
        raw=torch.where(batch.count, raw, 0.0).float(),
        applied=torch.where(keep, applied, 0.0).float(),
        keep=keep,
        clipped=batch.count & (truncated != raw),
        rejected=rejected,
        judged={key: torch.where(batch.count, value, 0.0).float() for key, value in judged.items()},
        counting=keep if settings.denominator == "drop" else batch.count,
        per_sequence=per_sequence or any(each.per_sequence for each in settings.filters),
    )


def _raw_weight(level: str, batch: _Batch) -> Tensor:
    delta = batch.p - batch.g
    total = delta.sum(-1, keepdim=True)
    if level == "sequence":
        return ratio(total).expand_as(delta)
    if level == "geometric":
        return ratio(total / batch.length).expand_as(delta)
    return ratio(delta)


def _own_weight(own: Callable[[Tensor, Tensor], Tensor], reference: str, batch: _Batch) -> Tensor:
    delta, name = batch.p - batch.g, short(reference)
    weight = own(delta, batch.count)
    if not isinstance(weight, Tensor) or weight.shape != delta.shape:
        found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"{name} must return a weight for each token, a tensor {list(delta.shape)}, got {found}")
    if bad := int((batch.count & ~weight.isfinite()).sum()):
        raise ValueError(f"{name} gave {bad} of {int(batch.count.sum())} tokens a weight that isn't finite")
    return torch.where(batch.count, weight.double(), 0.0)


def _mean_weight(weight: Tensor, batch: _Batch, per_sequence: bool) -> Tensor:
    """Over tokens, or over responses; 1 if that is 0, so that a batch without weight stays one."""
    of_responses = weight[..., 0][batch.count.any(-1)]
    mean = (of_responses if per_sequence else weight[batch.count]).mean()
    return torch.where(mean > 0, mean, 1.0)


_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ratio": lambda x, g: ratio(x - g),
    "k1": lambda x, g: k1(x - g),
    "k2": lambda x, g: k2(x - g),
    "k3": lambda x, g: k3(x - g),
    "mult-error": lambda x, g: ratio((x - g).abs()),
    "probability": lambda x, g: x.exp() - g.exp(),
    "binary-kl": lambda x, g: torch.maximum(_binary_kl(x, g), _binary_kl(g, x)),
}


def _binary_kl(x: Tensor, y: Tensor) -> Tensor:
    """KL between "this token or another" under log-probs x and y; probabilities of 1 are kept a rounding below it."""
    px, py = (z.exp().clamp(1e-12, 1 - 1e-12) for z in (x, y))
    return px * (px / py).log() + (1 - px) * ((1 - px) / (1 - py)).log()


def _outside(each: Filter, value: Tensor, batch: _Batch) -> Tensor:
    """Tokens that the filter rejects."""
    low, high = (torch.nan if bound is None else bound for bound in (each.low, each.high))
    below, above = value < low, value > high  # nothing is below or above NaN
    if each.when == "outward":
        advantages = _needed(batch.advantages, each)
        return (above & (advantages > 0)) | (below & (advantages <= 0))
    outside = below | above
    if each.when == "negative":
        outside = outside & (_needed(batch.advantages, each) < 0)
    return outside.any(-1, keepdim=True).expand_as(outside) if each.over == "max" else outside


def _judged(each: Filter, batch: _Batch) -> Tensor:
    """The statistic that a filter looks at, [B, T]; of a response, the same at all of its tokens."""
    x, g = (batch.p if each.when == "always" else batch.c), batch.g
    statistic = _STATISTICS[each.statistic]
    if each.over in ("token", "max"):
        return statistic(x, g)
    divisor = batch.length if each.over == "mean" else 1
    if each.statistic == "ratio":
        return ratio((x - g).sum(-1, keepdim=True) / divisor).expand_as(x)
    total = torch.where(batch.count, statistic(x, g), 0.0).sum(-1, keepdim=True)
    return (total / divisor).expand_as(x)


def _needed(advantages: Tensor | None, each: Filter) -> Tensor:
    if advantages is None:
        raise ValueError(f"the filter {each.short_str()} depends on the sign of the advantage: pass advantages")
    return advantages
