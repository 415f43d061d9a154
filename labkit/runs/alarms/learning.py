"""Alarms about what is learned, and whether anything is."""

import math

from labkit.runs.alarms.evidence import WINDOW, Evidence, Finding, above, mean, steps_of
from labkit.runs.record import StepRecord

TRUNCATED = 0.2  # NeMo RL#2725: accuracy near 0 while training looked normal
ENTROPY_COLLAPSE, ENTROPY_SURGE = 0.05, 3.0  # times that of the first steps; QuRL, QaRL and 2609.22870 show both
ENTROPY_STEPS = 3 + WINDOW
SOLVED = 0.9  # a policy that is nearly always right may be sure of itself
ACCURACY_GAP = 0.1
ACCURACY_RISE = 0.02
EVAL_PROMPTS = 256  # where the Experiment isn't known


def truncated(evidence: Evidence) -> Finding | None:
    values = evidence.median("truncated_share")
    steps = above(values, TRUNCATED)
    if not steps:
        return None
    return Finding(
        steps, "warning",
        f"up to {max(value for _, value in values):.0%} of the answers are cut off before they end",
        "they count as wrong whatever they would have said, so the policy learns to be short, or nothing",
        "raise sampling.max_new_tokens; if answers grow without end, look at the entropy",
    )  # fmt: skip


def no_advantage(evidence: Evidence) -> Finding | None:
    found = evidence.mostly(lambda r: r.metric("zero_advantage_share") == 1)
    if not found:
        return None
    accuracy = mean([record.metric("accuracy") for record in found])
    return Finding(
        steps_of(found), "warning",
        f"no group has an advantage in {len(found)} steps (accuracy {accuracy:.2f}): nothing can be learned from them",
        "all answers to a prompt have the same reward: the task is too hard, too easy, or its rewards are broken",
        "raise grpo.group_size or grpo.prompts_per_step, or choose an easier or harder task",
    )  # fmt: skip


def update_skipped(evidence: Evidence) -> Finding | None:
    """Those that no other rule explains."""

    def reasons(record: StepRecord) -> list[str]:
        skipped = [event for event in record.events if event.startswith("update skipped")]
        return [event for event in skipped if "rejected" not in event and "carries a gradient" not in event]

    found = evidence.where(lambda r: bool(reasons(r)))
    if not found:
        return None
    return Finding(
        steps_of(found), "critical",
        f"{sum(len(reasons(r)) for r in found)} updates skipped; {reasons(found[0])[0].partition(': ')[2]}",
        "an FP8 gradient overflowed or a log-prob is not a number",
        "turn recipe.train.dgrad and wgrad off one after the other, or set recipe.scaling.grad_format to e5m2; lower "
        "grpo.lr",
    )  # fmt: skip


def entropy_collapse(evidence: Evidence) -> Finding | None:
    start, medians = _entropy(evidence)
    accuracy = dict(evidence.median("accuracy"))
    values = [(step, value) for step, value in medians if not accuracy.get(step, 0) > SOLVED]
    steps = [step for step, value in values if value < ENTROPY_COLLAPSE * start]
    if not steps:
        return None
    return Finding(
        steps, "warning",
        f"entropy fell from {start:.2g} to {min(value for _, value in values):.2g} nats without the task being solved",
        "the policy repeats a few answers and no longer explores; groups of equal answers have no advantage",
        "lower grpo.lr, raise grpo.clip_high, or set grpo.kl_coef",
    )  # fmt: skip


def entropy_surge(evidence: Evidence) -> Finding | None:
    start, medians = _entropy(evidence)
    steps = above(medians, ENTROPY_SURGE * start)
    if not steps:
        return None
    return Finding(
        steps, "warning",
        f"entropy rose from {start:.2g} to {max(value for _, value in medians):.2g} nats",
        "the policy falls apart: garbled tokens become likely, as when noise in the ratio clips good updates or the "
        "sampler's errors are learned",
        "lower grpo.lr or grpo.minibatches; compare clip_share_negative with clip_share_positive; set "
        "recipe.correction to calibrated-clip or icepop",
    )  # fmt: skip


def _entropy(evidence: Evidence) -> tuple[float, list[tuple[int, float]]]:
    """That of the first three steps, and the medians once there are WINDOW more."""
    values = evidence.measured("entropy")
    start = mean([value for _, value in values[:3]])
    return start, evidence.median("entropy")[ENTROPY_STEPS - 1 :]


def accuracy_fell(evidence: Evidence) -> Finding | None:
    heldout = [(record.step, record.metric("heldout_accuracy")) for record in evidence.evaluated]
    if len(heldout) < 2:
        return None
    prompts = evidence.experiment.eval_prompts if evidence.experiment else EVAL_PROMPTS
    noise = 3 * math.sqrt(0.5 / prompts)
    best_step, best = max(heldout, key=lambda pair: pair[1])
    steps = [step for step, value in heldout if step > best_step and best - value > max(ACCURACY_GAP, noise)]
    if not steps:
        return None
    worst = min(value for step, value in heldout if step in steps)
    return Finding(
        steps, "critical",
        f"held-out accuracy fell from {best:.2f} in step {best_step} to {worst:.2f}",
        "updates that go too far: a large grpo.lr, several grpo.minibatches or stale rollouts without a ratio that is "
        "clipped or a correction that weighs them, or a sampler that is another policy",
        "lower grpo.lr, grpo.minibatches or grpo.staleness; set recipe.correction to tis or bypass; fork from a "
        "checkpoint before the fall",
    )  # fmt: skip


def sampler_fitted(evidence: Evidence) -> Finding | None:
    if len(evidence.evaluated) < 2:
        return None
    last = evidence.evaluated[-1].step  # rollouts after it are of a policy that learned more
    rollout = [value for step, value in evidence.measured("accuracy") if step <= last]
    if len(rollout) < 2:
        return None
    heldout = [record.metric("heldout_accuracy") for record in evidence.evaluated]
    window = min(WINDOW, len(rollout) // 2)
    before, now = mean(rollout[:window]), mean(rollout[-window:])
    prompts = evidence.experiment.eval_prompts if evidence.experiment else EVAL_PROMPTS
    answers = max(1.0, window * evidence.trained[-1].metric("num_valid_samples"))
    noise = 3 * math.sqrt(0.25 / prompts + 0.25 / answers)
    if now - heldout[-1] <= max(ACCURACY_GAP, noise) or now <= before + ACCURACY_RISE:
        return None
    return Finding(
        [evidence.evaluated[-1].step], "critical" if heldout[-1] < heldout[0] - noise else "warning",
        f"rollout accuracy rose to {now:.2f} while held-out accuracy, sampled in BF16, is {heldout[-1]:.2f} (at the "
        f"start {heldout[0]:.2f})",
        "the policy fits the sampler's errors, or the rollouts are sampled otherwise than the policy is meant to be, "
        "or the prompts repeat",
        "trust the held-out accuracy; look at the sampler first (mean r, surprisal_gap, kv_saturation_k), then set "
        "recipe.correction",
    )  # fmt: skip
