"""Held-out accuracy beside what the run's own engine makes of the same weights."""

from labkit.config import Experiment, preset
from labkit.rl.loop import Loop
from labkit.runs.record import StepRecord

SMALL = {
    **{"steps": 2, "eval_every": 1, "eval_prompts": 24, "keep_rollouts": 0, "sampling.max_new_tokens": 16},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 2},
}


def records(name: str, **changes: object) -> list[StepRecord]:
    experiment: Experiment = preset(name).override({**SMALL, **changes})
    return list(Loop(experiment).steps())


def both(name: str) -> list[tuple[float, float]]:
    found = records(name, eval_engine=True)
    return [(each.metric("heldout_accuracy"), each.metric("heldout_accuracy_engine")) for each in found]


def test_without_fp8_both_are_the_same_and_with_clipping_scales_the_engine_is_worse() -> None:
    assert all(policy == engine for policy, engine in both("bf16"))
    clipped = records("fp8-rollout-kv", eval_engine=True, **{"recipe.recalibration.margin": 0.05})[0]
    assert clipped.metric("heldout_accuracy_engine") < clipped.metric("heldout_accuracy")


def test_measuring_it_leaves_the_run_as_it_is() -> None:
    """Also where the engine measures its scales itself, on the first forward after a refit."""
    changes = {"recipe.recalibration.policy": "engine"}
    plain, measured = (records("fp8-rollout-kv", eval_engine=on, **changes) for on in (False, True))
    for before, after in zip(plain, measured, strict=True):
        rest = {key: value for key, value in after.metrics.items() if key != "heldout_accuracy_engine"}
        assert "heldout_accuracy_engine" not in before.metrics
        assert str(rest) == str(before.metrics)
        assert before.kv_scales == after.kv_scales
