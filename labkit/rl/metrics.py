"""Mismatch metrics: how far the engine's log-probs g are from the trainer's p, on the tokens it sampled.

    delta = p - g    r = exp(delta)    k3(d) = exp(d) - 1 - d    mean: over the tokens that count, x ~ engine

Every metric is described, with its unit, its healthy band and its source, in labkit.runs.metrics.METRICS. The two
to look at first: token_mult_prob_error = mean exp|delta| (NVIDIA's headline figure; 1 exactly when both sides
agree to the bit) and gen_kl_error = mean k3(delta), an unbiased estimate of KL(engine || trainer). Two more say
that the sides mean different distributions, which no precision explains: mean r away from 1, and

    surprisal_gap = mean(-p - H)    H: entropy of the trainer's distribution at that token

whose expectation is 0 if the trainer's distribution is the one that was sampled, whatever the engine reports as g.
What none of them sees: a token which the engine never samples but the trainer would, since x comes from the engine.

Shapes [B, T], or [T] for one sequence; nats; computed in FP64. Padding and tokens with a non-finite log-prob
never enter a mean, minimum or maximum (the latter are nan_count); empty responses enter no mean over responses.
exp saturates at exp(40) = 2.4e17 (labkit.rl.ratio), so all values are finite. NaN means: over nothing, or divided by
zero (prob_correlation where one side is constant, kl_ent_ratio without entropy). ess and kept_share of nothing are
0. Metrics of rejected tokens are absent where nothing is rejected. Raises ValueError when shapes differ. Sources:
NeMo RL (loss_functions.py, grpo.py), verl (rollout_corr_helper), prime-rl, AReaL.
"""

import math

import torch
from torch import Tensor

from labkit.rl.corrections import Weights
from labkit.rl.kl import k1, k2, k3
from labkit.rl.objectives import Clip
from labkit.rl.ratio import counted, log_ratio, ratio
from labkit.runs.metrics import METRICS as METRICS

QUANTILES = {"q05": 0.05, "q95": 0.95}


@torch.no_grad()
def mismatch(
    g: Tensor,
    p: Tensor,
    mask: Tensor,
    current: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    weights: Weights | None = None,
    clip: Clip | None = None,
) -> dict[str, float]:
    """All mismatch metrics of a batch.

    With the entropy of every token, those against it; with the correction's weights, those of kept and rejected
    tokens; with the current log-probs c, those of rho (and with the loss's clip, of the clipped rho).
    """
    g_BT, p_BT = (torch.atleast_2d(x).double() for x in (g, p))
    mask = torch.atleast_2d(mask)
    count = counted(mask, g_BT, p_BT)
    metrics = {
        "num_tokens": float(count.sum()),
        "num_valid_samples": float(count.any(-1).sum()),
        "nan_count": float((mask.bool() & ~count).sum()),
        **_token_metrics(g_BT[count], p_BT[count]),
        **_sequence_metrics(g_BT, p_BT, count),
    }
    if entropy is not None:
        metrics |= _entropy_metrics(g_BT[count], p_BT[count], torch.atleast_2d(entropy).double()[count])
    if weights is not None:
        metrics |= _kept_metrics(g_BT, p_BT, torch.atleast_2d(weights.keep), count)
    if current is not None:
        c_BT = torch.atleast_2d(current).double()
        count = counted(mask, g_BT, p_BT, c_BT)
        metrics |= _current_metrics(g_BT[count], p_BT[count], c_BT[count], clip)
    return metrics


def _token_metrics(g_N: Tensor, p_N: Tensor) -> dict[str, float]:
    delta, r = p_N - g_N, ratio(p_N - g_N)
    apart = delta.abs()
    prob_apart = (ratio(p_N) - ratio(g_N)).abs()
    mixture = torch.logaddexp(p_N, g_N) - math.log(2)
    return {
        "token_mult_prob_error": _mean(ratio(apart)),
        "gen_kl_error": _mean(k3(delta)),
        "gen_kl_std": _std(k3(delta)),
        "gen_kl_max": _max(k3(delta)),
        "policy_kl_error": _mean(k3(-delta)),
        "js_divergence_error": _mean(0.5 * (k3(p_N - mixture) + k3(g_N - mixture))),
        "sampling_importance_ratio": _mean(r),
        "sampling_ratio_se": _standard_error(r),
        "kl_k1": _mean(k1(delta)),
        "kl_k2": _mean(k2(delta)),
        "chi2_token": _mean(r.square()) - 1,
        "mean_abs_diff": _mean(apart),
        "max_abs_diff": _max(apart),
        "mean_abs_prob_diff": _mean(prob_apart),
        "max_abs_prob_diff": _max(prob_apart),
        "std_abs_prob_diff": _std(prob_apart),
        "prob_correlation": _correlation(ratio(p_N), ratio(g_N)),
        "extreme_fraction": _mean(apart > math.log(2)),
        "tokens_differing": _mean(delta != 0),
    }


