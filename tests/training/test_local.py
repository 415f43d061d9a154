"""The trainer's log-probabilities against the engine's g: the heart of "same kernels on both sides"."""

import math
from dataclasses import replace

import pytest
import torch

from labkit import models
from labkit.config import Experiment, Sampling
from labkit.models.lora import adapters
from labkit.models.warmstart import initial_weights
from labkit.rl.routing import router_metrics
from labkit.rollout import LocalEngine, Request
from labkit.training import LocalTrainer

PROMPTS = ["1+2-3*4=", "9*9+1-2=", "0-5*3+7*2=", "4*4*4-1="]


def experiment(recipe: dict, **changes) -> Experiment:
    return Experiment(model="tiny", recipe=recipe, steps=4).override(changes)


def rollouts_of(trainer: LocalTrainer, exp: Experiment, sampling: Sampling | None = None):
    policy = models.load("tiny")
    engine = LocalEngine(policy.config, exp.recipe, policy.tokenizer.pad_id, lora=exp.lora)
    engine.refit(trainer.weights(), None, 0)
    request = Request(sampling or exp.sampling, 40, frozenset(policy.tokenizer.eos_ids), samples_per_prompt=6)
    prompts = [policy.tokenizer.encode(prompt) for prompt in PROMPTS]
    return engine.generate(prompts, request, torch.Generator().manual_seed(0))


def micro_batches(rollouts, size: int = 5) -> list[torch.Tensor]:
    return list(rollouts.lengths_B.argsort().split(size))


BF16: dict = {}
FP8 = {"rollout": {"linears": True}, "train": {"fprop": True, "dgrad": True, "wgrad": True}}
LAST_TWO_BF16 = {**FP8, "keep_bf16": {"last_layers": 2}}
ROW = {**FP8, "scaling": {"granularity": "row"}}
WITH_HEAD = {**FP8, "keep_bf16": {"lm_head": False}}


ALIKE = {"bf16": BF16, "fp8": FP8, "keep": LAST_TWO_BF16, "row": ROW, "head": WITH_HEAD}


@pytest.mark.parametrize("recipe", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_same_recipe_and_kernels_on_both_sides_give_p_equal_to_g(recipe: dict, packing: bool) -> None:
    exp = experiment(recipe, **{"grpo.packing": packing})
    trainer = LocalTrainer(models.load("tiny"), exp)
    rollouts = rollouts_of(trainer, exp)
    p, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    assert torch.equal(p, rollouts.logprobs_BR)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ({"rollout": {"linears": True}}, {}),
        ({"train": {"fprop": True}}, {}),
        (FP8, {"trainer_attention": "sdpa"}),
        (BF16, {"trainer_attention": "sdpa"}),
    ],
)
def test_another_precision_or_kernel_on_one_side_shows(recipe: dict, changes: dict) -> None:
    exp = experiment(recipe, **changes)
    trainer = LocalTrainer(models.load("tiny"), exp)
    rollouts = rollouts_of(trainer, exp)
    p, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    difference = (p - rollouts.logprobs_BR).abs().max()
    assert 0 < difference < 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 3, "temperature": 1.3}])
def test_p_is_taken_under_the_samplers_distribution(sampling: dict) -> None:
    exp = experiment(BF16, **{f"sampling.{key}": value for key, value in sampling.items()})
    trainer = LocalTrainer(models.load("tiny"), exp)
    rollouts = rollouts_of(trainer, exp)
    p, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    assert torch.equal(p, rollouts.logprobs_BR)


def test_entropy_is_that_of_the_whole_distribution() -> None:
    trainer = LocalTrainer(models.load("tiny"), exp := experiment(BF16))
    rollouts = rollouts_of(trainer, exp)
    _, entropy = trainer.logprobs(rollouts, micro_batches(rollouts))
    inside = entropy[rollouts.mask_BR]
    assert inside.min() >= 0
    assert inside.max() <= math.log(32)
    assert inside.mean() > 0.01
    assert entropy[~rollouts.mask_BR].eq(0).all()


