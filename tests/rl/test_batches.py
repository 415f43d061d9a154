"""Batches begun ahead, on a local engine that does its sampling when it is told to begin."""

from collections.abc import Sequence

import pytest
import torch

from labkit.config import Experiment, preset
from labkit.models.rollouts import Rollouts
from labkit.rl.loop import Loop
from labkit.rollout import LocalEngine, Request
from labkit.runs.record import StepRecord

SMALL = {
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "grpo.staleness": 1,
    "grpo.lr": 1e-3,
    "eval_prompts": 8,
    "keep_rollouts": 2,
    "sampling.max_new_tokens": 12,
}


class Sampled:
    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    def result(self) -> tuple[Rollouts, float]:
        return self.rollouts, 1.0

    def drop(self) -> None: ...


class EagerEngine(LocalEngine):
    def begin(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> Sampled:
        return Sampled(self.generate(prompts, request, generator))


def eager(policy, experiment: Experiment, on_microstep) -> EagerEngine:
    return EagerEngine(policy.config, experiment.recipe, policy.tokenizer.pad_id, on_microstep)


def experiment(overlap: bool, **changes) -> Experiment:
    placement = {"cluster.placement": "separate", "cluster.overlap": True} if overlap else {}
    return preset("fp8-e2e-kv", steps=6, eval_every=6, **{**SMALL, **placement, **changes})


def comparable(records: list[StepRecord]) -> list[dict]:
    left_out = {"time", "elapsed", "timings", "metrics", "samples"}
    return [
        {key: value for key, value in vars(record).items() if key not in left_out}
        | {"metrics": {key: value for key, value in record.metrics.items() if key != "generation_hidden"}}
        | {"samples": list(record.samples)}
        for record in records
    ]


@pytest.mark.parametrize("staleness", [1, 2])
def test_batches_begun_ahead_are_those_of_one_after_the_other(staleness: int) -> None:
    changes = {"grpo.staleness": staleness}
    overlapped = list(Loop(experiment(True, **changes), build_engine=eager).steps())
    plain = list(Loop(experiment(False, **changes)).steps())
    assert comparable(overlapped) == comparable(plain)
    assert ["generation_hidden" in record.metrics for record in overlapped] == [False] * 2 + [True] * 5
    assert len({record.metrics["reward"] for record in plain[1:]}) > 1, "every batch is alike, so nothing is tested"


def test_a_checkpoint_is_that_of_a_loop_which_began_nothing() -> None:
    overlapped, plain = Loop(experiment(True), build_engine=eager), Loop(experiment(False))
    for _, _ in zip(range(4), zip(overlapped.steps(), plain.steps(), strict=True), strict=False):
        state, other = overlapped.state_dict(), plain.state_dict()
        assert state["prompt_rng"] == other["prompt_rng"]
        assert torch.equal(state["sample_rng"], other["sample_rng"])
    resumed = Loop(experiment(True), build_engine=eager)
    resumed.load_state_dict(overlapped.state_dict())
    assert comparable(list(resumed.steps())) == comparable(list(plain.steps()))


def test_a_switch_drops_the_batch_that_was_sampled_under_the_recipe_before() -> None:
    def switched(loop: Loop) -> list[StepRecord]:
        records = []
        for record in loop.steps():
            records.append(record)
            if record.step == 3:
                loop.switch(preset("fp8-rollout-kv").recipe.override({"recalibration.margin": 1.5}))
        return records

    overlapped = switched(Loop(experiment(True), build_engine=eager))
    assert comparable(overlapped) == comparable(switched(Loop(experiment(False))))
    assert ["generation_hidden" in record.metrics for record in overlapped[3:]] == [True, False, True, True]
