"""Failures that users of other FP8 and RL systems reported, as conditions that hold here.

Each test names the reports, the symptom they had, and asserts the numbers that a correct system gives. Those that the
parts' own tests hold already are named in ELSEWHERE, so that the list is complete in one place.
"""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from labkit import fp8, models, rl
from labkit.config import GRPO, ConfigError, Correction, Experiment, Sampling, preset
from labkit.fp8 import Float8Linear, KVScales, LinearFormat
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.logprobs import token_logprobs
from labkit.models.moe import MoEConfig
from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.rl.loop import Loop
from labkit.rl.routing import for_scoring, router_metrics
from labkit.rollout import Delivery, LocalEngine, RefitError, Request, verify
from labkit.rollout.sampling import sample
from labkit.runs.alarms import alarms
from labkit.runs.compare import tmpe_text
from labkit.runs.metrics import METRICS
from labkit.runs.record import StepRecord
from labkit.runs.report import SIX
from labkit.training import LocalTrainer

NAN = math.nan
ELSEWHERE = {
    "DTensor row-wise plan: TMPE good, convergence worse (NeMo RL #1288)":
        "rl/test_metrics.py::test_the_surprisal_gap_sees_a_temperature_that_no_ratio_shows",
    "resumed run: huge differences for a few steps (slime#1695)":
        "rl/test_loop.py::test_resuming_a_loop_reproduces_it_bit_for_bit",
    "healthy-looking ratio under truncation (NeMo RL PR #3900)":
        "rl/test_metrics.py::test_weights_before_the_correction_are_seen_beside_those_after",
}  # fmt: skip
LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4, -1)
TOKENS = torch.arange(4)
SMALL = {"grpo.prompts_per_step": 4, "grpo.group_size": 4, "eval_prompts": 8, "keep_rollouts": 2,
         "sampling.max_new_tokens": 40}  # fmt: skip


def record(step: int = 1, **metrics: float) -> StepRecord:
    versions = {"weight_version": step - 1, "scale_version": step - 1}
    return StepRecord(step=step, weight_version=step - 1, time=0.0, elapsed=0.0, metrics=metrics, timings={},
                      tokens={"generated": 3}, active={}, engine=versions)  # fmt: skip


def loss_of(g, p, advantages, correction: Correction) -> tuple[rl.LossTerms, torch.Tensor]:
    g, p = torch.tensor(g), torch.tensor(p)
    mask = torch.ones_like(g, dtype=torch.bool)
    advantages = torch.tensor(advantages)
    weights = rl.correction_from(correction)(g, p, mask, advantages)
    current = p.clone().nan_to_num(0.0).requires_grad_()
    terms = rl.grpo_loss(current, g, p, advantages, weights, mask & weights.valid, settings=GRPO(),
                         correction=correction, num_tokens=int(weights.valid.sum()), num_sequences=len(g))  # fmt: skip
    terms.loss.backward()
    return terms, current.grad


def raised(records: list[StepRecord], experiment: Experiment | None = None) -> dict[str, str]:
    return {alarm.name: f"{alarm.what} {alarm.cause} {alarm.cure}" for alarm in alarms(records, experiment)}


# ---- D1 - D5: corrections and log-probs


def test_d1_everything_rejected_is_reported_not_divided_by() -> None:
    """verl#7559: ZeroDivisionError when IcePop filtered every token."""
    p = torch.tensor([[10.0, 20.0, 0.01]]).log()
    g, mask = torch.zeros_like(p), torch.ones_like(p)
    statistics = rl.weight_statistics(rl.correction("icepop", low=0.5, high=5.0)(g, p, mask), mask)
    assert statistics["ess"] == 0.0
    terms, gradient = loss_of(g.tolist(), p.tolist(), [1.0], Correction(name="icepop"))
    assert terms.loss.item() == 0.0
    assert gradient.tolist() == [[0.0, 0.0, 0.0]]
    told = " ".join(raised([record(**rl.mismatch(g, p, mask), **statistics)]).values())
    assert "batch fully rejected" in told