def _entropy_metrics(g_N: Tensor, p_N: Tensor, entropy_N: Tensor) -> dict[str, float]:
    gap, entropy = -p_N - entropy_N, _mean(entropy_N)
    return {
        "kl_ent_ratio": _mean(k3(p_N - g_N)) / entropy if entropy else math.nan,
        "surprisal_gap": _mean(gap),
        "surprisal_gap_se": _standard_error(gap),
    }


def _sequence_metrics(g: Tensor, p: Tensor, count: Tensor) -> dict[str, float]:
    rows = count.any(-1)
    count = count[rows]
    delta = log_ratio(p[rows], g[rows], count)
    log_ppl_diff = -_mean_over_tokens(delta, count)
    train_log_ppl, rollout_log_ppl = (-_mean_over_tokens(x[rows], count) for x in (p, g))
    return {
        **_mult_error_of_responses(delta, count, ""),
        "chi2_seq": _mean(ratio(2 * delta.sum(-1))) - 1,
        "train_ppl": _mean(ratio(train_log_ppl)),
        "rollout_ppl": _mean(ratio(rollout_log_ppl)),
        "train_log_ppl": _mean(train_log_ppl),
        "rollout_log_ppl": _mean(rollout_log_ppl),
        "log_ppl_diff": _mean(log_ppl_diff),
        "log_ppl_abs_diff": _mean(log_ppl_diff.abs()),
        "log_ppl_diff_max": _max(log_ppl_diff),
        "log_ppl_diff_min": _min(log_ppl_diff),
        "ppl_ratio": _mean(ratio(log_ppl_diff)),
    }


def _kept_metrics(g: Tensor, p: Tensor, keep: Tensor, count: Tensor) -> dict[str, float]:
    kept, rejected = count & keep, count & ~keep
    rows = kept.any(-1)
    metrics = _mult_error_of_responses(log_ratio(p, g, kept)[rows], kept[rows], "_kept")
    metrics["gen_kl_kept"] = _mean(k3((p - g)[kept]))
    if rejected.any():
        metrics["gen_kl_rejected"] = _mean(k3((p - g)[rejected]))
    return metrics


def _mult_error_of_responses(delta: Tensor, count: Tensor, suffix: str) -> dict[str, float]:
    error = _mean_over_tokens(ratio(delta.abs()), count)
    return {
        f"max_seq_mult_prob_error{suffix}": _max(error),
        f"mean_seq_mult_prob_error{suffix}": _mean(error),
        f"min_seq_mult_prob_error{suffix}": _min(error),
    }


def _current_metrics(g_N: Tensor, p_N: Tensor, c_N: Tensor, clip: Clip | None) -> dict[str, float]:
    rho = ratio(c_N - p_N)
    metrics = {"approx_entropy": -_mean(ratio(c_N - g_N) * c_N), **_spread(rho, "probs_ratio")}
    return metrics if clip is None else metrics | _spread(clip(rho), "probs_ratio_clamped")


def _spread(values: Tensor, name: str) -> dict[str, float]:
    return {name: _mean(values), f"{name}_min": _min(values), f"{name}_max": _max(values)}


