"""Alarms about what the correction throws away, with bounds that would have kept most of it."""

import math
from collections.abc import Callable

from labkit.config import Correction, Experiment
from labkit.config.correction import CUSTOM
from labkit.runs.alarms.evidence import Evidence, Finding, steps_of
from labkit.runs.record import StepRecord

ESS_LOW = 0.3  # verl
REJECTED = 0.5
MATCH_AT_ZERO = ("k1", "k2", "k3", "probability", "binary_kl")  # of the others a perfect match is 1


def ess_low(evidence: Evidence) -> Finding | None:
    """Where rejection is not the reason, which has its own alarms."""
    found = evidence.where(lambda r: 0 < r.metric("ess") < ESS_LOW and not r.metric("kept_share") < 1 - REJECTED)
    if not found:
        return None
    least = min(record.metric("ess") for record in found)
    return Finding(
        steps_of(found), "warning",
        f"effective sample size fell to {least:.2g} of the batch (sound from {ESS_LOW} on)",
        "a few tokens carry the whole update: the weights of most are far below those of the rest",
        "use a weight that does not grow with the length (token or geometric instead of sequence), lower its cap, or "
        "make the mismatch smaller",
    )  # fmt: skip


def mostly_rejected(evidence: Evidence) -> Finding | None:
    found = evidence.mostly(lambda r: 0 < r.metric("kept_share") < 1 - REJECTED)
    if not found:
        return None
    least = min(record.metric("kept_share") for record in found)
    return Finding(
        steps_of(found), "warning",
        f"the correction rejects up to {1 - least:.0%} of the sampled tokens",
        "its bounds are tighter than the mismatch at hand: most of the rollout work is thrown away",
        _advice(found[-1], evidence.experiment),
    )  # fmt: skip


def batch_rejected(evidence: Evidence) -> Finding | None:
    found = evidence.where(lambda r: r.metric("kept_share") == 0 and r.metric("num_tokens") > 0)
    if not found:
        return None
    times = "once" if len(found) == 1 else f"in {len(found)} steps"
    return Finding(
        steps_of(found), "critical",
        f"batch fully rejected {times}: no token was left, nothing was learned",
        "the bounds of the correction leave out every response (a window of geometric means is easily too tight)",
        _advice(found[-1], evidence.experiment),
    )  # fmt: skip


def _advice(record: StepRecord, experiment: Experiment | None) -> str:
    """What to set, for the filter that rejected most."""
    shares = {
        name.removeprefix("rejected_"): record.metric(name)
        for name in record.metrics
        if name.startswith("rejected_") and f"judged_{name.removeprefix('rejected_')}_q05" in record.metrics
    }
    if not shares:
        return "widen the bounds of recipe.correction"
    key = max(shares, key=lambda key: (shares[key], key))
    low, high = (record.metric(f"judged_{key}_{quantile}") for quantile in ("q05", "q95"))
    match = 0.0 if key.endswith(MATCH_AT_ZERO) else 1.0
    bounds = {
        "low": _outward(low, -1, math.floor) if low < match else match,
        "high": _outward(high, 1, math.ceil) if high > match else match,
    }
    paths = {side: f"recipe.correction.{side}" for side in bounds}
    if experiment and key in [each.key for each in experiment.recipe.correction.filters]:
        paths = _paths(experiment.recipe.correction, key)
    settings = " and ".join(f"{path} to {bounds[side]:g}" for side, path in paths.items())
    seen = f"{key.replace('_', ' ')} was {low:.4g} to {high:.4g} in nine tenths of what it judged"
    return f"{seen}: set {settings}, or choose a correction that truncates instead"


def _paths(correction: Correction, key: str) -> dict[str, str]:
    """Where the bounds that the filter has are set: {"low": "recipe.correction.low"}."""
    place, judge = next((place, each) for place, each in enumerate(correction.filters) if each.key == key)
    short = place == 0 and correction.name != CUSTOM
    return {
        side: f"recipe.correction.{side if short else f'filters.{place}.{side}'}"
        for side in ("low", "high")
        if getattr(judge, side) is not None
    }


def _outward(value: float, side: int, rounding: Callable[[float], int]) -> float:
    """To four significant digits, past what was seen by more than FP32 rounds, so that it stays inside."""
    if value == 0 or not math.isfinite(value):
        return value
    digits = 10.0 ** (3 - math.floor(math.log10(abs(value))))
    return rounding((value + side * 1e-6 * abs(value)) * digits) / digits
