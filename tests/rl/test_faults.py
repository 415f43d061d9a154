"""Every fault breaks what it says, in a run or at its own hook, and nothing is broken where none was asked for."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from labkit import gallery, models
from labkit.config import RECIPES, ConfigError, Experiment, Recipe, Sampling, preset
from labkit.config.faults import CASES
from labkit.fp8 import KVScales, LinearFormat
from labkit.fp8.quantization import quantize
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.logprobs import token_logprobs
from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.rl.engine_faults import _FirstScales
from labkit.rl.faults import FAULTS, Faults
from labkit.rl.loop import Loop
from labkit.rollout import Delivery, LocalEngine, RefitError, Request
from labkit.runs.record import StepRecord

SMALL = {
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "eval_prompts": 4,
    "keep_rollouts": 2,
    "sampling.max_new_tokens": 24,
}
D3 = torch.tensor([2.0, 1.0, 0.0, -1.0])  # logits of the bug reports on temperature and top-p


def steps_of(name: str, arm: int, steps: int = 1, **changes) -> list[StepRecord]:
    return list(Loop(gallery.experiments(name, **{**SMALL, "steps": steps, **changes})[arm]).steps())


def deliver(fault: str, *versions: int, scales: KVScales | None = None) -> Iterator[Delivery]:
    """What arrives of refits in which every weight is the version's number."""
    broken = FAULTS[fault]()
    for version in versions:
        weights = {f"model.layers.{layer}.w": torch.full((2,), float(version)) for layer in (0, 1)}
        yield broken.delivery(Delivery(weights, scales, version))


# ---- only by name


def test_the_catalogue_and_the_code_name_the_same_faults() -> None:
    assert {case.name for case in CASES.values() if case.injected} == FAULTS.keys()
    assert all(fault.name == name and fault.detail for name, fault in FAULTS.items())


