"""Mismatch metrics: how far the engine's log-probs g are from the trainer's p, on the tokens it sampled.

    delta = p - g    r = exp(delta)    k3(d) = exp(d) - 1 - d    mean: over the tokens that count, x ~ engine

Every metric is described, with its unit, its healthy band and its source, in METRICS at the end of this file.
The two to look at first: token_mult_prob_error = mean exp|delta| (NVIDIA's headline figure; 1 exactly when
both sides agree to the bit) and gen_kl_error = mean k3(delta), an unbiased estimate of KL(engine || trainer).
What they can't see: a token which the engine never samples but the trainer would, since x comes from the
engine.

Shapes [B, T], or [T] for one sequence; nats; computed in FP64. Padding and tokens with a non-finite log-prob
never enter a mean, minimum or maximum (the latter are nan_count); empty responses enter no mean over
sequences. exp saturates at exp(40) = 2.4e17 (labkit.rl.ratio), so all values are finite; a mean over nothing
is NaN, ess and kept_share are 0. Sources: NeMo RL (loss_functions.py), verl (rollout_corr_helper), AReaL.
Left out: correlations, k-filters.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from labkit.rl.corrections import Weights
from labkit.rl.kl import k1, k2, k3
from labkit.rl.ratio import counted, log_ratio, ratio


@torch.no_grad()
def mismatch(g: Tensor, p: Tensor, mask: Tensor, current: Tensor | None = None) -> dict[str, float]:
    """All mismatch metrics of a batch; those of the current log-probs c too, if given."""
    logprobs = [torch.atleast_2d(x).double() for x in (g, p, current) if x is not None]
    mask = torch.atleast_2d(mask).bool()
    count = counted(mask, *logprobs)
    metrics = {
        "num_tokens": float(count.sum()),
        "num_valid_samples": float(count.any(-1).sum()),
        "nan_count": float((mask & ~count).sum()),
        **_token_metrics(logprobs[0][count], logprobs[1][count]),
        **_sequence_metrics(logprobs[0], logprobs[1], count),
    }
    if current is not None:
        metrics |= _current_metrics(*(x[count] for x in logprobs))
    return metrics


def _token_metrics(g_N: Tensor, p_N: Tensor) -> dict[str, float]:
    delta = p_N - g_N
    apart = delta.abs()
    prob_apart = (ratio(p_N) - ratio(g_N)).abs()
    mixture = torch.logaddexp(p_N, g_N) - math.log(2)
    return {
        "token_mult_prob_error": _mean(ratio(apart)),
        "gen_kl_error": _mean(k3(delta)),
        "policy_kl_error": _mean(k3(-delta)),
        "js_divergence_error": _mean(0.5 * (k3(p_N - mixture) + k3(g_N - mixture))),
        "sampling_importance_ratio": _mean(ratio(delta)),
        "kl_k1": _mean(k1(delta)),
        "kl_k2": _mean(k2(delta)),
        "chi2_token": _mean(ratio(delta).square()) - 1,
        "mean_abs_diff": _mean(apart),
        "max_abs_diff": _max(apart),
        "mean_abs_prob_diff": _mean(prob_apart),
        "max_abs_prob_diff": _max(prob_apart),
        "extreme_fraction": _mean(apart > math.log(2)),
        "tokens_differing": _mean(delta != 0),
    }


def _sequence_metrics(g: Tensor, p: Tensor, count: Tensor) -> dict[str, float]:
    rows = count.any(-1)
    count = count[rows]
    length = count.sum(-1)

    def mean_over_tokens(values: Tensor) -> Tensor:
        return torch.where(count, values, 0.0).sum(-1) / length

    delta = log_ratio(p[rows], g[rows], count)
    mult_error = mean_over_tokens(ratio(delta.abs()))
    return {
        "max_seq_mult_prob_error": _max(mult_error),
        "mean_seq_mult_prob_error": _mean(mult_error),
        "min_seq_mult_prob_error": -_max(-mult_error),
        "chi2_seq": _mean(ratio(2 * delta.sum(-1))) - 1,
        "train_ppl": _mean(ratio(-mean_over_tokens(p[rows]))),
        "rollout_ppl": _mean(ratio(-mean_over_tokens(g[rows]))),
        "log_ppl_diff": _mean(-mean_over_tokens(delta)),
        "ppl_ratio": _mean(ratio(-mean_over_tokens(delta))),
    }


def _current_metrics(g_N: Tensor, p_N: Tensor, c_N: Tensor) -> dict[str, float]:
    rho = ratio(c_N - p_N)
    return {
        "approx_entropy": -_mean(ratio(c_N - g_N) * c_N),
        "probs_ratio": _mean(rho),
        "probs_ratio_min": -_max(-rho),
        "probs_ratio_max": _max(rho),
    }


@torch.no_grad()
def weight_statistics(weights: Weights, mask: Tensor) -> dict[str, float]:
    """What a correction did to the batch: effective sample size, shares clipped and rejected, mean weight."""
    if weights.keep.shape != mask.shape:
        raise ValueError(f"weights of {list(weights.keep.shape)} don't match the mask {list(mask.shape)}")
    count = torch.atleast_2d(weights.valid)
    keep, outside = torch.atleast_2d(weights.keep), torch.atleast_2d(weights.outside)
    applied = torch.atleast_2d(weights.applied).double()
    total, squares = float(applied.sum()), float(applied.square().sum())
    tokens, sampled = int(count.sum()), int(mask.bool().sum())
    judged_outside = outside.any(-1)[count.any(-1)] if weights.per_sequence else outside[count]
    judged_kept = keep.any(-1)[count.any(-1)] if weights.per_sequence else keep[count]
    return {
        "ess": total**2 / (tokens * squares) if squares > 0 else 0.0,
        "kept_share": int(keep.sum()) / sampled if sampled else 0.0,
        "is_oob_ratio": _mean(judged_outside),
        "clipped_weight_share": _mean(judged_outside & judged_kept),
        "mean_applied": _mean(applied[count]),
        "max_applied": _max(applied[count]),
    }


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else math.nan


@dataclass(frozen=True)
class Metric:
    definition: str
    unit: str
    better: Literal["lower", "higher", "one", "zero", "neither"]
    source: str
    healthy: tuple[float, float] | None = None  # inclusive band; None: no figure that holds in general


METRICS: dict[str, Metric] = {
    # tokens
    "token_mult_prob_error": Metric("mean exp|delta|", "ratio", "one", "NeMo RL", (1.0, 1.05)),
    "gen_kl_error": Metric("mean k3(delta), estimates KL(engine || trainer)", "nats", "lower", "NeMo RL", (0.0, 1e-3)),
    "policy_kl_error": Metric(
        "mean k3(-delta); first to rise on tokens that the trainer finds improbable",
        "nats",
        "lower",
        "NeMo RL",
        (0.0, 1e-3),
    ),
    "js_divergence_error": Metric(
        "mean of (k3(p - m) + k3(g - m)) / 2, m = log((exp p + exp g) / 2); a surrogate, may exceed ln 2",
        "nats",
        "lower",
        "NeMo RL",
        (0.0, 1e-3),
    ),
    "sampling_importance_ratio": Metric(
        "mean r before any correction; away from 1: temperature or top-p differ between the sides",
        "ratio",
        "one",
        "NeMo RL",
        (0.98, 1.02),
    ),
    "kl_k1": Metric("mean -delta, estimates KL(engine || trainer)", "nats", "zero", "verl", (-0.1, 0.1)),
    "kl_k2": Metric("mean delta^2 / 2", "nats", "lower", "verl"),
    "chi2_token": Metric("mean r^2 - 1, variance of the weights", "1", "lower", "verl", (-1.0, 1.0)),
    "mean_abs_diff": Metric("mean |delta|", "nats", "lower", "slime"),
    "max_abs_diff": Metric("max |delta|", "nats", "lower", "slime"),
    "mean_abs_prob_diff": Metric("mean |exp p - exp g|", "probability", "lower", "verl"),
    "max_abs_prob_diff": Metric("max |exp p - exp g|", "probability", "lower", "verl"),
    "extreme_fraction": Metric("share of tokens with |delta| > ln 2", "share", "lower", "AReaL"),
    "tokens_differing": Metric("share of tokens with delta != 0", "share", "lower", "labkit"),
    "num_tokens": Metric("tokens that count", "tokens", "neither", "labkit"),
    "num_valid_samples": Metric("responses with a token that counts", "responses", "neither", "NeMo RL"),
    "nan_count": Metric("sampled tokens whose log-prob is NaN or infinite", "tokens", "lower", "labkit", (0.0, 0.0)),
    # sequences
    "max_seq_mult_prob_error": Metric("largest over responses of mean_t exp|delta|", "ratio", "one", "NeMo RL"),
    "mean_seq_mult_prob_error": Metric("mean over responses of mean_t exp|delta|", "ratio", "one", "NeMo RL"),
    "min_seq_mult_prob_error": Metric("smallest over responses of mean_t exp|delta|", "ratio", "one", "NeMo RL"),
    "chi2_seq": Metric("mean over responses of exp(2 sum_t delta) - 1; grows with length", "1", "lower", "verl"),
    "train_ppl": Metric("mean over responses of exp(-mean_t p)", "perplexity", "neither", "verl"),
    "rollout_ppl": Metric("mean over responses of exp(-mean_t g)", "perplexity", "neither", "verl"),
    "log_ppl_diff": Metric("mean over responses of mean_t -delta", "nats", "zero", "verl"),
    "ppl_ratio": Metric("mean over responses of exp(mean_t -delta)", "ratio", "one", "verl"),
    # the current policy
    "approx_entropy": Metric("-mean exp(c - g) c", "nats", "neither", "NeMo RL"),
    "probs_ratio": Metric("mean exp(c - p); 1 on the first update after a rollout", "ratio", "one", "NeMo RL"),
    "probs_ratio_min": Metric("min exp(c - p)", "ratio", "one", "NeMo RL"),
    "probs_ratio_max": Metric("max exp(c - p)", "ratio", "one", "NeMo RL"),
    # the correction
    "ess": Metric(
        "effective sample size (sum w)^2 / (n sum w^2) of the applied weights; 0 when all are rejected",
        "share",
        "higher",
        "verl",
        (0.3, 1.0),
    ),
    "kept_share": Metric("sampled tokens that still count", "share", "higher", "labkit"),
    "is_oob_ratio": Metric(
        "share outside the bounds, of tokens or (rules on sequences) of responses",
        "share",
        "lower",
        "NeMo RL",
    ),
    "clipped_weight_share": Metric(
        "share outside the bounds that was capped rather than rejected", "share", "lower", "labkit"
    ),
    "mean_applied": Metric("mean applied weight over tokens, rejected ones as 0", "ratio", "one", "verl", (0.5, 2.0)),
    "max_applied": Metric("largest applied weight", "ratio", "neither", "verl"),
    # the loss
    "loss": Metric("policy_loss + kl_coef * kl; about 0 on the first update, which is right", "1", "neither", "GRPO"),
    "policy_loss": Metric("clipped objective times the correction's weights", "1", "neither", "PPO"),
    "kl": Metric("KL penalty to the reference, before kl_coef", "nats", "neither", "NeMo RL"),
    "clip_share": Metric("share of tokens where PPO's clip is in force", "share", "neither", "PPO"),
    "loss_nan_count": Metric(
        "trained tokens whose log-prob is NaN or infinite", "tokens", "lower", "labkit", (0.0, 0.0)
    ),
}
