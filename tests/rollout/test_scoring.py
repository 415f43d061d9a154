"""Teacher forcing: the engine's own g again, from tokens that are already there."""

import math

import pytest
import torch

from labkit.config import RECIPES, Recipe, Sampling
from labkit.fp8 import KVScales
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.rollouts import Rollouts
from labkit.rollout import LocalEngine, Request

CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    rope_theta=1000.0, qk_norm=True, max_positions=64,
)  # fmt: skip
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 4, 4, 4, 8, 9]]
KV = {"linears": True, "kv_cache": True, "attention": True}
SCALES = KVScales(0, (0.03, 0.03), (0.0125, 0.0125), (0.02, 0.02))


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in Decoder(CONFIG).weights().items()}


def engine_for(recipe: Recipe, scales: KVScales | None = SCALES) -> LocalEngine:
    engine = LocalEngine(CONFIG, recipe)
    engine.refit(weights(0), scales if recipe.rollout.kv_cache else None, 0)
    return engine


def generate(engine: LocalEngine, sampling: Sampling | None = None, samples: int = 16) -> Rollouts:
    request = Request(sampling or Sampling(), 24, frozenset({2, 3}), samples)
    return engine.generate(PROMPTS, request, torch.Generator().manual_seed(0))


EXACT = [name for name, recipe in RECIPES.items() if recipe.scaling.granularity != "tensor"]


@pytest.mark.parametrize("name", EXACT)
def test_score_is_the_recorded_g_bit_for_bit(name: str) -> None:
    engine = engine_for(RECIPES[name])
    rollouts = generate(engine)
    assert len(set(rollouts.lengths_B.tolist())) > 5
    assert torch.equal(engine.score(rollouts, Sampling()), rollouts.logprobs_BR)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_p=0.8), Sampling(top_k=5)])
def test_score_is_under_the_distribution_that_was_sampled_from(sampling: Sampling) -> None:
    engine = engine_for(RECIPES["fp8-rollout"])
    rollouts = generate(engine, sampling)
    assert torch.equal(engine.score(rollouts, sampling), rollouts.logprobs_BR)
    assert not torch.equal(engine.score(rollouts, Sampling()), rollouts.logprobs_BR)


def test_a_scale_per_tensor_depends_on_what_shares_the_pass() -> None:
    engine = engine_for(RECIPES["fp8-e2e-tensor"])
    rollouts = generate(engine)
    score = engine.score(rollouts, Sampling())
    assert not torch.equal(score, rollouts.logprobs_BR)
    torch.testing.assert_close(score, rollouts.logprobs_BR, atol=0.5, rtol=0)


def test_one_precision_scores_the_tokens_of_another() -> None:
    rollouts = generate(engine_for(RECIPES["fp8-rollout-kv"]))
    g_bf16 = engine_for(Recipe()).score(rollouts, Sampling())
    apart = (g_bf16 - rollouts.logprobs_BR)[rollouts.mask_BR].abs()
    assert 0 < float(apart.mean()) < 0.2
    assert g_bf16[~rollouts.mask_BR].eq(0).all()


def test_engine_side_scales_come_from_the_prompts_in_either_way() -> None:
    recipe = Recipe(rollout=KV, recalibration={"policy": "engine"})
    sampled, scored = engine_for(recipe, None), engine_for(recipe, None)
    rollouts = generate(sampled)
    assert torch.equal(scored.score(rollouts, Sampling()), rollouts.logprobs_BR)
    assert scored.state() == sampled.state()


def test_saturation_is_that_of_the_last_generation() -> None:
    engine = engine_for(RECIPES["fp8-rollout-kv"])
    assert engine.saturation == {}
    generate(engine)
    assert engine.saturation == {"k": 0.0, "v": 0.0}
    engine.refit(weights(0), KVScales(1, (0.03, 0.03), (0.0001, 0.0001), (0.02, 0.02)), 1)
    generate(engine)
    assert engine.saturation["k"] > 0.9
    assert engine.saturation["v"] == 0.0
    bf16 = engine_for(Recipe())
    generate(bf16)
    assert bf16.saturation == {}


def test_codes_changed_counts_fp8_values_that_a_refit_moved() -> None:
    """One of CONFIG's two layers is BF16; the other has 2*128*128 + 2*128*64 + 3*128*384 = 196,608 FP8 values."""
    recipe = Recipe(rollout={"linears": True}, keep_bf16={"first_layers": 1})
    engine = LocalEngine(CONFIG, recipe)
    engine.refit(weights(0), None, 0)
    assert math.isnan(engine.codes_changed)  # nothing to compare with
    engine.refit(weights(0), None, 1)
    assert engine.codes_changed == 0.0
    moved = weights(0)
    moved["model.layers.0.mlp.up_proj.weight"] *= 2  # BF16
    moved["model.layers.1.mlp.up_proj.weight"] *= 1 + 2**-7  # too little for most codes
    engine.refit(moved, None, 2)
    assert 0 < engine.codes_changed < 0.25 * 128 * 384 / 196_608
    engine.refit(moved | {"model.layers.1.mlp.up_proj.weight": -moved["model.layers.1.mlp.up_proj.weight"]}, None, 3)
    assert engine.codes_changed == pytest.approx(128 * 384 / 196_608, rel=0.01)  # all but the zeros


def test_codes_changed_has_no_meaning_without_fp8_weights() -> None:
    engine = engine_for(Recipe())
    engine.refit(weights(1), None, 1)
    assert math.isnan(engine.codes_changed)


def test_score_before_a_refit_names_the_way_out() -> None:
    rollouts = generate(engine_for(Recipe()))
    with pytest.raises(ValueError, match=r"call refit\(\) before score\(\)"):
        LocalEngine(CONFIG, Recipe()).score(rollouts, Sampling())