def test_d2_an_overflowing_ratio_that_is_rejected_leaves_no_nan() -> None:
    """OpenRLHF#1314: inf times 0. Differences [1000, 0]."""
    terms, gradient = loss_of([[-1001.0, -1.0]], [[-1.0, -1.0]], [1.0], Correction(name="icepop", low=0.5, high=5.0))
    assert terms.loss.item() == -0.5
    assert gradient.tolist() == [[0.0, -0.5]]


def test_d3_log_probs_are_those_of_the_tempered_distribution_on_both_sides() -> None:
    """TRL#4159, prime-rl#697, NeMo RL#902: ratio off although on-policy."""
    at_06 = Sampling(temperature=0.6)
    tokens, g = sample(LOGITS, at_06, torch.Generator().manual_seed(0))
    p, _ = token_logprobs(LOGITS, tokens, at_06)
    assert torch.equal(p, g), "the two sides agree to the bit"
    g, _ = token_logprobs(LOGITS, TOKENS, at_06)
    forgotten, _ = token_logprobs(LOGITS, TOKENS, Sampling())
    assert (forgotten - g).exp().tolist() == pytest.approx([0.793, 1.544, 3.008, 5.858], abs=1e-3)
    assert (forgotten / 0.6 - g).exp().tolist() == pytest.approx([0.591] * 4, abs=1e-3), "log-probs divided by T"


def test_d4_top_p_is_renormalised_on_both_sides_and_its_lack_is_noticed() -> None:
    """TRL#6789, #7269: mean ratio .895."""
    nucleus = Sampling(top_p=0.8)
    g, _ = token_logprobs(LOGITS[:2], TOKENS[:2], nucleus)
    p, _ = token_logprobs(LOGITS[:2], TOKENS[:2], nucleus)
    assert (p - g).exp().tolist() == [1.0, 1.0]
    uncorrected, _ = token_logprobs(LOGITS[:2], TOKENS[:2], Sampling())
    assert (uncorrected - g).exp().tolist() == pytest.approx([0.8808, 0.8808], abs=1e-4)
    metrics = rl.mismatch(g[None], uncorrected[None], torch.ones(1, 2))
    told = raised([record(**metrics)])
    text = " ".join(told.values())
    assert "top-p" in text
    assert "temperature" in text
    assert not raised([record(**rl.mismatch(g[None], p[None], torch.ones(1, 2)))])


def test_d5_tiny_differences_add_up_over_a_response() -> None:
    """TRL#4772, #5814: the whole batch masked by a cap on the product."""
    for length, kept in ((91, True), (92, False)):
        g, mask = torch.zeros(1, length, dtype=torch.float64), torch.ones(1, length)
        weights = rl.correction("trl/sequence_mask", high=3.0)(g, g + 0.012, mask)
        assert weights.raw[0, 0].item() == pytest.approx({91: 2.980, 92: 3.016}[length], abs=1e-3)
        assert rl.weight_statistics(weights, mask)["kept_share"] == float(kept), "the effective batch is a metric"
        geometric = rl.correction("geometric-mask", low=0.98, high=1.02)(g, g + 0.012, mask)
        assert geometric.judged["mean_ratio"][0, 0].item() == pytest.approx(1.01207, abs=1e-5)
        assert geometric.keep.all()


# ---- D6 - D11: weights, scales and caches

CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    rope_theta=1000.0, qk_norm=True, max_positions=64,
)  # fmt: skip


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in Decoder(CONFIG).weights().items()}


def sampled(engine: LocalEngine) -> torch.Tensor:
    request = Request(Sampling(), 8, frozenset({2}), samples_per_prompt=2)
    return engine.generate([[1, 5, 9], [1, 7]], request, torch.Generator().manual_seed(3)).logprobs_BR


