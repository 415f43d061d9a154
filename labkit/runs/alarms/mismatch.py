"""Alarms about two sides that disagree, or that agree where they can't."""

import math

from labkit.config import Experiment
from labkit.runs.alarms.evidence import WINDOW, Evidence, Finding, above, component_is_fp8, mean, steps_of
from labkit.runs.record import StepRecord

TMPE_HIGH = 1.05  # NVIDIA: acceptable up to 1.03-1.05
TMPE_BROKEN = 2.0  # NeMo RL's loosest nightly gate, for FP8 KV caches
TMPE_EXPLAINS = 1.2
TMPE_SPIKE = 5.0  # of one step: a token some e^7 times as probable on one side (2,000 tokens)
TMPE_GROWTH = 3.0  # of TMPE - 1 from the first to the last third; in a sound run it follows the entropy down
TMPE_FLOOR = 1e-4  # growth from less than this is growth of roundings
TREND_STEPS = 12
DIFFERING = 0.05  # of the tokens; a batch of a few rows can round one of a hundred otherwise
RATIO_OFF = 0.02  # TRL#6789: mean r .895 under a top-p that only the sampler knew
RATIO_ERRORS = 3.0
SURPRISAL_OFF = 0.1  # of the entropy; T = 0.6 for 1 gives 0.45 on the tiny policy, sound runs stay below 0.05
SURPRISAL_ERRORS = 4.0
RATIO_NOT_ONE = 1e-3  # NeMo RL: not 1 on the first update means batch-variant kernels


def mismatch_level(evidence: Evidence) -> Finding | None:
    medians = evidence.median("token_mult_prob_error")
    steps = above(medians, TMPE_HIGH)
    if not steps:
        return None
    worst = max(value for _, value in medians)
    unlike, cure = _unlike(evidence)
    peak_step, peak = max(evidence.measured("token_mult_prob_error"), key=lambda pair: pair[1])
    alone = f", {peak:.4g} in step {peak_step} alone" if peak > TMPE_SPIKE * worst else ""
    return Finding(
        steps, "critical" if worst > TMPE_BROKEN else "warning",
        f"TMPE reached {worst:.4g} (median of {WINDOW} steps){alone}; up to {TMPE_HIGH} is sound",
        unlike or "both sides compute in the same precision, so the engine holds other weights, scales or cached "
                  "keys than the trainer, or other kernels",
        cure,
    )  # fmt: skip


def mismatch_spike(evidence: Evidence) -> Finding | None:
    """Single steps that the median passes over."""
    if mismatch_level(evidence):
        return None
    found = evidence.where(lambda r: r.metric("token_mult_prob_error") > TMPE_SPIKE)
    if not found:
        return None
    worst = max(found, key=lambda record: record.metric("token_mult_prob_error"))
    apart = worst.metric("max_abs_diff")
    token = "" if math.isnan(apart) else f"; its worst token is e^{apart:.1f} times as probable on one side"
    return Finding(
        steps_of(found), "warning",
        f"TMPE of {worst.metric('token_mult_prob_error'):.4g} in step {worst.step}{token}",
        "a few tokens on which the sides disagree by far; the mean is theirs, the median of the steps may look sound",
        "look at the rollouts of that step (samples); bound their weight: set recipe.correction to tis or icepop",
    )  # fmt: skip


def not_exact(evidence: Evidence) -> Finding | None:
    """The sharpest rule: sides that share recipe and kernels have no mismatch at all, so none is small enough."""
    if evidence.experiment is None or not _sides_are_alike(evidence.experiment):
        return None
    found = evidence.mostly(lambda r: r.metric("tokens_differing") > DIFFERING)  # once is a small batch's rounding
    if not found:
        return None
    share = max(record.metric("tokens_differing") for record in found)
    return Finding(
        steps_of(found), "warning",
        f"g and p differ on up to {share:.0%} of the tokens where recipe and kernels leave no difference",
        "the engine does not hold what the trainer sent (a layer, a scale, a whole refit), answers from keys and "
        "values of older weights, or multiplies with kernels whose result depends on the rest of the batch (AMX)",
        "restart from a checkpoint, which refits everything: if that ends it, look at the refit; if not, set "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
    )  # fmt: skip


def _sides_are_alike(experiment: Experiment) -> bool:
    recipe = experiment.recipe
    fp8 = recipe.rollout.linears
    batch_decides = fp8 and recipe.scaling.granularity == "tensor"
    same = fp8 == recipe.train.fprop and not recipe.rollout.kv_cache and not batch_decides
    return same and experiment.same_kernels and experiment.grpo.staleness == 0


def mismatch_trend(evidence: Evidence) -> Finding | None:
    values = evidence.median("token_mult_prob_error")
    if len(values) < TREND_STEPS:
        return None
    third = len(values) // 3
    first, last = (mean([value - 1 for _, value in part]) for part in (values[:third], values[-third:]))
    if last <= TMPE_GROWTH * max(first, TMPE_FLOOR):
        return None
    _, cure = _unlike(evidence)
    cached = evidence.is_fp8("rollout.kv_cache")
    return Finding(
        [step for step, _ in values[-third:]], "warning",
        f"TMPE − 1 grew from {first:.2g} to {last:.2g}, first to last third of the run",
        "something gets older or larger from step to step: scales that are not recalibrated, weights or cached keys "
        "that do not arrive, a policy that the updates push away from what FP8 holds",
        f"{'set recipe.recalibration.policy to every-step; ' if cached else ''}lower grpo.lr; {cure}",
    )  # fmt: skip


