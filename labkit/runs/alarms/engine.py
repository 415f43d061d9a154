"""Alarms about what the engine holds and returns."""

import math

from labkit.runs.alarms.evidence import Evidence, Finding, Severity, component_is_fp8, steps_of
from labkit.runs.record import StepRecord

SATURATED = 1e-3  # a calibrated scale clips nothing that calibration saw; one element in a thousand is no rounding
SATURATED_BADLY = 0.05
CODES_FROZEN = 1e-3  # QuRL; on the tiny policy an lr of 1e-6 changes 6e-4 of them a step, its own of 1.5e-4 5e-2


def nan_tokens(evidence: Evidence) -> Finding | None:
    found = evidence.where(lambda r: r.metric("nan_count") > 0 or r.metric("loss_nan_count") > 0)
    if not found:
        return None
    names = [name for name in ("nan_count", "loss_nan_count") if any(r.metric(name) > 0 for r in found)]
    most = max(value for name in names for _, value in evidence.measured(name))
    return Finding(
        steps_of(found), "critical",
        f"up to {most:.0f} sampled tokens of a step have a NaN or infinite log-prob ({', '.join(names)})",
        "the engine returned none for them, or a sum overflowed, or a block of zeros was divided by its amax",
        "they are left out of every mean and of the loss. Find the layer: widen recipe.keep_bf16.first_layers and "
        "last_layers until they are gone",
    )  # fmt: skip


def kv_saturation(evidence: Evidence) -> Finding | None:
    names = ("kv_saturation_k", "kv_saturation_v")

    def clips(record: StepRecord) -> bool:
        """The first scales, at the start and after a switch, have seen prompts only: answers may clip a little."""
        first = record.engine.get("scale_version", 1) == 0 or record is evidence.trained[0]
        limit = SATURATED_BADLY if first else SATURATED
        return any(record.metric(name) > limit for name in names)

    found = evidence.where(clips)
    if not found:
        return None
    worst, name = max((r.metric(name), name) for r in found for name in names if not math.isnan(r.metric(name)))
    severity: Severity = "critical" if worst > SATURATED_BADLY else "warning"
    return Finding(
        steps_of(found), severity,
        f"{worst:.2%} of the cached {'keys' if name.endswith('k') else 'values'} are clipped by their FP8 scale",
        "the scale is too small for what is cached: never calibrated (1.0), lost in the refit, or older than the "
        "weights; models without QK-norm have keys far beyond 448 (Qwen2.5: output \"????\")",
        "set recipe.recalibration.policy to every-step and its margin to 1.05 or more; compare kv_scales in the record "
        "with 1.0",
    )  # fmt: skip


def not_active(evidence: Evidence) -> Finding | None:
    if evidence.experiment is None:
        return None
    recipe = evidence.experiment.recipe
    wanted = {
        **{f"rollout.{part}": on for part, on in recipe.rollout},
        **{f"train.{gemm}": on for gemm, on in recipe.train},
    }
    asked = [component for component, on in wanted.items() if on is True]

    def missing(record: StepRecord) -> list[str]:
        return [name for name in asked if name in record.active and not component_is_fp8(record, name)]

    found = evidence.where(lambda r: bool(missing(r)))
    if not found:
        return None
    return Finding(
        steps_of(found), "critical",
        f"asked for in FP8 and running in BF16: {', '.join(missing(found[-1]))} ({len(found)} steps)",
        "whatever installs FP8 met no layer (a renamed module, a patch of a class that is no longer used)",
        "look at the record's `active`; nothing measured in this run says anything about FP8",
    )  # fmt: skip


def scales_default(evidence: Evidence) -> Finding | None:
    if evidence.experiment is None or evidence.experiment.recipe.recalibration.policy == "unit":
        return None
    found = evidence.where(lambda r: {*(r.kv_scales or {}).get("k", ()), *(r.kv_scales or {}).get("v", ())} == {1.0})
    if not found:
        return None
    return Finding(
        steps_of(found), "critical",
        f"every K and V scale in the engine is exactly 1.0 in {len(found)} steps, though they are to be calibrated",
        "calibrated scales get lost on their way and the engine falls back to its default without a word (NeMo "
        "RL#3225); models with QK-norm hide it, others answer \"????\"",
        "send scales with every refit, read them back and compare; a run without a fault on purpose does",
    )  # fmt: skip


def stale_scales(evidence: Evidence) -> Finding | None:
    allowed = _allowed_age(evidence)
    ages = {
        r.step: r.engine.get("weight_version", 0) - r.engine.get("scale_version", 0)
        for r in evidence.trained
        if component_is_fp8(r, "rollout.kv_cache")
    }
    steps = [step for step, age in ages.items() if age > allowed]
    if not steps:
        return None
    return Finding(
        steps, "warning",
        f"Q/K/V scales were up to {max(ages.values())} steps older than the weights they serve",
        "the refit delivered new weights without the scales that belong to them",
        "set recipe.recalibration.policy to every-step, and send scales with every refit",
    )  # fmt: skip


def _allowed_age(evidence: Evidence) -> float:
    """How old the policy lets scales become; unit and first-step are meant to stay."""
    if evidence.experiment is None:
        return 0
    recalibration = evidence.experiment.recipe.recalibration
    return {"unit": math.inf, "first-step": math.inf, "every-k-steps": recalibration.every - 1}.get(
        recalibration.policy, 0
    )


def stale_weights(evidence: Evidence) -> Finding | None:
    if evidence.experiment is None:
        return None
    meant = evidence.experiment.grpo.staleness
    found = evidence.where(lambda r: r.metric("staleness") > meant)
    if not found:
        return None
    oldest = max(record.metric("staleness") for record in found)
    return Finding(
        steps_of(found), "critical",
        f"rollouts came from weights {oldest:.0f} steps old, where {meant} are meant",
        "a refit did not reach the engine",
        "look at the engine's weight_version in the record; restart from a checkpoint, which refits",
    )  # fmt: skip


def codes_frozen(evidence: Evidence) -> Finding | None:
    if evidence.experiment is not None and evidence.experiment.lora.rank:  # a frozen base is meant to stay
        return None
    learning = {r.step for r in evidence.where(lambda r: r.metric("lr") > 0 and r.metric("grad_norm") > 0)}
    values = [(step, value) for step, value in evidence.median("codes_changed") if step in learning]
    steps = [step for step, value in values if value < CODES_FROZEN]
    if not steps:
        return None
    return Finding(
        steps, "warning",
        f"a refit changes {min(value for _, value in values):.1e} of the FP8 weight codes: its policy hardly moves",
        "updates smaller than half an FP8 step are rounded away (update masking); the trainer moves, the sampler does "
        "not",
        "raise grpo.lr, or turn recipe.rollout.linears off; finer scaling does not help, the step is relative",
    )  # fmt: skip
