"""What every number of a StepRecord means: its definition, unit, which way is better, where it comes from.

`METRICS` describes `StepRecord.metrics` by name, `TOKENS` the counts in `StepRecord.tokens`; `describe(name)` finds
either, and the families with a filter or a layer in their name (rejected_mean_ratio). A panel, a report or an alarm
reads `healthy` from here; a band that holds in general is known for few metrics, None says that it isn't.

    g engine's log-prob of a sampled token    p trainer's, before the update    c the current policy's
    delta = p - g      r = exp(delta)         rho = exp(c - p)                  k3(d) = exp(d) - 1 - d
    w applied weight   raw: the same before truncation and rejection

Unless a definition says otherwise, means are over tokens; those "over responses" first average each response.
Std over tokens divides by n, std over responses by n - 1 (0 for a single one), as verl has it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from labkit.config.errors import did_you_mean

Better = Literal["lower", "higher", "one", "zero", "neither"]
Band = tuple[float, float]


@dataclass(frozen=True)
class Metric:
    definition: str
    unit: str
    better: Better
    source: str
    healthy: Band | None = None  # inclusive; None: no band that holds in general


_POLICY = {
    "reward": Metric("mean reward of the rollouts", "1", "higher", "GRPO"),
    "accuracy": Metric("share of the rollouts with reward 1", "share", "higher", "labkit"),
    "heldout_accuracy": Metric("accuracy on fixed prompts, sampled in BF16", "share", "higher", "labkit"),
    "heldout_accuracy_engine": Metric(
        "the same problems through the run's own engine (eval_engine)", "share", "higher", "NeMo RL"
    ),
    "response_length": Metric("mean length of a response", "tokens", "neither", "verl"),
    "truncated_share": Metric("responses cut off at max_new_tokens", "share", "lower", "NeMo RL", (0.0, 0.2)),
    "zero_advantage_share": Metric("responses without an advantage, so without a gradient", "share", "lower", "TRL"),
    "entropy": Metric("mean entropy of the trainer's distribution", "nats", "neither", "verl"),
    "lr": Metric("learning rate of the last update", "1", "neither", "labkit"),
    "grad_norm": Metric("mean gradient norm of the updates made, before clipping", "1", "neither", "verl"),
    "staleness": Metric("train steps by which the engine's weights are behind", "steps", "zero", "AReaL"),
    "codes_changed": Metric("FP8 weight codes that the last refit changed", "share", "neither", "QuRL"),
    "generation_hidden": Metric(
        "share of the batch's sampling time behind the training of the step before", "share", "higher", "labkit"
    ),
    "kv_saturation_k": Metric("cached keys clipped by their scale", "share", "zero", "labkit", (0.0, 1e-3)),
    "kv_saturation_v": Metric("cached values clipped by their scale", "share", "zero", "labkit", (0.0, 1e-3)),
}

_MISMATCH_OF_TOKENS = {
    "token_mult_prob_error": Metric("mean exp|delta| (TMPE)", "ratio", "one", "NeMo RL", (1.0, 1.05)),
    "gen_kl_error": Metric("mean k3(delta), estimates KL(engine || trainer)", "nats", "lower", "NeMo RL", (0.0, 1e-3)),
    "gen_kl_std": Metric("std of k3(delta)", "nats", "lower", "prime-rl"),
    "gen_kl_max": Metric("max k3(delta)", "nats", "lower", "prime-rl"),
    "policy_kl_error": Metric(
        "mean k3(-delta); first to rise on tokens that the trainer finds improbable",
        "nats", "lower", "NeMo RL", (0.0, 1e-3),
    ),
    "js_divergence_error": Metric(
        "mean of (k3(p - m) + k3(g - m)) / 2, m = log((exp p + exp g) / 2); a surrogate, may exceed ln 2",
        "nats", "lower", "NeMo RL", (0.0, 1e-3),
    ),
    "sampling_importance_ratio": Metric(
        "mean r; away from 1: temperature, top-p or top-k differ between the sides",
        "ratio", "one", "NeMo RL", (0.98, 1.02),
    ),
    "sampling_ratio_se": Metric("standard error of mean r: std r / sqrt n", "ratio", "lower", "labkit"),
    "kl_k1": Metric("mean -delta, estimates KL(engine || trainer)", "nats", "zero", "verl", (-0.1, 0.1)),
    "kl_k2": Metric("mean delta^2 / 2", "nats", "lower", "verl"),
    "kl_ent_ratio": Metric("gen_kl_error / mean entropy", "ratio", "lower", "prime-rl"),
    "chi2_token": Metric("mean r^2 - 1, variance of the weights", "1", "lower", "verl", (-1.0, 1.0)),
    "mean_abs_diff": Metric("mean |delta|", "nats", "lower", "slime"),
    "max_abs_diff": Metric("max |delta|", "nats", "lower", "slime"),
    "mean_abs_prob_diff": Metric("mean |exp p - exp g|", "probability", "lower", "verl"),
    "max_abs_prob_diff": Metric("max |exp p - exp g|", "probability", "lower", "verl"),
    "std_abs_prob_diff": Metric("std of |exp p - exp g|", "probability", "lower", "verl"),
    "prob_correlation": Metric(
        "Pearson correlation of exp p and exp g; NaN where one side is constant", "1", "higher", "verl"
    ),
    "extreme_fraction": Metric("tokens with |delta| > ln 2", "share", "lower", "AReaL"),
    "tokens_differing": Metric("tokens with delta != 0", "share", "lower", "labkit"),
    "surprisal_gap": Metric(
        "mean (-p - entropy); 0 where tokens are drawn from the trainer's distribution, whatever g says",
        "nats", "zero", "labkit",
    ),
    "surprisal_gap_se": Metric("standard error of surprisal_gap", "nats", "lower", "labkit"),
    "num_tokens": Metric("tokens that count", "tokens", "neither", "labkit"),
    "num_valid_samples": Metric("responses with a token that counts", "responses", "neither", "NeMo RL"),
    "nan_count": Metric("sampled tokens whose log-prob is NaN or infinite", "tokens", "lower", "labkit", (0.0, 0.0)),
}  # fmt: skip

_MISMATCH_OF_RESPONSES = {
    "max_seq_mult_prob_error": Metric("largest over responses of mean_t exp|delta|", "ratio", "one", "NeMo RL"),
    "mean_seq_mult_prob_error": Metric("mean over responses of mean_t exp|delta|", "ratio", "one", "NeMo RL"),
    "min_seq_mult_prob_error": Metric("smallest over responses of mean_t exp|delta|", "ratio", "one", "NeMo RL"),
    "chi2_seq": Metric("mean over responses of exp(2 sum_t delta) - 1; grows with length", "1", "lower", "verl"),
    "train_ppl": Metric("mean over responses of exp(-mean_t p)", "perplexity", "neither", "verl"),
    "rollout_ppl": Metric("mean over responses of exp(-mean_t g)", "perplexity", "neither", "verl"),
    "train_log_ppl": Metric("mean over responses of -mean_t p", "nats", "neither", "verl"),
    "rollout_log_ppl": Metric("mean over responses of -mean_t g", "nats", "neither", "verl"),
    "log_ppl_diff": Metric("mean over responses of mean_t -delta", "nats", "zero", "verl"),
    "log_ppl_abs_diff": Metric("mean over responses of |mean_t -delta|", "nats", "lower", "verl"),
    "log_ppl_diff_max": Metric("largest over responses of mean_t -delta", "nats", "zero", "verl"),
    "log_ppl_diff_min": Metric("smallest over responses of mean_t -delta", "nats", "zero", "verl"),
    "ppl_ratio": Metric("mean over responses of exp(mean_t -delta)", "ratio", "one", "verl"),
}

_AFTER_REJECTION = {
    "gen_kl_kept": Metric("gen_kl_error of the kept tokens", "nats", "lower", "prime-rl"),
    "gen_kl_rejected": Metric("gen_kl_error of the rejected tokens; absent if none is", "nats", "neither", "prime-rl"),
    **{
        f"{name}_kept": dataclasses.replace(metric, definition=f"{name} of the kept tokens")
        for name, metric in _MISMATCH_OF_RESPONSES.items()
        if name.endswith("seq_mult_prob_error")
    },
}

_CURRENT_POLICY = {
    "approx_entropy": Metric("-mean exp(c - g) c", "nats", "neither", "NeMo RL"),
    "probs_ratio": Metric("mean rho; 1 on the first update after a rollout", "ratio", "one", "NeMo RL"),
    "probs_ratio_min": Metric("min rho", "ratio", "one", "NeMo RL"),
    "probs_ratio_max": Metric("max rho", "ratio", "one", "NeMo RL"),
    "probs_ratio_clamped": Metric("mean rho, clipped as in the loss", "ratio", "one", "NeMo RL"),
    "probs_ratio_clamped_min": Metric("min rho, clipped as in the loss", "ratio", "one", "NeMo RL"),
    "probs_ratio_clamped_max": Metric("max rho, clipped as in the loss", "ratio", "one", "NeMo RL"),
}

_WEIGHTS = {
    "ess": Metric(
        "effective sample size (sum w)^2 / (n sum w^2) of the applied weights; 0 when all are rejected",
        "share", "higher", "verl", (0.3, 1.0),
    ),
    "ess_raw": Metric("effective sample size of the raw weights", "share", "higher", "verl"),
    "kept_share": Metric("sampled tokens that the correction keeps, before the update", "share", "higher", "labkit"),
    "is_oob_ratio": Metric(
        "tokens, or (where responses are judged) responses, truncated or rejected", "share", "lower", "NeMo RL"
    ),
    "clipped_weight_share": Metric("those of is_oob_ratio that are kept, so truncated", "share", "lower", "slime"),
    "above_cap_share": Metric("tokens whose weight was lowered to the cap", "share", "lower", "verl"),
    "below_floor_share": Metric("tokens whose weight was raised to the floor", "share", "lower", "verl"),
    "seq_above_cap_share": Metric("responses with a weight above the cap", "share", "lower", "verl"),
    "seq_below_floor_share": Metric("responses with a weight below the floor", "share", "lower", "verl"),
    "mean_raw": Metric("mean raw weight", "ratio", "one", "verl", (0.5, 2.0)),
    "std_raw": Metric("std of the raw weights", "ratio", "lower", "verl"),
    "min_raw": Metric("smallest raw weight", "ratio", "neither", "verl"),
    "max_raw": Metric("largest raw weight", "ratio", "neither", "verl"),
    "mean_applied": Metric("mean applied weight, rejected ones as 0", "ratio", "one", "verl", (0.5, 2.0)),
    "std_applied": Metric("std of the applied weights, rejected ones as 0", "ratio", "lower", "verl", (0.0, 1.0)),
    "min_applied": Metric("smallest applied weight, rejected ones as 0", "ratio", "neither", "verl"),
    "max_applied": Metric("largest applied weight", "ratio", "neither", "verl"),
    "seq_weight_mean": Metric("mean over responses of mean_t w, rejected ones as 0", "ratio", "one", "verl"),
    "seq_weight_std": Metric("std over responses of mean_t w", "ratio", "lower", "verl"),
    "seq_weight_min": Metric("smallest over responses of mean_t w", "ratio", "neither", "verl"),
    "seq_weight_max": Metric("largest over responses of mean_t w", "ratio", "neither", "verl"),
    "seq_weight_max_deviation": Metric("largest over responses of |mean_t w - 1|", "ratio", "lower", "verl"),
    "num_rejected_seqs": Metric("responses all of whose tokens are rejected", "responses", "lower", "NeMo RL"),
    "rejected_correct_share": Metric(
        "correct ones among the rejected responses; absent if none is", "share", "neither", "NeMo RL"
    ),
}  # fmt: skip

_LOSS = {
    "kept_in_update": Metric(
        "tokens of the update that the correction keeps, by the verdict in force", "share", "higher", "labkit"
    ),
    "loss": Metric(
        "policy_loss + kl_coef kl + anchor; about 0 on the first update, which is right", "1", "neither", "GRPO"
    ),
    "policy_loss": Metric("the objective times the correction's weights", "1", "neither", "PPO"),
    "kl": Metric("KL penalty to the reference, before kl_coef", "nats", "neither", "NeMo RL"),
    "clip_share": Metric("tokens where the objective's clip is in force", "share", "neither", "PPO"),
    "clip_share_positive": Metric("tokens clipped, with an advantage above 0", "share", "neither", "2609.22870"),
    "clip_share_negative": Metric("tokens clipped, with any other advantage", "share", "neither", "2609.22870"),
    "clip_low": Metric(
        "lower clip bound as calibrated: rho is clipped below 1 - clip_low", "1", "neither", "2609.22870"
    ),
    "clip_high": Metric("upper clip bound as calibrated: above 1 + clip_high", "1", "neither", "2609.22870"),
    "loss_nan_count": Metric(
        "trained tokens whose log-prob is NaN or infinite", "tokens", "lower", "labkit", (0.0, 0.0)
    ),
}

_ROUTERS = {
    "router_flip_rate": Metric(
        "pairs of token and layer whose experts differ between engine and trainer, as they were taken; 0 under r3",
        "share", "zero", "R3",
    ),
    "router_flip_rate_own": Metric(
        "the same for what the trainer's routers choose by themselves, whatever is replayed", "share", "zero", "R3"
    ),
    "router_flip_tokens": Metric("tokens with such a flip in at least one layer", "share", "zero", "R3"),
    "router_routes_missing": Metric(
        "pairs of token and layer for which the engine gave no route, so that there is none to replay",
        "share", "zero", "labkit", (0.0, 0.0),
    ),
    "expert_load_max": Metric(
        "tokens of a layer's busiest expert over the mean, mean over layers; 1 when even", "ratio", "one", "GShard"
    ),
}  # fmt: skip

METRICS: dict[str, Metric] = {
    **_POLICY,
    **_MISMATCH_OF_TOKENS,
    **_MISMATCH_OF_RESPONSES,
    **_AFTER_REJECTION,
    **_CURRENT_POLICY,
    **_WEIGHTS,
    **_LOSS,
    **_ROUTERS,
}

TOKENS: dict[str, Metric] = {
    "prompt": Metric("tokens of the prompts, each counted for every response", "tokens", "neither", "labkit"),
    "generated": Metric("tokens that the engine sampled", "tokens", "neither", "labkit"),
    "trained": Metric("prompt and response tokens that went through the update", "tokens", "neither", "labkit"),
    "padded": Metric("positions that the update computed, padding included", "tokens", "neither", "labkit"),
}

# Names with a filter's key (mean_ratio) or the number of a layer in them, as (before the key, after the key).
_FAMILIES: dict[tuple[str, str], Metric] = {
    ("rejected_", ""): Metric("tokens that the filter {} rejects", "share", "lower", "verl"),
    ("judged_", "_q05"): Metric(
        "5% quantile of {}, which a filter judges",
        "its own",
        "neither",
        "labkit",
    ),
    ("judged_", "_q95"): Metric("95% quantile of {}, which a filter judges", "its own", "neither", "labkit"),
    ("router_flip_rate_layer_", ""): Metric("router_flip_rate_own of layer {} alone", "share", "zero", "R3"),
}


def describe(name: str) -> Metric:
    """The description of a metric or a token count. Raises ValueError for a name that no record can hold."""
    if name in METRICS:
        return METRICS[name]
    if name in TOKENS:
        return TOKENS[name]
    for (before, after), metric in _FAMILIES.items():
        key = name.removeprefix(before).removesuffix(after)
        if key and name == f"{before}{key}{after}":
            return dataclasses.replace(metric, definition=metric.definition.format(key.replace("_", " ")))
    raise ValueError(f"no metric {name!r}; {did_you_mean(name, [*METRICS, *TOKENS])}")
