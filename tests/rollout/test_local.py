import dataclasses

import pytest
import torch

from labkit.config import Lora, Recipe, Sampling
from labkit.fp8 import KVScales
from labkit.models.attention import PaddedAttention
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.lora import adapters, attach
from labkit.rollout import Delivery, LocalEngine, Request, verify
from labkit.rollout.refit import RefitError

CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    rope_theta=1000.0, qk_norm=True, max_positions=64,
)  # fmt: skip
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 4, 4, 4, 8, 9]]
KV = {"linears": True, "kv_cache": True, "attention": True}


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in Decoder(CONFIG).weights().items()}


def scales(version: int, k: float = 0.0125) -> KVScales:
    return KVScales(version, (0.03, 0.03), (k, k), (0.02, 0.02))


def generate(engine: LocalEngine, seed: int = 0, new_tokens: int = 12):
    request = Request(Sampling(), new_tokens, frozenset({2}), samples_per_prompt=4)
    return engine.generate(PROMPTS, request, torch.Generator().manual_seed(seed))


def test_rollouts_are_left_padded_grouped_and_end_at_their_stop_token() -> None:
    engine = LocalEngine(CONFIG, Recipe())
    engine.refit(weights(0), None, 0)
    rollouts = generate(engine)
    assert len(rollouts) == 12
    assert rollouts.starts_B.tolist() == [2] * 4 + [4] * 4 + [0] * 4
    for row in range(12):
        prompt = rollouts.tokens_BT[row, rollouts.starts_B[row] : rollouts.prompt_width].tolist()
        assert prompt == PROMPTS[row // 4]
        response = rollouts.response(row)
        assert 2 not in response[:-1]
        assert bool(rollouts.finished_B[row]) == (response[-1] == 2)
    off_mask = rollouts.logprobs_BR[~rollouts.mask_BR]
    assert off_mask.eq(0).all()


def test_g_equals_an_uncached_forward_of_the_same_weights() -> None:
    engine = LocalEngine(CONFIG, Recipe())
    engine.refit(weights(0), None, 0)
    rollouts = generate(engine)
    model = Decoder(CONFIG)
    model.load_weights(weights(0))
    T = rollouts.tokens_BT.shape[1]
    positions = (torch.arange(T) - rollouts.starts_B[:, None]).clamp(min=0)
    with torch.no_grad():
        hidden = model(rollouts.tokens_BT, positions, PaddedAttention(rollouts.starts_B, T))
        logprobs = model.logits(hidden).log_softmax(-1)
    P = rollouts.prompt_width
    p = logprobs[:, P - 1 : -1].gather(-1, rollouts.tokens_BT[:, P:, None])[..., 0]
    assert torch.equal(p[rollouts.mask_BR], rollouts.logprobs_BR[rollouts.mask_BR])


@pytest.mark.parametrize("rollout", [{}, {"linears": True}, KV])
def test_a_second_refit_equals_a_fresh_engine(rollout: dict) -> None:
    """Weights and scales of an earlier refit, and keys cached under them, leave no trace."""
    recipe = Recipe(rollout=rollout)
    send = (lambda version: scales(version)) if rollout.get("kv_cache") else (lambda version: None)
    used = LocalEngine(CONFIG, recipe)
    for version in range(3):
        used.refit(weights(version), send(version), version)
        generate(used)
    fresh = LocalEngine(CONFIG, recipe)
    fresh.refit(weights(2), send(2), 2)
    a, b = generate(used, seed=7), generate(fresh, seed=7)
    assert torch.equal(a.tokens_BT, b.tokens_BT)
    assert torch.equal(a.logprobs_BR, b.logprobs_BR)


def test_scales_arrive_in_the_engine_and_change_what_it_samples() -> None:
    engine = LocalEngine(CONFIG, Recipe(rollout=KV))
    engine.refit(weights(0), scales(0), 0)
    assert engine.state().kv_scales == scales(0)
    good = generate(engine)
    engine.refit(weights(0), scales(0, k=0.0001), 0)  # clips nearly every key
    assert not torch.equal(generate(engine).logprobs_BR, good.logprobs_BR)


def test_a_refused_refit_changes_nothing() -> None:
    engine = LocalEngine(CONFIG, Recipe(rollout=KV))
    engine.refit(weights(0), scales(0), 0)
    before = generate(engine)
    bad = KVScales(1, (0.03, 0.03), (0.01, float("nan")), (0.02, 0.02))
    with pytest.raises(ValueError, match="layer 1: k scale"):
        engine.refit(weights(1), bad, 1)
    with pytest.raises(ValueError, match="no Q/K/V scales"):
        engine.refit(weights(1), None, 1)
    with pytest.raises(ValueError, match="incomplete or foreign"):
        engine.refit({name: w for name, w in weights(1).items() if "norm" not in name}, scales(1), 1)
    assert engine.state().weight_version == 0
    assert torch.equal(generate(engine).logprobs_BR, before.logprobs_BR)


def test_engine_side_calibration_takes_the_first_prompt_after_a_refit() -> None:
    engine = LocalEngine(CONFIG, Recipe(rollout=KV, recalibration={"policy": "engine"}))
    engine.refit(weights(0), None, 5)
    assert engine.state().kv_scales is None
    generate(engine)
    held = engine.state().kv_scales
    assert held is not None
    held.validate(CONFIG.num_layers)
    assert held.version == 5


def test_verify_names_what_the_engine_lacks() -> None:
    recipe = Recipe(rollout=KV)
    engine = LocalEngine(CONFIG, recipe)
    engine.refit(weights(0), scales(0), 0)
    verify(engine, recipe, Delivery(weights(0), scales(0), 0))
    with pytest.raises(RefitError, match="weight version 0, the trainer sent 1"):
        verify(engine, recipe, Delivery(weights(0), scales(0), 1))
    with pytest.raises(RefitError, match="the engine holds scales"):
        verify(engine, recipe, Delivery(weights(0), scales(0, k=0.2), 0))
    others = {name: tensor for name, tensor in weights(0).items() if "proj" not in name}
    with pytest.raises(RefitError, match=r"layers\.0\.self_attn\.q_proj.*BF16 copy, quantised"):
        verify(engine, recipe, Delivery(weights(1) | others, scales(0), 0))
    with pytest.raises(RefitError, match=r"lm_head\.weight in the engine differs from the trainer's BF16 copy$"):
        verify(engine, recipe, Delivery(weights(0) | {"lm_head.weight": weights(1)["lm_head.weight"]}, scales(0), 0))


def test_verify_catches_an_engine_that_never_quantised() -> None:
    engine = LocalEngine(CONFIG, Recipe())
    engine.refit(weights(0), None, 0)
    with pytest.raises(RefitError, match="BF16 copy, quantised"):
        verify(engine, Recipe(rollout={"linears": True}), Delivery(weights(0), None, 0))


def test_an_fp8_head_tied_to_the_embedding_leaves_the_embedding_in_bf16() -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    recipe = Recipe(rollout={"linears": True}, keep_bf16={"lm_head": False})
    engine = LocalEngine(config, recipe)
    sent = {name: w for name, w in weights(0).items() if name != "lm_head.weight"}
    engine.refit(sent, None, 0)
    verify(engine, recipe, Delivery(sent, None, 0))
    held = dict(engine.read_back())
    assert torch.equal(held["model.embed_tokens.weight"], sent["model.embed_tokens.weight"])
    assert not torch.equal(held["lm_head.weight"], sent["model.embed_tokens.weight"])


def test_active_reports_what_the_modules_hold() -> None:
    engine = LocalEngine(CONFIG, Recipe(rollout=KV, keep_bf16={"first_layers": 1}))
    engine.refit(weights(0), scales(0), 0)
    active = engine.active()
    assert active["rollout.linears"]["state"] == "emulated"
    assert active["rollout.linears"]["detail"].startswith("7 of 15 layers")
    assert active["rollout.kv_cache"]["state"] == "emulated"
    bf16 = LocalEngine(CONFIG, Recipe())
    bf16.refit(weights(0), None, 0)
    assert {component["state"] for component in bf16.active().values()} == {"bf16"}


def test_mistakes_are_named() -> None:
    engine = LocalEngine(CONFIG, Recipe())
    with pytest.raises(ValueError, match="call refit"):
        generate(engine)
    engine.refit(weights(0), None, 0)
    with pytest.raises(ValueError, match="exceed the model's 64 positions"):
        generate(engine, new_tokens=60)
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engine.generate([[1], []], Request(Sampling(), 4, frozenset({2})), torch.Generator())


def test_nan_weights_are_not_taken_for_a_failed_refit() -> None:
    sent = weights(0)
    sent["model.norm.weight"][0] = float("nan")
    engine = LocalEngine(CONFIG, Recipe())
    engine.refit(sent, None, 0)
    verify(engine, Recipe(), Delivery(sent, None, 0))
    with pytest.raises(RuntimeError, match="logits hold NaN"):
        generate(engine)


def test_adapters_alone_are_enough_once_the_base_has_come() -> None:
    lora = Lora(rank=4)
    recipe = Recipe(rollout={"linears": True})
    engine = LocalEngine(CONFIG, recipe, lora=lora)
    sent = {name: tensor.clone() for name, tensor in attach(Decoder(CONFIG), lora).weights().items()}
    with pytest.raises(ValueError, match="incomplete or foreign set of weights"):
        engine.refit(adapters(sent), None, 0)
    engine.refit(sent, None, 0)
    before = generate(engine)
    moved = sent | {name: tensor + 0.05 for name, tensor in adapters(sent).items()}
    with pytest.raises(ValueError, match="incomplete or foreign"):
        engine.refit({name: moved[name] for name in list(adapters(moved))[1:]}, None, 1)
    engine.refit(adapters(moved), None, 1)
    verify(engine, recipe, Delivery(moved, None, 1))
    assert engine.codes_changed == 0.0
    fresh = LocalEngine(CONFIG, recipe, lora=lora)
    fresh.refit(moved, None, 1)
    after = generate(engine)
    assert torch.equal(after.logprobs_BR, generate(fresh).logprobs_BR)
    assert not torch.equal(after.logprobs_BR, before.logprobs_BR)
    other_base = moved | {"model.norm.weight": moved["model.norm.weight"] + 1}
    with pytest.raises(RefitError, match=r"model\.norm\.weight in the engine differs"):
        verify(engine, recipe, Delivery(other_base, None, 1))