def negative_logprob(rows: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    return -current.sum() / 100


def test_c_equals_p_on_the_first_update_and_the_update_raises_it() -> None:
    exp = experiment(FP8)
    trainer = LocalTrainer(models.load("tiny"), exp)
    rollouts = rollouts_of(trainer, exp)
    batches = micro_batches(rollouts)
    p, _ = trainer.logprobs(rollouts, batches)
    seen = torch.zeros_like(p)

    def loss(rows: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        seen[rows] = current.detach()
        return negative_logprob(rows, current)

    update = trainer.update(rollouts, batches, loss)
    assert torch.equal(seen, p)
    assert update.grad_norm > 0
    after, _ = trainer.logprobs(rollouts, batches)
    assert after.sum() > p.sum()


def test_gradients_accumulate_over_micro_batches() -> None:
    """Any split gives the same FP32 gradient up to the BF16 rounding of each micro-batch's share."""
    norms = []
    for size in (24, 6):
        exp = experiment(BF16)
        trainer = LocalTrainer(models.load("tiny"), exp)
        rollouts = rollouts_of(trainer, exp)
        norms.append(trainer.update(rollouts, micro_batches(rollouts, size), negative_logprob).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_an_update_without_a_finite_gradient_is_skipped_and_named() -> None:
    exp = experiment(BF16)
    trainer = LocalTrainer(models.load("tiny"), exp)
    rollouts = rollouts_of(trainer, exp)
    before = {name: w.clone() for name, w in trainer.weights().items()}
    update = trainer.update(rollouts, micro_batches(rollouts), lambda rows, c: c.sum() * float("nan"))
    assert update.skipped == "the gradient of model.embed_tokens.weight is not finite"
    assert all(torch.equal(w, before[name]) for name, w in trainer.weights().items())
    assert trainer.update(rollouts, [], negative_logprob).skipped.startswith("no sequence")


def test_the_schedule_warms_up_and_decays_to_zero() -> None:
    exp = experiment(BF16, **{"grpo.warmup_steps": 2, "grpo.lr": 1e-3, "grpo.lr_decay": "linear", "steps": 4})
    trainer = LocalTrainer(models.load("tiny"), exp)
    rates = []
    for _ in range(4):
        rates.append(trainer.master.learning_rate())
        trainer.master.skip()
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
    assert trainer.master.learning_rate() == pytest.approx(0.0)


def test_a_small_step_survives_in_fp32_where_bf16_would_lose_it() -> None:
    exp = experiment(BF16, **{"grpo.lr": 1e-6, "grpo.warmup_steps": 0})
    trainer = LocalTrainer(models.load("tiny"), exp)
    name = "model.layers.0.mlp.up_proj.weight"
    start = trainer.master.parameters[name].clone()
    rollouts = rollouts_of(trainer, exp)
    trainer.update(rollouts, micro_batches(rollouts), negative_logprob)
    moved_master = (trainer.master.parameters[name] != start).float().mean()
    moved_bf16 = (trainer.weights()[name].float() != start.to(torch.bfloat16).float()).float().mean()
    assert moved_master > 0.9
    assert moved_bf16 < 0.1


def test_calibration_follows_the_weights_and_ignores_padding() -> None:
    exp = experiment({"rollout": {"kv_cache": True}})
    trainer = LocalTrainer(models.load("tiny"), exp)
    policy = models.load("tiny")
    engine = LocalEngine(policy.config, exp.recipe.override({"rollout.kv_cache": False}))
    engine.refit(trainer.weights(), None, 0)
    request = Request(exp.sampling, 40, frozenset({2}), samples_per_prompt=6)
    rollouts = engine.generate([policy.tokenizer.encode(p) for p in PROMPTS], request, torch.Generator().manual_seed(0))
    scales = trainer.calibrate(rollouts, micro_batches(rollouts), version=3)
    scales.validate(policy.config.num_layers)
    assert scales.version == 3
    rows_alone = [torch.tensor([row]) for row in range(len(rollouts))]
    alone = trainer.calibrate(rollouts, rows_alone, version=3)
    assert alone == scales  # the largest over sequences, however they are packed
    with torch.no_grad():
        trainer.model.model.layers[1].self_attn.v_proj.weight.mul_(2)
    doubled = trainer.calibrate(rollouts, micro_batches(rollouts), version=4)
    assert doubled.v[1] == pytest.approx(2 * scales.v[1], rel=1e-6)
    assert doubled.v[0] == scales.v[0]


def test_the_state_restores_weights_and_optimizer_bit_for_bit() -> None:
    exp = experiment(FP8)
    trainer = LocalTrainer(models.load("tiny"), exp)
    rollouts = rollouts_of(trainer, exp)
    batches = micro_batches(rollouts)
    trainer.update(rollouts, batches, negative_logprob)
    state = {key: value for key, value in trainer.state_dict().items()}
    state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    trainer.update(rollouts, batches, negative_logprob)

    other = LocalTrainer(models.load("tiny"), exp)
    other.load_state_dict(state)
    other.update(rollouts, batches, negative_logprob)
    for name, weight in trainer.master.parameters.items():
        assert torch.equal(weight, other.master.parameters[name]), name


# ---- adapters on a frozen base

FROZEN = {"rollout": {"linears": True}, "train": {"fprop": True, "dgrad": True}}


@pytest.mark.parametrize("recipe", [BF16, FROZEN], ids=["bf16", "fp8"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_trained_adapters_give_p_equal_to_g_and_leave_the_base_as_it_was(recipe: dict, packing: bool) -> None:
    exp = experiment(recipe, lora={"rank": 8}, grpo={"packing": packing, "lr": 1e-2, "warmup_steps": 0, "kl_coef": 0.1})
    trainer = LocalTrainer(models.load("tiny"), exp)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    rollouts = rollouts_of(trainer, exp)
    p, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    assert torch.equal(p, trainer.reference_logprobs(rollouts, micro_batches(rollouts)))
    for _ in range(2):
        trainer.update(rollouts, micro_batches(rollouts), negative_logprob)
    moved = {name for name, weight in trainer.weights().items() if not torch.equal(weight, before[name])}
    assert moved == trainer.state_dict()["parameters"].keys() == adapters(before).keys()
    assert len(moved) == 2 * 7 * 4
    rollouts = rollouts_of(trainer, exp)
    p_after, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    assert torch.equal(p_after, rollouts.logprobs_BR)
    assert not torch.equal(p_after, trainer.reference_logprobs(rollouts, micro_batches(rollouts)))


def test_adapters_of_experts_give_p_equal_to_g_and_the_same_routes() -> None:
    trainer, rollouts = of_experts(FROZEN, lora={"rank": 8}, grpo={"lr": 1e-2, "warmup_steps": 0})
    trainer.update(rollouts, micro_batches(rollouts), negative_logprob)
    rollouts = sampled_by_experts(trainer)
    p, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    assert torch.equal(p, rollouts.logprobs_BR)
    assert torch.equal(trainer.routes(), rollouts.routes_BTLK)
    assert "model.layers.1.mlp.experts.7.down_proj.lora_A.weight" in trainer.state_dict()["parameters"]


# ---- a mixture of experts


def of_experts(recipe: dict, **changes):
    """A trainer of the shipped mixture of experts, and rollouts of an engine with its weights, with their routes."""
    exp = Experiment(model="tiny-moe", recipe=recipe, steps=4).override(changes)
    trainer = LocalTrainer(models.load("tiny-moe"), exp)
    return trainer, sampled_by_experts(trainer)


def sampled_by_experts(trainer: LocalTrainer):
    exp, policy = trainer.experiment, models.load("tiny-moe")
    engine = LocalEngine(policy.config, exp.recipe, policy.tokenizer.pad_id, lora=exp.lora)
    engine.refit(trainer.weights(), None, 0)
    request = Request(exp.sampling, 30, frozenset(policy.tokenizer.eos_ids), samples_per_prompt=4, routes=True)
    prompts = [policy.tokenizer.encode(prompt) for prompt in PROMPTS]
    return engine.generate(prompts, request, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("recipe", [BF16, FP8], ids=["bf16", "fp8"])
def test_experts_of_the_same_recipe_give_p_equal_to_g_and_the_same_routes(recipe: dict, packing: bool) -> None:
    trainer, rollouts = of_experts(recipe, **{"grpo.packing": packing})
    p, _ = trainer.logprobs(rollouts, micro_batches(rollouts))
    assert torch.equal(p, rollouts.logprobs_BR)
    assert torch.equal(trainer.routes(), rollouts.routes_BTLK)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_the_trainer_takes_the_experts_it_is_given_and_tells_what_it_would_have_taken(packing: bool) -> None:
    trainer, rollouts = of_experts(BF16, **{"grpo.packing": packing})
    batches = micro_batches(rollouts)
    p, _ = trainer.logprobs(rollouts, batches)
    own = trainer.routes()
    p_same, _ = trainer.logprobs(replace(rollouts, replay_BTLK=own), batches)
    assert torch.equal(p_same, p), "its own routes change nothing"
    missing = torch.full_like(own, -1)
    assert torch.equal(trainer.logprobs(replace(rollouts, replay_BTLK=missing), batches)[0], p)
    others = torch.where(own >= 0, (own + 1) % 8, own)
    p_others, _ = trainer.logprobs(replace(rollouts, replay_BTLK=others), batches)
    assert (p_others != p)[rollouts.mask_BR].float().mean() > 0.9
    assert torch.equal(trainer.routes()[:, :, 0], own[:, :, 0]), "the first router sees what it saw before"


def test_the_auxiliary_loss_alone_evens_out_the_loads_of_fresh_routers() -> None:
    shipped = models.load("tiny-moe")
    fresh = replace(shipped, weights=initial_weights(shipped.config, 0))
    exp = Experiment(model="tiny-moe", steps=8, grpo={"aux_loss_coef": 1.0, "warmup_steps": 0, "lr": 1e-3})
    trainer, (_, rollouts) = LocalTrainer(fresh, exp), of_experts(BF16)
    batches = micro_batches(rollouts)
    before = {name: w.clone() for name, w in trainer.weights().items()}

    def busiest() -> float:
        trainer.logprobs(rollouts, batches)
        return router_metrics(rollouts, trainer.routes(), shipped.config.moe)["expert_load_max"]

    start = busiest()
    for _ in range(5):
        assert trainer.update(rollouts, batches, lambda rows, c: 0.0 * c.sum()).grad_norm > 0
    assert busiest() < start - 0.04
    moved = {name for name, w in trainer.weights().items() if not torch.equal(w, before[name])}
    assert {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)} <= moved
    assert not any("layers.3.mlp.experts" in name for name in moved), "behind the last router there is nothing to move"