def test_faults_are_off_everywhere_else() -> None:
    assert Experiment().faults == ()
    assert all(preset(name).faults == () for name in RECIPES)
    experiment = preset("fp8-e2e-kv", **SMALL, steps=1)
    for record in Loop(experiment).steps():
        assert all(component["state"] != "fault" for component in record.active.values())
        assert record.events == []


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("bf16", {"faults": ("scales-droped",)}, "faults: no fault 'scales-droped'; did you mean scales-dropped"),
        ("bf16", {"faults": ("scales-dropped",)}, "can't show while recipe.rollout.kv_cache is False; turn it on"),
        ("fp8-rollout-kv-unit", {"faults": ("scales-dropped",)}, "recipe.recalibration.policy is unit; choose"),
        ("bf16", {"faults": ("raw-logprobs",)}, "sampling.temperature is 1.0; set another one"),
        ("bf16", {"faults": ("top-p-unnormalised",)}, "sampling.top_p is 1.0; lower it"),
        ("bf16", {"faults": ("identity-scale",)}, "recipe.rollout.linears is False; turn it on"),
        ("fp8-e2e", {"faults": ("scale-type-mismatch",)}, "recipe.scaling.scale is pow2; set it to fp32"),
        ("fp8-e2e-tensor", {"faults": ("zero-block",)}, "recipe.scaling.granularity is tensor; choose block"),
        ("bf16", {"faults": ("nan-logprobs", "nan-logprobs")}, "nan-logprobs is given twice"),
        ("bf16", {"faults": ("answers-truncated",)}, "is made of settings"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_that_cannot_show_is_refused(recipe: str, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset(recipe, **changes)


def test_several_faults_act_one_after_the_other_and_are_all_in_the_record() -> None:
    names = ("nan-logprobs", "layer-not-refitted")
    experiment = preset("bf16", **SMALL, steps=2, faults=names)
    start, _, record = Loop(experiment).steps()
    assert start.events == [f"fault on purpose: {name}, {FAULTS[name].detail}" for name in names]
    for name in experiment.faults:
        assert record.active[f"fault.{name}"] == {"state": "fault", "detail": FAULTS[name].detail}
    assert record.metrics["nan_count"] > 0
    assert record.metrics["tokens_differing"] > 0
    with pytest.raises(ConfigError, match="both break the log-probs; run them one at a time"):
        preset("bf16", faults=("nan-logprobs", "logprobs-shifted"))


# ---- what is sampled and what is said about it


def ratios(trainer: Sampling, engine: Sampling, tokens: list[int]) -> list[float]:
    logits, ids = D3.expand(len(tokens), -1), torch.tensor(tokens)
    p, g = (token_logprobs(logits, ids, sampling)[0] for sampling in (trainer, engine))
    return (p - g).exp().tolist()


def test_a_forgotten_temperature_gives_the_reported_ratios() -> None:
    experiment = preset("bf16", **{"sampling.temperature": 0.6}, faults=("temperature-forgotten",))
    trainer = Faults(experiment.faults).trainer(experiment).sampling
    assert ratios(trainer, experiment.sampling, [0, 1, 2, 3]) == pytest.approx([0.793, 1.544, 3.008, 5.858], abs=1e-3)


def test_an_unnormalised_nucleus_gives_the_reported_ratio() -> None:
    experiment = preset("bf16", **{"sampling.top_p": 0.8}, faults=("top-p-unnormalised",))
    trainer = Faults(experiment.faults).trainer(experiment).sampling
    assert ratios(trainer, experiment.sampling, [0, 1]) == pytest.approx([0.8808, 0.8808], abs=1e-4)


def test_shifted_and_missing_logprobs_by_hand() -> None:
    g_BR = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]])
    nothing = torch.zeros(2, dtype=torch.int64)
    rollouts = Rollouts(torch.zeros(2, 5), nothing, torch.tensor([3, 1]), g_BR, nothing.bool(), 2, 0, 0)
    engine = LocalEngine(models.load("tiny").config, Recipe())
    shifted = FAULTS["logprobs-shifted"]().rollouts(rollouts, engine)
    assert shifted.logprobs_BR.tolist() == [[-1.0, -1.0, -2.0], [-4.0, 0.0, 0.0]]
    missing = FAULTS["logprobs-missing"]().logprobs(rollouts, g_BR - 1)
    assert torch.equal(missing.logprobs_BR, g_BR - 1)


# ---- what a refit delivers


def test_dropped_scales_are_one_and_grown_ones_are_half() -> None:
    scales = KVScales(3, (0.5, 1.0), (0.03, 0.0125), (0.25, 0.25))
    (dropped,) = deliver("scales-dropped", 3, scales=scales)
    assert dropped.scales == KVScales.unit(2, version=3)
    (grown,) = deliver("scales-stale-growth", 3, scales=scales)
    assert grown.scales == KVScales(3, (0.25, 0.5), (0.015, 0.00625), (0.125, 0.125))


def test_the_first_layer_keeps_its_first_weights() -> None:
    seen = [{name: float(w[0]) for name, w in sent.weights.items()} for sent in deliver("layer-not-refitted", 4, 5, 6)]
    assert [weights["model.layers.0.w"] for weights in seen] == [4.0, 4.0, 4.0]
    assert [weights["model.layers.1.w"] for weights in seen] == [4.0, 5.0, 6.0]


def test_every_second_refit_is_skipped_and_claimed() -> None:
    seen = list(deliver("one-version-behind", 0, 1, 2, 3, 4))
    assert [float(sent.weights["model.layers.0.w"][0]) for sent in seen] == [0.0, 0.0, 2.0, 2.0, 4.0]
    assert [sent.version for sent in seen] == [0, 1, 2, 3, 4]
    restarted = list(deliver("one-version-behind", 0, 7, 8, 9))  # the policy as loaded, then the checkpoint's
    assert [float(sent.weights["model.layers.0.w"][0]) for sent in restarted] == [0.0, 7.0, 8.0, 8.0]