def test_d6_scales_that_a_refit_loses_end_the_run() -> None:
    """NeMo RL#3225: calibrated every step, engine at 1.0 all along."""
    recipe = preset("fp8-rollout-kv").recipe
    engine = LocalEngine(CONFIG, recipe)
    scales = KVScales(1, (0.05, 0.06), (0.03, 0.0125), (0.02, 0.02))
    sent = Delivery(weights_of(0), scales, 1)
    engine.refit(sent.weights, scales, 1)
    assert engine.state().kv_scales.k == (0.03, 0.0125)
    verify(engine, recipe, sent)
    engine.refit(sent.weights, KVScales.unit(2, version=1), 1)
    with pytest.raises(RefitError, match="the engine holds scales"):
        verify(engine, recipe, sent)


def test_d7_keys_beyond_the_format_are_clipped_by_unit_scales_and_not_by_calibrated_ones() -> None:
    """verl#4435, TensorRT-LLM#4218, Qwen3#840: output becomes "????" (K up to 900, scale 1.0)."""
    torch.manual_seed(0)
    k = torch.randn(64, 128) * 200
    k = k / k.abs().max() * 900
    calibrated = 1.05 * 900 / 448
    assert calibrated == pytest.approx(2.109, abs=1e-3)

    def error(scale: float) -> float:
        back = fp8.to_grid(k, scale, "e4m3").float() * scale
        return float((back - k).norm() / k.norm())

    assert float(fp8.to_grid(torch.tensor([900.0]), 1.0, "e4m3")) == 448.0
    assert abs(448 - 900) / 900 >= 0.16
    assert error(calibrated) <= 0.027 < error(1.0)
    assert "recalibration" in " ".join(raised([record(1), record(2, kv_saturation_k=fp8.saturation(k, 1.0))]).values())


def test_d8_the_second_and_third_load_equal_a_fresh_one() -> None:
    """vllm#28783, verl#5683, vllm#32133: gibberish after the second weight load."""
    recipe = preset("fp8-rollout").recipe
    used = LocalEngine(CONFIG, recipe)
    for version in range(4):
        used.refit(weights_of(version), None, version)
        fresh = LocalEngine(CONFIG, recipe)
        fresh.refit(weights_of(version), None, version)
        assert torch.equal(sampled(used), sampled(fresh)), f"load {version}"


