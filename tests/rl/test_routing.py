"""Replay and flip metrics, on tables written by hand and in the loop."""

import pytest
import torch

from labkit.config import Recipe, preset
from labkit.models.moe import MoEConfig
from labkit.models.rollouts import Rollouts
from labkit.rl.loop import Loop
from labkit.rl.routing import for_scoring, for_update, router_metrics
from labkit.runs.metrics import describe
from labkit.runs.record import StepRecord

MOE = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=128, layers=(1, 3))
OWN = torch.tensor([[[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 2], [2, 3]], [[-1, -1], [-1, -1]]]])  # [1, 4, 2, 2]
SMALL = {"grpo.prompts_per_step": 4, "grpo.group_size": 4, "eval_prompts": 4, "sampling.max_new_tokens": 24}


def rollouts(routes: torch.Tensor | None, replay: torch.Tensor | None = None) -> Rollouts:
    tokens, one = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    return Rollouts(tokens, one * 0, 2 * one, torch.zeros(1, 2), one.bool(), 2, 0, 0, routes, replay)


def test_flips_are_sets_that_differ_of_pairs_that_both_sides_computed() -> None:
    engine = OWN.clone()
    engine[0, 1, 1] = torch.tensor([1, 3])  # one flip in layer 3
    engine[0, 2] = torch.tensor([[0, 3], [0, 3]])  # one in each layer
    engine[0, 3] = 1  # where the trainer computed nothing
    found = router_metrics(rollouts(engine), OWN, MOE)
    assert found == {
        "expert_load_max": pytest.approx((3 / 1.5 + 2 / 1.5) / 2),
        "router_flip_rate": pytest.approx(3 / 6),
        "router_flip_rate_own": pytest.approx(3 / 6),
        "router_flip_tokens": pytest.approx(2 / 3),
        "router_routes_missing": 0.0,
        "router_flip_rate_layer_1": pytest.approx(1 / 3),
        "router_flip_rate_layer_3": pytest.approx(2 / 3),
    }
    for name in found:
        describe(name)


def test_under_r3_nothing_flips_but_what_the_engine_left_open() -> None:
    engine = (OWN + 1) % 4
    engine[0, 3] = -1
    engine[0, 0, 1] = -1
    found = router_metrics(rollouts(engine, replay=engine), OWN, MOE)
    assert found["router_flip_rate"] == 0.0
    assert found["router_routes_missing"] == pytest.approx(1 / 6)
    assert found["router_flip_rate_own"] == 1.0
    assert found["router_flip_tokens"] == 1.0


def test_what_is_replayed_when() -> None:
    engine, own = OWN, OWN + 1
    for replay, scored, updated in (("off", None, None), ("r2", None, own), ("r3", engine, engine)):
        recipe = Recipe(router={"replay": replay})
        scoring = for_scoring(rollouts(engine), recipe)
        assert scoring.replay_BTLK is scored
        assert for_update(scoring, recipe, own).replay_BTLK is updated


def test_a_dense_model_has_no_such_metrics() -> None:
    assert router_metrics(rollouts(None), None, None) == {}


# ---- in the loop


def run(recipe: str, steps: int = 2, **changes) -> list[StepRecord]:
    loop = Loop(preset(recipe, "tiny-moe", steps=steps, eval_every=steps, **{**SMALL, **changes}))
    return list(loop.steps())[1:]


@pytest.mark.parametrize("changes", [{}, {"recipe.router.dtype": "fp32"}], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-e2e"])
def test_the_same_recipe_on_both_sides_has_no_mismatch_and_no_flips(recipe: str, changes: dict) -> None:
    for record in run(recipe, **changes):
        assert record.metrics["token_mult_prob_error"] == 1.0
        assert record.metrics["tokens_differing"] == 0.0
        assert record.metrics["router_flip_rate_own"] == 0.0
        assert record.metrics["router_routes_missing"] == 0.0


def test_fp8_rollouts_flip_routes_which_r3_replays_in_scoring_and_update() -> None:
    own, replayed = run("fp8-rollout", 1)[0].metrics, run("fp8-rollout", 1, **{"recipe.router.replay": "r3"})[0].metrics
    assert own["router_flip_rate"] == own["router_flip_rate_own"] > 0
    assert own["router_flip_tokens"] > own["router_flip_rate"]
    assert replayed["router_flip_rate"] == 0.0
    assert replayed["router_flip_rate_own"] > 0
    assert replayed["gen_kl_error"] != own["gen_kl_error"], "the same rollouts, other experts"
    assert replayed["probs_ratio"] == 1.0, "c is computed over the same experts as p"
    layers = {name for name in own if name.startswith("router_flip_rate_layer")}
    assert layers == {f"router_flip_rate_layer_{layer}" for layer in (1, 2, 3)}, "layer 0 is dense"


def test_r2_keeps_the_experts_of_the_scoring_through_all_updates() -> None:
    """After a large first update the routers would choose others; the rest of the batch is trained on the same."""
    large = {"grpo.minibatches": 2, "grpo.lr": 3e-2, "grpo.warmup_steps": 0, "grpo.prompts_per_step": 8}
    loop = Loop(preset("bf16", "tiny-moe", steps=2, eval_every=2, **{**SMALL, **large, "recipe.router.replay": "r2"}))
    stream = loop.steps()
    next(stream)
    seen = []
    score = loop.trainer.logprobs

    def watched(rollouts, micro_batches):
        result = score(rollouts, micro_batches)
        seen.append((rollouts.replay_BTLK, loop.trainer.routes()))
        return result

    loop.trainer.logprobs = watched
    update = loop.trainer.update
    replayed = []
    loop.trainer.update = lambda rollouts, *rest: (replayed.append(rollouts.replay_BTLK), update(rollouts, *rest))[1]
    next(stream)
    ((at_scoring, own),) = seen
    assert at_scoring is None
    assert len(replayed) == 2
    assert all(table is own for table in replayed)


def test_a_switch_of_replay_rules_from_the_next_step_on() -> None:
    loop = Loop(preset("fp8-rollout", "tiny-moe", steps=2, eval_every=2, **SMALL))
    records = []
    for record in loop.steps():
        records.append(record.metrics)
        if record.step == 1:
            loop.switch(loop.recipe.override({"router.replay": "r3"}))
    assert records[1]["router_flip_rate"] > 0
    assert records[2]["router_flip_rate"] == 0.0
