"""The real vLLM on this machine's CPU. What needs no vLLM is in test_vllm_plan.py."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit import models
from labkit.config import Experiment, Sampling
from labkit.fp8 import KVScales, LinearFormat, get_format
from labkit.hardware import packages
from labkit.models import Policy
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.rollouts import Rollouts
from labkit.rl.loop import Loop
from labkit.rollout import Delivery, RefitError, Request, build_engine, verify
from labkit.rollout.kv_cache import KVCache, KVPrecision
from labkit.rollout.scoring import teacher_forced

there, reason = packages.vllm()
pytestmark = pytest.mark.skipif(not there, reason=reason)

TINY = models.load("tiny").to(torch.bfloat16)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
FP8 = {"rollout": {"linears": True, "kv_cache": True}}


def nothing() -> None:
    pass


class Stop:
    """A hook of the run: raises in its n-th call after it was set."""

    calls = -1

    def __call__(self) -> None:
        self.calls -= self.calls >= 0
        if self.calls == 0:
            raise KeyboardInterrupt


def scales(version: int, k: float = 0.05) -> KVScales:
    return KVScales(version, q=(0.1, 0.11, 0.12, 0.13), k=(k,) * 4, v=(0.02, 0.021, 0.022, 0.023))


def start(recipe: dict[str, Any], policy: Policy = TINY, hook: Callable[[], None] = nothing, **settings: Any) -> Any:
    settings = {"engine": "vllm", "recipe": recipe, "task": "arithmetic", **settings}
    return build_engine(policy, Experiment(**settings), hook)


def changed(weights: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def sample(engine: Any, sampling: Sampling = Sampling(), seed: int = 0, new: int = 10, each: int = 8) -> Rollouts:  # noqa: B008
    request = Request(sampling, new, frozenset([2]), each)
    rollouts: Rollouts = engine.generate(PROMPTS, request, torch.Generator().manual_seed(seed))
    return rollouts


def same(a: Rollouts, b: Rollouts) -> bool:
    return torch.equal(a.tokens_BT, b.tokens_BT) and torch.equal(a.logprobs_BR, b.logprobs_BR)


@pytest.fixture(scope="module")
def hook() -> Stop:
    return Stop()


@pytest.fixture(scope="module")
def bf16(hook: Stop) -> Iterator[Any]:
    engine = start({}, hook=hook)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def fp8() -> Iterator[Any]:
    engine = start(FP8)
    yield engine
    engine.close()


# ---- sampling


def test_rollouts_have_the_layout_that_the_trainer_reads(bf16: Any) -> None:
    bf16.refit(TINY.weights, None, 3)
    rollouts = sample(bf16)
    assert rollouts.prompt_width == 5
    assert rollouts.weight_version == rollouts.scale_version == 3
    assert rollouts.starts_B.tolist() == [2] * 8 + [0] * 8
    assert rollouts.tokens_BT[0, :5].tolist() == [0, 0, 5, 6, 7]
    assert (rollouts.logprobs_BR[rollouts.mask_BR] < 0).all()
    assert (rollouts.logprobs_BR[~rollouts.mask_BR] == 0).all()
    assert (rollouts.tokens_BT[:, 5:][~rollouts.mask_BR] == TINY.tokenizer.pad_id).all()
    for row in range(len(rollouts)):
        response = rollouts.response(row)
        assert (response[-1] == 2) == bool(rollouts.finished_B[row])
        assert 2 not in response[:-1]
    short = sample(bf16, new=2)
    assert short.lengths_B.max() == 2
    assert not short.finished_B.all()


def test_a_seed_gives_its_rollouts_again(bf16: Any) -> None:
    bf16.refit(TINY.weights, None, 0)
    first = sample(bf16, seed=1)
    assert same(first, sample(bf16, seed=1))
    assert not same(first, sample(bf16, seed=2))
    assert len({tuple(first.response(row)) for row in range(8)}) > 1


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.7), Sampling(temperature=0.8, top_k=4)])
def test_g_is_of_the_distribution_that_was_sampled_from(bf16: Any, sampling: Sampling) -> None:
    bf16.refit(TINY.weights, None, 0)
    rollouts = sample(bf16, sampling, each=32)
    exact = TINY.decoder(torch.float32)

    def attention(starts_b: Tensor, columns: int) -> Any:
        return KVCache(TINY.config, starts_b, columns, KVPrecision(), torch.float32).attend

    def distance(other: Sampling) -> float:
        expected = teacher_forced(exact, rollouts, other, attention)
        return (expected - rollouts.logprobs_BR)[rollouts.mask_BR].abs().mean().item()

    assert distance(sampling) < 0.02  # BF16's own error
    assert distance(Sampling()) > 0.1


def test_scoring_gives_what_sampling_reported(bf16: Any, fp8: Any) -> None:
    bf16.refit(TINY.weights, None, 0)
    fp8.refit(TINY.weights, scales(0), 0)
    for engine in (bf16, fp8):
        rollouts = sample(engine)
        scored = engine.score(rollouts, Sampling())
        assert (scored - rollouts.logprobs_BR).abs().max() < 0.05
        assert (scored[~rollouts.mask_BR] == 0).all()
    with pytest.raises(ValueError, match="temperature 1 over the whole vocabulary only: set"):
        bf16.score(rollouts, Sampling(temperature=0.5))


def test_a_stop_is_quick_and_leaves_the_engine_usable(bf16: Any, hook: Stop) -> None:
    bf16.refit(TINY.weights, None, 0)
    whole = sample(bf16)
    hook.calls = 3
    with pytest.raises(KeyboardInterrupt):
        sample(bf16)
    assert not bf16.serving.llm.llm_engine.has_unfinished_requests()
    assert same(whole, sample(bf16))


def test_what_is_too_long_is_refused(bf16: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt \(5\) \+ new tokens \(252\) exceed the 256 tokens"):
        sample(bf16, new=252)


def test_without_weights_nothing_is_sampled() -> None:
    engine = start({})
    with pytest.raises(ValueError, match="the engine has no weights yet: call refit"):
        sample(engine)
    engine.close()


# ---- refits


def test_a_refit_equals_a_fresh_engine(fp8: Any) -> None:
    new, version = changed(TINY.weights), 7
    fp8.refit(TINY.weights, scales(0), 0)
    sample(fp8)
    fp8.refit(new, scales(version, k=0.04), version)
    assert 0 < fp8.codes_changed < 1
    verify(fp8, Experiment(recipe=FP8).recipe, Delivery(new, scales(version, k=0.04), version))
    fresh = start(FP8)
    fresh.refit(new, scales(version, k=0.04), version)
    assert same(sample(fp8), sample(fresh))
    fresh.close()
    fp8.refit(new, scales(8), 8)
    assert fp8.codes_changed == 0


@pytest.mark.parametrize(
    "scaling",
    [
        {"granularity": "block", "scale": "fp32", "formula": "deepgemm"},
        {"granularity": "row", "scale": "fp32", "formula": "vllm"},
        {"granularity": "tensor"},
        {"granularity": "mx", "format": "e5m2"},
    ],
)
def test_any_recipe_runs_with_the_weights_of_the_trainers_quantiser(scaling: dict[str, Any]) -> None:
    recipe = {"rollout": {"linears": True}, "scaling": scaling}
    engine = start(recipe)
    for version, weights in enumerate((TINY.weights, changed(TINY.weights))):
        engine.refit(weights, None, version)
        verify(engine, Experiment(recipe=recipe).recipe, Delivery(weights, None, version))
    assert (sample(engine).logprobs_BR <= 0).all()
    engine.close()


def test_layers_kept_in_bf16_are() -> None:
    recipe = {"rollout": {"linears": True}, "keep_bf16": {"first_layers": 1, "last_layers": 1}}
    engine = start(recipe)
    engine.refit(TINY.weights, None, 0)
    verify(engine, Experiment(recipe=recipe).recipe, Delivery(TINY.weights, None, 0))
    assert engine.active()["rollout.linears"]["state"] == "emulated"
    assert engine.active()["rollout.linears"]["detail"].startswith("8 of 16 fused layers")
    held = dict(engine.read_back())
    kept, quantised = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    assert torch.equal(held[kept], TINY.weights[kept])
    assert not torch.equal(held[quantised], TINY.weights[quantised])
    engine.close()


ALIGNED = {
    "hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
}  # fmt: skip


def random_policy(family: Any, **shape: Any) -> Policy:
    """Weights of one order of magnitude: none of their FP8 codes is subnormal."""
    config = DecoderConfig(TINY.config.vocab_size, **ALIGNED | shape)
    with torch.device("meta"):
        expected = Decoder(config).weights()
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (0.5 + torch.rand(tensor.shape, generator=generator)) * (0.05 if tensor.dim() > 1 else 1.0)
        for name, tensor in expected.items()
    }
    for tensor in weights.values():
        tensor *= torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return replace(TINY, config=config, weights=weights, name="random", family=family).to(torch.bfloat16)


def test_a_tied_head_follows_its_embedding_and_a_stale_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy("qwen2", tie_word_embeddings=True, qkv_bias=True, head_dim=32)  # biases on the way
    engine = start({}, policy)
    recipe = Experiment().recipe
    for version in range(2):
        sent = Delivery(changed(policy.weights, version), None, version)
        engine.refit(sent.weights, None, version)
        verify(engine, recipe, sent)
    monkeypatch.setattr("labkit.rollout.vllm.weights.repack", lambda model: None)
    sent = Delivery(changed(policy.weights, 2), None, 2)
    engine.refit(sent.weights, None, 2)
    with pytest.raises(RefitError, match=r"lm_head\.weight in the engine differs .* of the embedding it is tied to"):
        verify(engine, recipe, sent)
    engine.close()


def test_an_incomplete_refit_changes_nothing(fp8: Any) -> None:
    fp8.refit(TINY.weights, scales(0), 0)
    before = sample(fp8)
    name = "model.layers.0.self_attn.k_proj.weight"
    lacking = {key: tensor for key, tensor in TINY.weights.items() if key != name}
    for bad, why in [
        (lacking, "incomplete or foreign set of weights: model.layers.0.self_attn.k_proj.weight"),
        (lacking | {name: TINY.weights[name][:32]}, r"k_proj.weight is \(32, 128\), not \(64, 128\)"),
    ]:
        with pytest.raises(ValueError, match=why):
            fp8.refit(bad, scales(1), 1)
    with pytest.raises(RuntimeError, match=r"k_proj.weight holds NaN or infinity: has the training diverged\?"):
        fp8.refit(lacking | {name: TINY.weights[name] * torch.nan}, scales(1), 1)
    with pytest.raises(ValueError, match="the KV cache is FP8, but the refit brought no Q/K/V scales"):
        fp8.refit(TINY.weights, None, 1)
    assert fp8.state().weight_version == 0
    assert same(before, sample(fp8))


def test_nan_in_the_cache_does_not_outlive_a_refit(bf16: Any) -> None:
    bf16.refit(TINY.weights, None, 0)
    before = sample(bf16)
    for blocks in bf16.serving.model_runner.kv_caches:
        blocks.fill_(torch.nan)
    bf16.refit(TINY.weights, None, 1)
    assert same(before, sample(bf16))


def test_diverged_logits_are_an_error(bf16: Any) -> None:
    huge = {name: tensor * 3e38 if name == "model.norm.weight" else tensor for name, tensor in TINY.weights.items()}
    bf16.refit(huge, None, 0)
    with pytest.raises(RuntimeError, match="the engine's logits hold NaN or infinity"):
        sample(bf16)
    bf16.refit(TINY.weights, None, 1)
    sample(bf16)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_keys_and_values_are_stored_rounded_to_nearest(fmt: str) -> None:
    """vLLM's kernel alone would cut the mantissa off. Its layout is its own, so what is compared is how often a code
    occurs in the pages of one response."""
    engine = start(FP8 | {"scaling": {"kv_format": fmt}})
    given = scales(0, k=3e-3 if fmt == "e4m3" else 3e-5)  # a few keys are clipped
    engine.refit(TINY.weights, given, 0)
    seen: list[tuple[Tensor, Tensor]] = []
    for attention in engine.serving.attentions():
        attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1:3]), prepend=True)
    prompt = list(range(5, 15))
    engine.generate([prompt], Request(Sampling(), 1, frozenset([2])), torch.Generator().manual_seed(0))
    form = get_format(fmt)
    for (k, v), blocks, k_scale, v_scale in zip(
        seen, engine.serving.model_runner.kv_caches, given.k, given.v, strict=True
    ):
        wanted = [(x.float() / s).clamp(-form.max, form.max).to(form.dtype) for x, s in ((k, k_scale), (v, v_scale))]
        expected = torch.cat([codes.view(torch.uint8).flatten() for codes in wanted])
        stored = blocks.view(torch.uint8).flatten()
        assert torch.equal(*(torch.bincount(codes[codes & 0x7F != 0], minlength=256) for codes in (expected, stored)))
        assert expected.numel() == 2 * len(prompt) * TINY.config.num_kv_heads * TINY.config.head_dim
    assert engine.saturation["k"] == pytest.approx(
        sum(int((k.abs() > s * form.max).sum()) for (k, _), s in zip(seen, given.k, strict=True))
        / sum(k.numel() for k, _ in seen)
    )
    assert engine.saturation["k"] > 0
    engine.close()


def test_scales_arrive_and_act_and_a_lost_one_is_seen(fp8: Any) -> None:
    recipe = Experiment(recipe=FP8).recipe
    fp8.refit(TINY.weights, scales(4), 4)
    assert fp8.state().kv_scales == scales(4)
    rollouts = sample(fp8)
    assert rollouts.scale_version == 4
    near = fp8.score(rollouts, Sampling())
    fp8.refit(TINY.weights, scales(5, k=0.0005), 5)  # clips every key
    assert (fp8.score(rollouts, Sampling()) - near).abs().max() > 0.5
    fp8.serving.attentions()[2]._v_scale.fill_(1.0)  # the tensor without its copies
    with pytest.raises(RefitError, match="the engine holds scales"):
        verify(fp8, recipe, Delivery(TINY.weights, scales(5, k=0.0005), 5))


def test_an_fp8_checkpoint_in_vllms_own_kernel_holds_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way weights go to a GPU, in the kernel that vLLM has for CPUs with AMX."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's block FP8 kernel for CPUs needs AMX")
    from labkit.rollout.vllm import engine as module

    recipe = {"rollout": {"linears": True}, "keep_bf16": {"first_layers": 1}}
    policy = random_policy("qwen3", qk_norm=True)
    on_gpu = module.make_plan(Experiment(engine="vllm", device="cuda", recipe=recipe), policy.config)
    here = module.make_plan(Experiment(engine="vllm", recipe=recipe), policy.config)
    monkeypatch.setattr(module, "make_plan", lambda *_: replace(here, linears=on_gpu.linears))
    engine = start(recipe, policy)
    for version, factor in enumerate((1.0, 1.25)):
        sent = Delivery({name: tensor * factor for name, tensor in policy.weights.items()}, None, version)
        engine.refit(sent.weights, None, version)
        verify(engine, Experiment(recipe=recipe).recipe, sent)
    assert engine.active()["rollout.linears"]["state"] == "fp8"
    assert engine.active()["rollout.linears"]["detail"].startswith("4 of 8 fused layers")
    assert engine.codes_changed > 0
    sample(engine)

    name = "model.layers.1.mlp.down_proj.weight"
    small = policy.weights[name].clone()
    small[0, :8] *= 2**-15  # FP8 subnormals, which that kernel decodes wrongly, and what it computes with is compared
    engine.refit(policy.weights | {name: small}, None, 2)
    with pytest.raises(RefitError, match=r"down_proj\.weight in the engine differs from .* copy, quantised"):
        verify(engine, Experiment(recipe=recipe).recipe, Delivery(policy.weights | {name: small}, None, 2))
    engine.close()


def test_codes_and_scales_of_a_checkpoint_are_the_trainers() -> None:
    from labkit.rollout.vllm.weights import as_checkpoint

    weight = TINY.weights["model.layers.0.mlp.up_proj.weight"]
    for granularity, shape in [("block", (3, 1)), ("row", (384, 1))]:
        precision = LinearFormat(fprop=True, granularity=granularity, scale="fp32")
        sent = as_checkpoint({"up_proj.weight": weight}, {"up_proj.weight"}, precision, "weight_scale")
        codes, by_tile = sent["up_proj.weight"], sent["up_proj.weight_scale"]
        assert (codes.dtype, tuple(by_tile.shape)) == (torch.float8_e4m3fn, shape)
        wide = by_tile.repeat_interleave(384 // shape[0], 0)
        assert torch.equal(codes.float() * wide, precision.weight_operand(weight))


# ---- in a run


def test_starting_vllm_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random(), torch.set_num_threads
    torch.manual_seed(5)
    random.seed(5)
    start({}).close()
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), torch.set_num_threads) == expected[1:]


def test_a_closed_engine_frees_what_it_held() -> None:
    engine = start({})
    model = weakref.ref(engine.serving.model)
    engine.close()
    del engine
    gc.collect()
    assert model() is None


def experiment(recipe: dict[str, Any], **settings: Any) -> Experiment:
    small = {"prompts_per_step": 4, "group_size": 4}
    return Experiment(engine="vllm", recipe=recipe, grpo=small, steps=3, eval_prompts=16, **settings)


def test_a_run_whose_refits_are_proved_and_that_resumes_to_the_bit() -> None:
    loop = Loop(experiment(FP8))
    steps = loop.steps()
    records = [next(steps) for _ in range(3)]
    state = loop.state_dict()
    records += steps
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert all(1.0 <= record.metrics["token_mult_prob_error"] < 1.5 for record in records[1:])
    assert all(record.timings["verify"] > 0 for record in records[1:])
    assert records[-1].metrics["codes_changed"] > 0
    assert records[-1].kv_scales != records[1].kv_scales
    resumed = Loop(experiment(FP8))
    resumed.load_state_dict(state)
    again = list(resumed.steps())[-1]
    loop.engine.close()
    resumed.engine.close()
    assert again.metrics == records[-1].metrics
    assert again.kv_scales == records[-1].kv_scales


def test_recipes_switch_in_a_run() -> None:
    loop = Loop(experiment({}))
    steps = loop.steps()
    next(steps)
    before = next(steps)
    loop.switch(loop.recipe.override(FP8))
    after = next(steps)
    assert before.active["rollout.linears"]["state"] == "bf16"
    assert after.active["rollout.linears"]["state"] == "emulated"
    assert after.active["rollout.kv_cache"]["state"] == "fp8"
    loop.switch(loop.recipe.override({"rollout": {"linears": False, "kv_cache": False}}))
    assert next(steps).active["rollout.kv_cache"]["state"] == "bf16"
    loop.engine.close()
