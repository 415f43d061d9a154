"""The experts that come back with rollouts are those that computed them."""

from dataclasses import replace

import pytest
import torch

from labkit.config import Recipe, Sampling
from labkit.models.attention import PaddedAttention
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.moe import MoEConfig
from labkit.models.rollouts import Rollouts
from labkit.models.routing import Routes
from labkit.rollout import Delivery, LocalEngine, Request, verify
from labkit.rollout.refit import RefitError

CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    rope_theta=1000.0, qk_norm=True, max_positions=64, moe=MoEConfig(8, 2, 128, (1, 2)),
)  # fmt: skip
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 4, 4, 4, 8, 9]]
FP8 = Recipe(rollout={"linears": True})


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in Decoder(CONFIG).weights().items()}


def generate(recipe: Recipe, routes: bool = True, config: DecoderConfig = CONFIG) -> Rollouts:
    engine = LocalEngine(config, recipe)
    torch.manual_seed(0)
    engine.refit(Decoder(config).weights(), None, 0)
    request = Request(Sampling(), 16, frozenset({2, 3, 4}), samples_per_prompt=4, routes=routes)
    return engine.generate(PROMPTS, request, torch.Generator().manual_seed(0))


def test_routes_are_those_of_an_uncached_pass_over_the_same_tokens() -> None:
    rollouts = generate(Recipe())
    model, T = Decoder(CONFIG), rollouts.tokens_BT.shape[1]
    model.load_weights(weights())
    positions, routes = (torch.arange(T) - rollouts.starts_B[:, None]).clamp(min=0), Routes()
    with torch.no_grad():
        model(rollouts.tokens_BT, positions, PaddedAttention(rollouts.starts_B, T), routes)
    found, own = rollouts.routes_BTLK, routes.own()
    assert found is not None
    assert found.dtype == torch.int8
    assert rollouts.lengths_B.min() < rollouts.lengths_B.max(), "some rows ended early and were dropped"
    columns = torch.arange(T)
    computed = columns >= rollouts.starts_B[:, None]
    computed &= columns < (rollouts.prompt_width + rollouts.lengths_B - 1)[:, None]
    assert torch.equal(found[computed].long(), own[computed])
    assert (found[~computed] == -1).all(), "nothing was computed from padding and from the last token"


def test_routes_come_back_only_when_asked_for_and_change_nothing() -> None:
    with_routes, without = generate(FP8), generate(FP8, routes=False)
    assert without.routes_BTLK is None
    assert torch.equal(with_routes.tokens_BT, without.tokens_BT)
    assert torch.equal(with_routes.logprobs_BR, without.logprobs_BR)
    assert generate(Recipe(), config=replace(CONFIG, moe=None)).routes_BTLK is None, "a dense model has none"


def test_every_expert_is_read_back_after_a_refit() -> None:
    engine = LocalEngine(CONFIG, FP8)
    engine.refit(weights(), None, 0)
    verify(engine, FP8, Delivery(weights(), None, 0))
    held = dict(engine.read_back())
    experts = [name for name in held if ".experts." in name]
    assert len(experts) == 2 * 8 * 3
    for name in experts:
        assert not torch.equal(held[name], weights()[name]), f"{name} was not quantised"
    assert torch.equal(held["model.layers.1.mlp.gate.weight"], weights()["model.layers.1.mlp.gate.weight"])


@pytest.mark.parametrize("expert", [0, 7])
def test_an_expert_that_loses_its_scale_in_a_refit_ends_the_run(expert: int) -> None:
    """The values as they are stored, without the scale that they were divided by."""
    engine = LocalEngine(CONFIG, FP8)
    engine.refit(weights(), None, 0)
    linear = engine.model.model.layers[2].mlp.experts[expert].down_proj
    operands = linear._current_operands()
    linear._operands = replace(operands, fprop=operands.fprop * 2.0**9)
    with pytest.raises(RefitError, match=rf"layers\.2\.mlp\.experts\.{expert}\.down_proj.*quantised"):
        verify(engine, FP8, Delivery(weights(), None, 0))