def _unlike(evidence: Evidence) -> tuple[str, str]:
    """(in which parts the sides differ, how to make them alike)."""
    rollout_only = evidence.is_fp8("rollout.linears") and not evidence.is_fp8("train.fprop")
    cached = evidence.is_fp8("rollout.kv_cache")
    stale = any(value > 0 for _, value in evidence.measured("staleness"))
    causes, cures = [], []
    if evidence.experiment is not None and evidence.experiment.engine == "vllm":
        causes.append("vLLM adds up and rounds otherwise than the trainer, in BF16 too")
    if rollout_only:
        causes.append("the rollout's linears are FP8 and the trainer's are not")
        cures.append("turn recipe.train.fprop on, so that both sides round alike")
    if cached:
        causes.append("keys and values are FP8 in the rollout alone")
        cures.append("look at kv_saturation_k and _v, or turn recipe.rollout.kv_cache off")
    if stale:
        causes.append("the rollouts come from older weights")
        cures.append("lower grpo.staleness")
    cures.append(
        "set recipe.correction to tis or icepop"
        if causes
        else "restart from a checkpoint: if that ends it, a refit was at fault; else set trainer_attention to math"
    )
    return " and ".join(causes), "; ".join(cures)


def sampler_ratio(evidence: Evidence) -> Finding | None:
    def off(record: StepRecord) -> bool:
        error = record.metric("sampling_ratio_se")
        return abs(record.metric("sampling_importance_ratio") - 1) > max(RATIO_OFF, RATIO_ERRORS * error)

    found = evidence.mostly(off)
    if not found:
        return None
    ratio = mean([record.metric("sampling_importance_ratio") for record in found])
    return Finding(
        steps_of(found), "critical",
        f"mean r = exp(p − g) is {ratio:.4g}, more than {RATIO_OFF:.0%} and {RATIO_ERRORS:g} standard errors off 1",
        "the sides give log-probs of different distributions: temperature, top-p or top-k is applied on one side only "
        "(tokens of a nucleus of mass m that only the sampler renormalises have r = m); no precision does that",
        "set sampling.temperature and sampling.top_p to 1 and sampling.top_k to 0 to see which of them it is; then "
        "let the engine report the log-probs it samples from and the trainer process its logits alike",
    )  # fmt: skip


def sampler_surprisal(evidence: Evidence) -> Finding | None:
    """Pooled over WINDOW steps: the gap of a single one is within its noise. Noise in the engine's logits makes tokens
    less probable to the trainer, never more, so a large mismatch explains a gap above 0, which is then no news. Older
    weights are another distribution: stale rollouts are left out."""
    measured = [
        r for r in evidence.trained if not math.isnan(r.metric("surprisal_gap")) and not r.metric("staleness") > 0
    ]
    steps, worst = [], 0.0
    for i, record in enumerate(measured):
        window = measured[max(0, i + 1 - WINDOW) : i + 1]
        gap, entropy = (mean([r.metric(name) for r in window]) for name in ("surprisal_gap", "entropy"))
        error = math.sqrt(sum(r.metric("surprisal_gap_se") ** 2 for r in window)) / len(window)
        explained = gap > 0 and record.metric("token_mult_prob_error") > TMPE_EXPLAINS
        if abs(gap) > max(SURPRISAL_OFF * entropy, SURPRISAL_ERRORS * error) and not explained:
            steps.append(record.step)
            worst = max(worst, gap / entropy, key=abs)
    if not steps:
        return None
    side = "more probable" if worst < 0 else "less probable"
    return Finding(
        steps, "critical",
        f"sampled tokens are {side} to the trainer than its own samples would be: surprisal is {abs(worst):.0%} "
        f"{'below' if worst < 0 else 'above'} the entropy",
        "the tokens were not drawn from the distribution that the log-probs describe, even where g and p agree: "
        "another temperature, top-p or top-k in the sampler",
        "make the sampler use sampling.temperature, top_p and top_k, and check that nothing between sampling and "
        "reporting replaces them",
    )  # fmt: skip


def blind_correction(evidence: Evidence) -> Finding | None:
    def unlike(record: StepRecord) -> bool:
        linears = component_is_fp8(record, "rollout.linears") != component_is_fp8(record, "train.fprop")
        stale = record.metric("staleness") > 0
        return linears or stale or any(component_is_fp8(record, f"rollout.{p}") for p in ("kv_cache", "attention"))

    found = evidence.mostly(lambda r: r.metric("tokens_differing") == 0 and unlike(r))
    if not found:
        return None
    return Finding(
        steps_of(found), "critical",
        "mismatch is exactly 0 although the rollout has another precision, or older weights, than the trainer",
        "the log-probs in the rollouts are the trainer's, not the engine's, so that every mismatch metric and every "
        "correction is blind (verl#4070); or the engine does not compute in FP8 at all",
        "record the engine's own log-probs while it samples, and read back the weights it multiplies with",
    )  # fmt: skip


def ratio_off_one(evidence: Evidence) -> Finding | None:
    experiment = evidence.experiment
    if experiment is None or experiment.grpo.minibatches > 1 or experiment.recipe.correction.old_policy != "trainer":
        return None

    def deviation(low: float, high: float) -> float:
        return max(abs(low - 1), abs(high - 1))

    off = {r.step: deviation(r.metric("probs_ratio_min"), r.metric("probs_ratio_max")) for r in evidence.trained}
    steps = [step for step, value in off.items() if value > RATIO_NOT_ONE]
    if not steps:
        return None
    return Finding(
        steps, "warning",
        f"exp(c − p) is off 1 by up to {max(off[step] for step in steps):.2g} in the first update after a rollout",
        "the trainer scores with other kernels than it updates with, so that PPO's ratio starts off 1 and clips noise",
        "score and update in the same micro-batches (grpo.micro_batch) and with deterministic kernels, or set "
        "recipe.correction.old_policy to current",
    )  # fmt: skip