@pytest.mark.parametrize("formula", ["te", "deepgemm", "vllm"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_d9_a_block_of_zeros_has_a_scale_and_no_nan(formula: str, scale: str) -> None:
    """torchao#4713, HF kernels#680: 0/0."""
    q = fp8.quantize(torch.zeros(128, 128), fmt="e4m3", tile=(128, 128), scale=scale, formula=formula)
    assert not q.codes.float().any()
    assert torch.isfinite(q.scales).all()
    assert (q.scales > 0).all()
    assert torch.equal(q.dequantize().float(), torch.zeros(128, 128))
    precision = LinearFormat(fprop=True, dgrad=True, wgrad=True, scale=scale, formula=formula)
    linear = Float8Linear(128, 128, precision=precision)
    with torch.no_grad():
        linear.weight.zero_()
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    x[1] = 0  # and an activation row of zeros
    x.requires_grad_()
    linear(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(linear.weight.grad).all()


def test_d10_no_key_survives_a_weight_change() -> None:
    """prime-rl#1650, NeMo RL#4018: states 17 steps old."""
    engine = LocalEngine(CONFIG, preset("bf16").recipe)
    engine.refit(weights_of(0), None, 0)
    sampled(engine)
    engine.refit(weights_of(1), None, 1)
    cold = LocalEngine(CONFIG, preset("bf16").recipe)
    cold.refit(weights_of(1), None, 1)
    assert torch.equal(sampled(engine), sampled(cold))


def test_d11_replayed_routes_reach_the_layers_they_were_taken_in() -> None:
    """NeMo RL#3903, miles#2570: replay worse than none, because a dense first layer shifted the tables by one."""
    moe = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=128, layers=(1, 2))
    config = replace(CONFIG, num_layers=3, moe=moe)
    torch.manual_seed(0)
    weights = {name: tensor.clone() for name, tensor in Decoder(config).weights().items()}
    policy = Policy(config, weights, models.load("tiny").tokenizer, "dense-first", "qwen3_moe")
    recipe = preset("fp8-rollout").recipe.override({"router.replay": "r3"})
    engine = LocalEngine(config, recipe)
    trainer = LocalTrainer(policy, preset("fp8-rollout", "tiny-moe").override({"recipe": recipe}))
    engine.refit(trainer.weights(), None, 0)
    request = Request(Sampling(), 8, frozenset({2}), samples_per_prompt=8, routes=True)
    rollouts = engine.generate([[1, 5, 9], [1, 7]], request, torch.Generator().manual_seed(3))
    assert rollouts.routes_BTLK.shape[2] == 2, "layers 1 and 2 of three"
    rows = [torch.arange(len(rollouts))]

    def metrics(scored: Rollouts) -> dict[str, float]:
        p, _ = trainer.logprobs(scored, rows)
        found = rl.mismatch(rollouts.logprobs_BR, p, rollouts.mask_BR)
        return found | router_metrics(scored, trainer.routes(), moe)

    own, replayed = metrics(replace(rollouts, replay_BTLK=None)), metrics(for_scoring(rollouts, recipe))
    assert own["router_flip_rate"] > 0
    assert {"router_flip_rate_layer_1", "router_flip_rate_layer_2"} <= own.keys()
    assert "router_flip_rate_layer_0" not in own
    assert replayed["router_flip_rate"] == 0.0
    assert replayed["gen_kl_error"] < own["gen_kl_error"]
    shifted = metrics(replace(rollouts, replay_BTLK=rollouts.routes_BTLK.roll(1, dims=2)))
    assert shifted["gen_kl_error"] > 10 * own["gen_kl_error"], "what a table off by one layer would look like"

    current = trainer.current_logprobs(for_scoring(rollouts, recipe), rows[0])
    current.sum().backward()
    for layer in (1, 2):  # miles#2570: no gradient when replayed weights are gathered from a zeroed softmax
        assert trainer.model.model.layers[layer].mlp.gate.weight.grad.norm() > 0


# ---- D12 - D15: batches, runs and what people see


def test_d12_a_token_without_log_prob_is_left_out_and_counted() -> None:
    """TRL#6297: NaN ratio."""
    g, p, mask = torch.tensor([[-1.0, NAN, -2.0]]), torch.tensor([[-1.0, -1.0, -2.0]]), torch.ones(1, 3)
    assert rl.mismatch(g, p, mask)["nan_count"] == 1.0
    assert rl.correction("tis")(g, p, mask).valid.tolist() == [[True, False, True]]
    terms, gradient = loss_of(g.tolist(), p.tolist(), [1.0], Correction(name="tis"))
    assert terms.loss.item() == -1.0
    assert gradient.tolist() == [[-0.5, 0.0, -0.5]]


def test_d13_a_window_too_tight_keeps_the_run_alive_and_suggests_another() -> None:
    """verl#3984: "at least one valid token" at the first step, G = .9868 everywhere."""
    g, mask = torch.zeros(4, 5), torch.ones(4, 5)
    p = g + math.log(0.9868)
    statistics = rl.weight_statistics(rl.correction("geometric-mask", low=0.99, high=1.001)(g, p, mask), mask)
    assert statistics["kept_share"] == 0.0
    told = " ".join(raised([record(**rl.mismatch(g, p, mask), **statistics)]).values())
    assert "0.98" in told, "a window from the observed quantiles"
    changes = {"recipe.correction": {"name": "geometric-mask", "low": 1.0, "high": 1.0},
               "recipe.keep_bf16.lm_head": False, "grpo.prompts_per_step": 8}  # fmt: skip
    loop = Loop(preset("fp8-rollout", steps=2, eval_every=2, **{**SMALL, **changes}))
    before = {name: w.clone() for name, w in loop.trainer.weights().items()}
    rejected = list(loop.steps())[1:]
    assert all("update skipped" in event for each in rejected for event in each.events)
    assert all(torch.equal(w, before[name]) for name, w in loop.trainer.weights().items())


def test_d14_a_resumed_loop_samples_what_the_uninterrupted_one_did() -> None:
    """slime#1695: weights and scales not in the engine before the first rollouts after a resume."""
    experiment = preset("fp8-e2e-kv", steps=4, eval_every=4, **SMALL)
    whole = list(Loop(experiment).steps())
    stopped, resumed = Loop(experiment), Loop(experiment)
    stream = stopped.steps()
    for _ in range(4):
        next(stream)
    resumed.load_state_dict(stopped.state_dict())
    (fourth,) = list(resumed.steps())
    assert fourth.metrics == whole[4].metrics
    assert (fourth.engine, fourth.kv_scales) == (whole[4].engine, whole[4].kv_scales)


def test_d15_the_first_screen_has_six_curves_and_a_loss_of_zero_is_explained() -> None:
    """TRL#3893, #3452, torchforge#372: too many logs; "loss is 0, is it broken?"."""
    assert len(SIX) <= 6
    assert "about 0 on the first update, which is right" in METRICS["loss"].definition
    terms, gradient = loss_of([[-1.0], [-1.0]], [[-1.0], [-1.0]], [1.0, -1.0], Correction())
    assert terms.loss.item() == 0.0
    assert gradient.flatten().tolist() == [-0.5, 0.5]


# ---- NeMo RL's own list


def test_incomplete_or_absurd_scales_are_refused() -> None:
    """NeMo RL PR #3008: stale or default scales used in silence."""
    engine = LocalEngine(CONFIG, preset("fp8-rollout-kv").recipe)
    for bad in (None, KVScales(1, (1.0,), (1.0,), (1.0,)), KVScales(1, (1.0, 1.0), (1.0, 0.0), (1.0, 1.0)),
                KVScales(1, (1.0, 1.0), (1.0, math.inf), (1.0, 1.0))):  # fmt: skip
        with pytest.raises(ValueError, match=r"scale"):
            engine.refit(weights_of(0), bad, 1)
    cached = {"rollout.kv_cache": {"state": "emulated", "detail": ""}}
    late = replace(record(2), active=cached, engine={"weight_version": 1, "scale_version": 0})
    assert "older" in " ".join(raised([late]).values())


def test_an_engine_that_never_quantised_is_found_out() -> None:
    """NeMo RL #3755: FP8 hooks not installed in the workers."""
    engine = LocalEngine(CONFIG, preset("bf16").recipe)
    sent = Delivery(weights_of(0), None, 0)
    engine.refit(sent.weights, None, 0)
    with pytest.raises(RefitError, match="quantised"):
        verify(engine, preset("fp8-rollout").recipe, sent)


def test_a_refitted_weight_is_the_trainers_to_half_a_unit() -> None:
    """NeMo RL #2744: experts refitted with the identity scale."""
    engine = LocalEngine(CONFIG, preset("fp8-rollout").recipe)
    sent = weights_of(0)
    engine.refit(sent, None, 0)
    for name, held in engine.read_back():
        if "_proj" in name:
            w = sent[name].float()
            assert (held.float() - w).abs().max() <= w.abs().max() * 2**-4, name
            assert not torch.equal(held, sent[name]), f"{name} was not quantised"


def test_a_gradient_that_is_not_finite_stops_the_update_and_names_the_tensor() -> None:
    """NeMo RL #1164: NaN from step 2."""
    loop = Loop(preset("bf16", steps=1, eval_every=1, **SMALL))
    rollouts = loop.engine.generate([loop.prompter.encode(loop.prompter.task.heldout(1)[0])], loop.request,
                                    torch.Generator().manual_seed(0))  # fmt: skip
    update = loop.trainer.update(rollouts, [torch.arange(4)], lambda rows, c: c.sum() * NAN)
    assert "is not finite" in update.skipped
    assert "model." in update.skipped


@pytest.mark.parametrize("value", [38565.0, 1e9, 1e10, math.inf, NAN])
def test_a_mismatch_of_any_size_is_shown_and_alarmed(value: float) -> None:
    """NeMo RL #1801, #906, #1330: TMPE grows to 1e9 while rewards look fine."""
    assert len(tmpe_text(value)) < 14
    if not math.isnan(value):  # which no batch with a token in it has
        seen = raised([record(step, token_mult_prob_error=value, reward=0.5) for step in range(1, 7)])
        assert seen, "reward alone says nothing"


def test_a_product_over_a_long_response_is_alarmed_and_the_mean_offered() -> None:
    """NeMo RL #2269: GSPO with the product of 8,000 ratios: mean weight .0596, no learning, KL healthy."""
    torch.manual_seed(0)
    g = torch.zeros(4, 8000, dtype=torch.float64)
    p, mask = g - 0.0006 + 0.07 * torch.randn_like(g), torch.ones(4, 8000)
    metrics = rl.mismatch(g, p, mask)
    assert metrics["gen_kl_error"] < 0.003
    product = rl.weight_statistics(rl.correction("sequence-tis")(g, p, mask), mask)
    geometric = rl.weight_statistics(rl.correction("areal/sequence-clamp")(g, p, mask), mask)
    assert product["mean_applied"] < 0.5 or product["ess"] < 0.5
    assert geometric["mean_applied"] == pytest.approx(1.0, abs=0.01)
    assert geometric["ess"] > 0.99


def test_responses_far_off_can_be_masked_and_are_counted() -> None:
    """NeMo RL #4243: sequences with huge divergence in BF16."""
    g, mask = torch.zeros(3, 4), torch.ones(3, 4)
    p = g.clone()
    p[1] = 1.0  # mean exp|delta| = e
    weights = rl.correction("nemo-rl/seq-logprob-error", high=2.0)(g, p, mask)
    statistics = rl.weight_statistics(weights, mask, torch.tensor([True, True, False]))
    assert weights.keep.any(-1).tolist() == [True, False, True]
    assert statistics["num_rejected_seqs"] == 1.0
    assert statistics["rejected_correct_share"] == 1.0


def test_truncated_answers_are_alarmed() -> None:
    """NeMo RL #2725: accuracy about 0 while training looks normal."""
    assert "max_new_tokens" in " ".join(raised([record(truncated_share=0.9)]).values())


def test_an_override_adds_to_a_group_and_loses_nothing() -> None:
    """NeMo RL #2904, #1413: user's overrides lost when FP8 was switched on."""
    before = preset("bf16", **{"grpo.lr": 1e-3, "recipe.correction": "icepop"})
    after = before.override({"recipe": {"rollout": {"linears": True}}})
    assert (after.grpo.lr, after.recipe.correction.name) == (1e-3, "icepop")
    assert before.diff(after) == {"recipe.rollout.linears": (False, True)}


def test_a_bound_without_a_correction_is_refused_when_written() -> None:
    """NeMo RL PR #2544: crash at the first step."""
    with pytest.raises(ConfigError, match=r"recipe\.correction\.cap: .*none has no bound"):
        preset("fp8-rollout", **{"recipe.correction.cap": 2.0})


def test_what_is_named_as_held_elsewhere_is_there() -> None:
    for where in ELSEWHERE.values():
        path, _, name = where.partition("::")
        tests = {node.name for node in ast.parse((Path(__file__).parent / path).read_text()).body
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert name in tests, f"{path} has no {name}"