@torch.no_grad()
def weight_statistics(weights: Weights, mask: Tensor, correct_B: Tensor | None = None) -> dict[str, float]:
    """What a correction did to the batch: weights before and after, and what it truncated and rejected.

    `correct_B` (True for a right answer) tells how many of the rejected responses were right.
    """
    if weights.keep.shape != mask.shape:
        raise ValueError(f"weights of {list(weights.keep.shape)} don't match the mask {list(mask.shape)}")
    count, keep, outside = (torch.atleast_2d(x) for x in (weights.valid, weights.keep, weights.outside))
    raw_N, applied_N = (torch.atleast_2d(x).double()[count] for x in (weights.raw, weights.applied))
    rows, sampled = count.any(-1), int(mask.bool().sum())
    whole_rejected = rows & ~keep.any(-1)
    judged_outside = outside.any(-1)[rows] if weights.per_sequence else outside[count]
    judged_kept = keep.any(-1)[rows] if weights.per_sequence else keep[count]
    statistics = {
        "ess": _effective_share(applied_N),
        "ess_raw": _effective_share(raw_N),
        "kept_share": int(keep.sum()) / sampled if sampled else 0.0,
        "is_oob_ratio": _mean(judged_outside),
        "clipped_weight_share": _mean(judged_outside & judged_kept),
        "num_rejected_seqs": float(whole_rejected.sum()),
        **_clipped_shares(weights, count),
        **{f"{name}_{which}": value(weight)
           for which, weight in (("raw", raw_N), ("applied", applied_N))
           for name, value in (("mean", _mean), ("std", _std), ("min", _min), ("max", _max))},
        **_weights_of_responses(torch.atleast_2d(weights.applied).double()[rows], count[rows]),
        **_filter_statistics(weights, count),
    }  # fmt: skip
    if correct_B is not None and whole_rejected.any():
        statistics["rejected_correct_share"] = _mean(torch.atleast_1d(correct_B)[whole_rejected])
    return statistics


def _effective_share(weight_N: Tensor) -> float:
    total, squares = float(weight_N.sum()), float(weight_N.square().sum())
    return total**2 / (len(weight_N) * squares) if squares > 0 else 0.0


def _clipped_shares(weights: Weights, count: Tensor) -> dict[str, float]:
    """A cap is at least 1 and a floor at most 1, so a truncated weight above 1 was lowered, one below 1 raised."""
    clipped, raw = torch.atleast_2d(weights.clipped), torch.atleast_2d(weights.raw)
    rows, lowered, raised = count.any(-1), clipped & (raw > 1), clipped & (raw < 1)
    return {
        "above_cap_share": _mean(lowered[count]),
        "below_floor_share": _mean(raised[count]),
        "seq_above_cap_share": _mean(lowered.any(-1)[rows]),
        "seq_below_floor_share": _mean(raised.any(-1)[rows]),
    }


def _weights_of_responses(applied: Tensor, count: Tensor) -> dict[str, float]:
    mean = _mean_over_tokens(applied, count)
    return {
        "seq_weight_mean": _mean(mean),
        "seq_weight_std": float(mean.std()) if len(mean) > 1 else _std(mean),
        "seq_weight_min": _min(mean),
        "seq_weight_max": _max(mean),
        "seq_weight_max_deviation": _max((mean - 1).abs()),
    }


def _filter_statistics(weights: Weights, count: Tensor) -> dict[str, float]:
    """By filter, what share of the tokens it rejects, and the bounds that would reject a twentieth on each side."""
    statistics = {}
    for key, rejected in weights.rejected.items():
        statistics[f"rejected_{key}"] = _mean(torch.atleast_2d(rejected)[count])
        value = torch.atleast_2d(weights.judged[key]).double()
        lowest = highest = value[count]
        if key.startswith(("sum_", "mean_", "max_")):  # of a response; where the worst token decides, its extremes
            rows = count.any(-1)
            lowest = torch.where(count, value, torch.inf).amin(-1)[rows]
            highest = torch.where(count, value, -torch.inf).amax(-1)[rows]
        for (name, share), side in zip(QUANTILES.items(), (lowest, highest), strict=True):
            statistics[f"judged_{key}_{name}"] = float(side.quantile(share)) if len(side) else math.nan
    return statistics


def _mean_over_tokens(values: Tensor, count: Tensor) -> Tensor:
    """Of each response, all of which have a token that counts."""
    return torch.where(count, values, 0.0).sum(-1) / count.sum(-1)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _std(values: Tensor) -> float:
    return float(values.std(correction=0)) if len(values) else math.nan


def _standard_error(values: Tensor) -> float:
    return _std(values) / math.sqrt(len(values)) if len(values) else math.nan


def _correlation(x: Tensor, y: Tensor) -> float:
    """NaN where a side varies by no more than FP32 log-probs round."""
    if not len(x) or any(side.std(correction=0) <= 1e-6 * side.mean() for side in (x, y)):
        return math.nan
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def _min(values: Tensor) -> float:
    return float(values.min()) if len(values) else math.nan


def _max(values: Tensor) -> float:
    return float(values.max()) if len(values) else math.nan