def test_weights_kept_back_are_copies_of_a_trainer_that_goes_on() -> None:
    live = torch.zeros(2)
    for name in ("layer-not-refitted", "one-version-behind"):
        fault = FAULTS[name]()
        live.zero_()
        fault.delivery(Delivery({"model.layers.0.w": live}, None, 0))
        live += 1
        assert (
            float(fault.delivery(Delivery({"model.layers.0.w": live}, None, 1)).weights["model.layers.0.w"][0]) == 0.0
        )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("scales-dropped", "fp8-rollout-kv"),
        ("scales-stale-growth", "fp8-rollout-kv"),
        ("scales-from-dummy", "fp8-rollout-kv"),
        ("fp8-not-installed", "fp8-rollout"),
        ("identity-scale", "fp8-rollout"),
        ("zero-block", "fp8-rollout"),
        ("layer-not-refitted", "bf16"),
        ("one-version-behind", "bf16"),
        ("weight-scales-stale", "fp8-rollout"),
    ],
)
def test_the_read_back_after_a_refit_would_catch_it(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are the faults for which the proof has to be skipped: with it they can't even start."""
    assert FAULTS[name].unverified
    monkeypatch.setattr(FAULTS[name], "unverified", False)
    experiment = preset(recipe, **SMALL, steps=3, faults=(name,), **{"grpo.lr": 1e-2, "grpo.warmup_steps": 0})
    with pytest.raises(RefitError):
        list(Loop(experiment).steps())


# ---- how the engine holds it


@pytest.mark.parametrize("qk_norm", [True, False])
def test_large_keys_leave_the_function_as_it_was(qk_norm: bool) -> None:
    config = DecoderConfig(32, 64, 96, 2, 4, 2, 16, qk_norm=qk_norm, qkv_bias=not qk_norm)
    torch.manual_seed(0)
    plain = Decoder(config)
    policy = Policy(config, plain.weights(), models.load("tiny").tokenizer, "random", "qwen3")
    keys = []

    def logits(which: Policy) -> torch.Tensor:
        def attend(layer, q, k, v):  # type: ignore[no-untyped-def]
            keys.append(float(k.abs().amax()))
            return models.attention.PaddedAttention(torch.zeros(1, dtype=torch.int64), 8)(layer, q, k, v)

        decoder = which.decoder().requires_grad_(False)
        return decoder.logits(decoder(torch.arange(8)[None], torch.arange(8)[None], attend))

    assert torch.equal(logits(policy), logits(FAULTS["unit-scale-large-k"]().policy(policy)))
    assert keys[2] == 256 * keys[0]


def test_a_scale_of_one_leaves_the_bare_codes() -> None:
    engine = LocalEngine(models.load("tiny").config, preset("fp8-rollout").recipe)
    engine = FAULTS["identity-scale"]().engine(engine)
    name, linear = next((name, linear) for _, name, linear in engine.model.linears() if "down_proj" in name)
    weight = models.load("tiny", torch.bfloat16).weights[name]
    codes = quantize(weight, "e4m3", (128, 128))
    values = codes.codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(linear.precision.weight_operand(weight).float(), values)
    assert values.abs().amax() > 200
    others = [other.precision for _, other_name, other in engine.model.linears() if other_name != name]
    assert all(type(precision) is LinearFormat for precision in others)


def test_old_scales_under_new_codes_halve_a_doubled_weight() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    reload = _FirstScales()
    first, second = (reload(quantize(w, tile=(128, 128)), w).dequantize() for w in (weight, 2 * weight))
    assert torch.equal(first, quantize(weight, tile=(128, 128)).dequantize())
    assert torch.equal(second, first)


def test_a_zero_block_is_fatal_only_to_the_quantiser_that_divides_by_its_amax() -> None:
    pruned = FAULTS["zero-block"]().policy(models.load("tiny")).to(torch.bfloat16)
    (name,) = [name for name, weight in pruned.weights.items() if (weight == 0).float().mean() > 0.1]
    recipe = preset("fp8-rollout").recipe
    sound = LocalEngine(pruned.config, recipe)
    broken = FAULTS["zero-block"]().engine(LocalEngine(pruned.config, recipe))
    for engine in (sound, broken):
        engine.refit(pruned.weights, None, 0)
    assert all(weight.isfinite().all() for _, weight in sound.read_back())
    bad = {name: weight.isnan() for name, weight in broken.read_back() if weight.isnan().any()}
    assert bad.keys() == {name}
    assert bad[name][:128, :128].all()
    assert bad[name].sum() == 128 * 128


def test_a_stale_prefix_equals_a_cold_engine_until_the_weights_change() -> None:
    policy = models.load("tiny").to(torch.bfloat16)
    request = Request(Sampling(), 12, frozenset(policy.tokenizer.eos_ids), 2)
    prompts = [policy.tokenizer.encode(text) for text in ("1+2*3=", "4*5-6+7=")]
    cold = LocalEngine(policy.config, Recipe(), policy.tokenizer.pad_id)
    stale = FAULTS["stale-prefix-cache"]().engine(LocalEngine(policy.config, Recipe(), policy.tokenizer.pad_id))

    def g(engine: LocalEngine) -> torch.Tensor:
        return engine.generate(prompts, request, torch.Generator().manual_seed(0)).logprobs_BR

    for engine in (cold, stale):
        engine.refit(policy.weights, None, 0)
    assert torch.equal(g(cold), g(stale))
    changed = {name: weight * 1.02 for name, weight in policy.weights.items()}
    for engine in (cold, stale):
        engine.refit(changed, None, 1)
    assert not torch.equal(g(cold), g(stale))
    assert stale.state().weight_version == 1


@pytest.mark.parametrize("names", [("identity-scale", "stale-prefix-cache"), ("stale-prefix-cache", "identity-scale")])
def test_an_engine_keeps_the_faults_it_got_before(names: tuple[str, ...]) -> None:
    policy = models.load("tiny").to(torch.bfloat16)
    engine = Faults(names).engine(LocalEngine(policy.config, preset("fp8-rollout").recipe))
    engine.refit(policy.weights, None, 0)
    for held in (engine, engine.first):
        assert max(float(weight.abs().amax()) for _, weight in held.read_back()) > 200


# ---- in a run

Effect = Callable[[dict[str, float]], bool]
EFFECTS: dict[str, Effect] = {
    "scales-dropped": lambda m: m["gen_kl_error"] < 1e-3,  # QK-norm: a scale of 1 does no harm
    "scales-stale-growth": lambda m: m["kv_saturation_k"] > 0.02 and m["token_mult_prob_error"] > 1.1,
    "scales-from-dummy": lambda m: m["kv_saturation_v"] > 0.02,
    "unit-scale-large-k": lambda m: m["kv_saturation_k"] > 0.05 and m["gen_kl_error"] > 4e-4,
    "wrong-temperature": lambda m: m["token_mult_prob_error"] == 1.0 and m["surprisal_gap"] < -0.02,
    "temperature-forgotten": lambda m: m["token_mult_prob_error"] > 1.02 and m["surprisal_gap"] < -0.02,
    "raw-logprobs": lambda m: m["sampling_importance_ratio"] > 1.01,
    "logprobs-divided": lambda m: m["sampling_importance_ratio"] > 1.05 and m["min_raw"] > 0.999,
    "top-p-unnormalised": lambda m: m["sampling_importance_ratio"] < 0.99 and m["max_raw"] < 1.001,
    "logprobs-shifted": lambda m: m["token_mult_prob_error"] > 1.3 and m["prob_correlation"] < 0.5,
    "nan-logprobs": lambda m: m["nan_count"] > 2 and math.isfinite(m["loss"]),
    "logprobs-missing": lambda m: m["tokens_differing"] == 0.0,
    "layer-not-refitted": lambda m: m["tokens_differing"] > 0.5,
    "one-version-behind": lambda m: m["tokens_differing"] > 0.5,
    "stale-prefix-cache": lambda m: m["tokens_differing"] > 0.5,
    "fp8-not-installed": lambda m: m["tokens_differing"] == 0.0,
    "identity-scale": lambda m: m["token_mult_prob_error"] > 100 and m["ess"] < 0.5,
    "weight-scales-stale": lambda m: m["tokens_differing"] > 0.5,
    "scale-type-mismatch": lambda m: m["tokens_differing"] > 0.5,
}


AFTER_A_REFIT = ("layer-not-refitted", "one-version-behind", "stale-prefix-cache", "weight-scales-stale")


@pytest.mark.parametrize("name", EFFECTS)
def test_the_effect_shows_in_a_small_run(name: str) -> None:
    changes = {"grpo.lr": 2e-3, "grpo.warmup_steps": 0} if name in AFTER_A_REFIT else {}
    record = steps_of(name, arm=1, steps=2 if name in AFTER_A_REFIT else 1, **changes)[-1]
    assert EFFECTS[name](record.metrics)
    assert math.isfinite(record.metrics["loss"])


@pytest.mark.parametrize("name", ["layer-not-refitted", "one-version-behind", "stale-prefix-cache"])
def test_the_effect_shows_where_only_adapters_move(name: str) -> None:
    changes = {"grpo.lr": 2e-2, "grpo.warmup_steps": 0, "lora.rank": 8}
    assert EFFECTS[name](steps_of(name, arm=1, steps=2, **changes)[-1].metrics)


def test_scales_measured_on_a_dummy_are_those_of_the_policy_with_its_adapters() -> None:
    (start,) = steps_of("scales-from-dummy", arm=1, steps=1, **{"lora.rank": 8})[1:]
    (full,) = steps_of("scales-from-dummy", arm=1, steps=1)[1:]
    assert start.kv_scales == full.kv_scales, "before the first update adapters change nothing"


def test_a_zero_block_ends_the_run_at_once() -> None:
    with pytest.raises(RuntimeError, match="logits hold NaN"):
        steps_of("zero-block", arm=1)


def test_every_injected_fault_is_seen_in_a_run() -> None:
    assert {*EFFECTS, "zero-block"} == FAULTS.keys()


def test_calibration_takes_large_keys_in() -> None:
    record = steps_of("unit-scale-large-k", arm=1, **{"recipe.recalibration.policy": "every-step"})[-1]
    assert record.metrics["token_mult_prob_error"] < 1.05
    assert record.metrics["kv_saturation_k"] < 1e-3


def test_the_record_shows_what_really_arrived() -> None:
    dropped = steps_of("scales-dropped", arm=1)[-1]
    assert dropped.kv_scales == {"q": [1.0] * 4, "k": [1.0] * 4, "v": [1.0] * 4}
    bare = steps_of("fp8-not-installed", arm=1)[-1]
    assert bare.active["rollout.linears"]["state"] == "bf16"


def test_held_out_accuracy_is_measured_without_the_fault() -> None:
    sound, broken = (steps_of("identity-scale", arm)[0].metrics["heldout_accuracy"] for arm in (0, 1))
    assert sound == broken > 0


def test_a_fault_with_a_memory_survives_a_resume() -> None:
    _, experiment = gallery.experiments("layer-not-refitted", **SMALL, steps=3)
    whole = list(Loop(experiment).steps())
    first = Loop(experiment)
    stream = first.steps()
    for _ in range(2):
        next(stream)
    second = Loop(experiment)
    second.load_state_dict(first.state_dict())
    rest = list(second.steps())
    assert [record.metrics for record in rest] == [record.metrics for record in whole[2:]]
