"""Each alarm against records that show its failure and records that don't; sound runs of the real loop have none."""

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest
import torch

from labkit import rl
from labkit.config import Correction, Experiment, Filter, preset
from labkit.rl.loop import Loop
from labkit.runs.alarms import RULES, Alarm, alarms, alarms_in_force, correction, engine, learning, mismatch
from labkit.runs.record import StepRecord
from labkit.runs.store import Switch

SOUND: dict[str, float | None] = {
    "accuracy": 0.4, "reward": 0.4, "truncated_share": 0.02, "zero_advantage_share": 0.1, "entropy": 0.2, "lr": 1e-4,
    "grad_norm": 0.3, "token_mult_prob_error": 1.004, "tokens_differing": 0.9, "sampling_importance_ratio": 1.0005,
    "sampling_ratio_se": 3e-4, "surprisal_gap": 0.01, "surprisal_gap_se": 0.01, "num_tokens": 2000.0,
    "num_valid_samples": 128.0, "nan_count": 0.0, "loss_nan_count": 0.0, "ess": 0.999, "kept_share": 1.0,
    "probs_ratio_min": 1.0, "probs_ratio_max": 1.0, "codes_changed": 0.04, "staleness": 0.0,
    "kv_saturation_k": 0.0, "kv_saturation_v": 0.0, "heldout_accuracy": None,
}  # fmt: skip
FP8_ROLLOUT = {"rollout.linears": "emulated", "rollout.kv_cache": "emulated", "train.fprop": "bf16"}
EXPERIMENT = preset("fp8-rollout-kv")
BOUNDS = {"recipe.correction.low", "recipe.correction.high"}  # names for places inside a correction


def step(
    number: int, active: dict[str, str] = FP8_ROLLOUT, scale_version: int | None = None, **metrics: Any
) -> StepRecord:
    version = number - 1
    return StepRecord(
        step=number, weight_version=version, time=0.0, elapsed=0.0, metrics={**SOUND, **metrics}, timings={},
        tokens={"generated": 2000}, active={name: {"state": state, "detail": ""} for name, state in active.items()},
        engine={"weight_version": version, "scale_version": version if scale_version is None else scale_version},
    )  # fmt: skip


def run_of(steps: int, **metrics: Any) -> list[StepRecord]:
    return [step(number, **metrics) for number in range(1, steps + 1)]


def only(raised: list[Alarm], name: str) -> Alarm:
    assert [alarm.name for alarm in raised] == [name]
    return raised[0]


def batch(g: torch.Tensor, p: torch.Tensor, settings: Correction) -> dict[str, float]:
    """What a batch with these log-probs would leave in its record."""
    mask = torch.ones_like(g)
    weights = rl.correction_from(settings)(g, p, mask)
    return rl.mismatch(g, p, mask, weights=weights) | rl.weight_statistics(weights, mask)


# ---- sound runs


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rollout-tis", "fp8-e2e-kv"])
def test_a_sound_run_has_no_alarm(recipe: str) -> None:
    experiment = preset(recipe, steps=3, eval_every=3, eval_prompts=16, threads=1, **{"grpo.prompts_per_step": 4})
    records = list(Loop(experiment).steps())
    assert alarms(records, experiment) == []


def test_a_hundred_sound_steps_have_no_alarm_with_or_without_the_experiment() -> None:
    records = [
        step(n, token_mult_prob_error=1.004 + 0.001 * math.sin(n), accuracy=0.4 + 0.005 * n, entropy=0.2 * 0.98**n)
        for n in range(1, 101)
    ]
    assert alarms(records) == alarms(records, EXPERIMENT) == []


def test_a_run_without_steps_has_no_alarm(record: Any) -> None:
    assert alarms([]) == alarms([record(0)], EXPERIMENT) == []


def test_records_that_measured_little_raise_nothing(record: Any) -> None:
    assert alarms([record(n) for n in range(6)]) == []


# ---- the two sides disagree


def test_a_mismatch_above_what_is_acceptable() -> None:
    alarm = only(alarms([*run_of(4), *(step(n, token_mult_prob_error=1.08) for n in range(5, 11))]), "mismatch-level")
    assert (alarm.step, alarm.last_step, alarm.severity) == (7, 10, "warning")
    assert "1.08" in alarm.what
    assert "recipe.train.fprop" in alarm.cure
    assert alarms([*run_of(4), step(5, token_mult_prob_error=1.5), step(6)]) == [], "one odd batch"


def test_a_mismatch_without_a_difference_in_precision_is_put_down_to_the_refit() -> None:
    alike = {"rollout.linears": "bf16", "train.fprop": "bf16"}
    alarm = only(alarms(run_of(6, active=alike, token_mult_prob_error=1.2)), "mismatch-level")
    assert "refit" in alarm.cure
    assert "other weights" in alarm.cause


@pytest.mark.parametrize("value", [1e10, math.inf])
def test_a_mismatch_beyond_all_measure_still_reads_well(value: float) -> None:
    alarm = only(alarms(run_of(6, token_mult_prob_error=value)), "mismatch-level")
    assert alarm.severity == "critical"
    assert f"{value:.4g} " in alarm.what


def test_any_mismatch_where_there_can_be_none() -> None:
    alike = {"rollout.linears": "emulated", "train.fprop": "emulated", "rollout.kv_cache": "bf16"}
    records = [
        step(1, active=alike, token_mult_prob_error=1.0, tokens_differing=0.0),
        step(2, active=alike, token_mult_prob_error=1.0004, tokens_differing=0.7),
    ]
    alarm = only(alarms(records, preset("fp8-e2e")), "not-exact")
    assert (alarm.step, "70%" in alarm.what) == (2, True)
    for changes in (
        {"trainer_attention": "sdpa"},
        {"grpo.staleness": 1},
        {"recipe.scaling.granularity": "tensor"},
        {"engine": "vllm"},
        {"device": "cuda"},
        {"device": "cuda", "trainer": "te"},
    ):
        assert alarms(records, preset("fp8-e2e", **changes)) == [], changes
    assert alarms(records) == []


def test_a_mismatch_that_grows() -> None:
    growing = [step(n, token_mult_prob_error=1 + 0.001 * 1.2**n) for n in range(1, 16)]
    alarm = only(alarms(growing), "mismatch-trend")
    assert (alarm.step, alarm.last_step) == (11, 15)
    assert alarms(growing[:11]) == [], "too few steps to tell"
    assert alarms([step(n, token_mult_prob_error=1 + 1e-7 * 1.4**n) for n in range(1, 16)]) == [], "roundings"


def test_top_p_that_only_the_sampler_renormalises() -> None:
    """TRL#6789: logits [2, 1, 0, -1] and top_p 0.8 give r = .8808 for both tokens of the nucleus."""
    p = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(-1)[None, :2]
    alarm = only(alarms([step(1, **{**batch(p - p.logsumexp(-1), p, Correction()), "token_mult_prob_error": 1.0})]),
                 "sampler-ratio")  # fmt: skip
    assert alarm.severity == "critical"
    assert "0.8808" in alarm.what
    assert "top_p" in alarm.cure


def test_a_mean_ratio_off_one_within_its_noise_is_no_alarm() -> None:
    assert alarms(run_of(6, sampling_importance_ratio=0.9, sampling_ratio_se=0.04)) == []
    assert alarms(run_of(6, sampling_importance_ratio=0.985, sampling_ratio_se=0.001)) == []


def test_tokens_that_are_drawn_otherwise_than_their_log_probs_say() -> None:
    """T = 0.6 reported at T = 1: nothing else shows it, g = p."""
    silent = {"token_mult_prob_error": 1.0, "surprisal_gap": -0.09, "surprisal_gap_se": 0.006}
    alarm = only(alarms(run_of(3, **silent)), "sampler-surprisal")
    assert alarm.severity == "critical"
    assert "45% below the entropy" in alarm.what
    noise = [step(n, surprisal_gap=0.03 * (-1) ** n, surprisal_gap_se=0.01) for n in range(1, 9)]
    assert alarms(noise) == []
    noisy_engine = run_of(3, surprisal_gap=0.1, surprisal_gap_se=0.006, token_mult_prob_error=1.5)
    assert only(alarms(noisy_engine), "mismatch-level"), "which explains the gap"


def test_a_wrong_temperature_is_noticed_in_a_real_run() -> None:
    experiment = preset("bf16", steps=1, eval_prompts=8, threads=1, **{"grpo.prompts_per_step": 8})
    loop = Loop(experiment)
    cold = loop.request.sampling.override({"temperature": 0.3})
    loop.batches.request = dataclasses.replace(loop.request, sampling=cold)
    names = [alarm.name for alarm in alarms(list(loop.steps()), experiment)]
    assert "mismatch-level" in names


def test_a_mismatch_of_exactly_nothing_where_there_must_be_one() -> None:
    blind = {"token_mult_prob_error": 1.0, "tokens_differing": 0.0}
    assert only(alarms(run_of(3, **blind)), "blind-correction").severity == "critical"
    both = {"rollout.linears": "emulated", "train.fprop": "emulated", "rollout.kv_cache": "bf16"}
    assert alarms(run_of(3, active=both, **blind)) == []


def test_a_ratio_off_one_before_anything_was_updated() -> None:
    off = {"probs_ratio_min": 0.97, "probs_ratio_max": 1.02}
    alarm = only(alarms(run_of(3, **off), EXPERIMENT), "ratio-off-one")
    assert "0.03" in alarm.what
    assert alarms(run_of(3, **off), EXPERIMENT.override({"grpo.minibatches": 2})) == []
    bypass = EXPERIMENT.override({"recipe.correction": Correction(name="custom", old_policy="rollout")})
    assert alarms(run_of(3, **off), bypass) == []
    assert alarms(run_of(3, **off)) == [], "without the experiment nobody knows"


# ---- what the correction does


def test_an_effective_sample_size_too_small() -> None:
    alarm = only(alarms([*run_of(3), step(4, ess=0.21)]), "ess-low")
    assert (alarm.step, alarm.last_step) == (4, 4)
    assert "0.21" in alarm.what
    assert only(alarms(run_of(2, ess=0.21, kept_share=0.25)), "mostly-rejected"), "which explains it"


def test_a_window_that_rejects_every_response_is_answered_with_one_that_would_not() -> None:
    """verl#3984: G = .9868 for all responses, outside .99 to 1.001."""
    settings = Correction(name="geometric-mask", low=0.99, high=1.001)
    g = torch.zeros(4, 5, dtype=torch.float64)
    metrics = batch(g, g + math.log(0.9868), settings)
    experiment = preset("fp8-rollout").override({"recipe.correction": settings})
    alarm = only(alarms([step(1, **metrics)], experiment), "batch-rejected")
    assert alarm.what.startswith("batch fully rejected once")
    assert "set recipe.correction.low to 0.9867 and recipe.correction.high to 1" in alarm.cure
    wider = settings.override({"low": 0.9867, "high": 1.0})
    assert batch(g, g + math.log(0.9868), wider)["kept_share"] == 1.0


def test_nothing_left_of_a_batch() -> None:
    """verl#7559: r = 10, 20, 0.01 under IcePop."""
    p = torch.tensor([[10.0, 20.0, 0.01]], dtype=torch.float64).log()
    metrics = batch(torch.zeros_like(p), p, Correction(name="icepop"))
    assert metrics["ess"] == metrics["kept_share"] == 0.0
    raised = alarms([step(1, **metrics)])
    assert {alarm.name for alarm in raised} == {"batch-rejected", "mismatch-level"}
    assert "recipe.correction.high to 19" in raised[0].cure


def test_half_of_the_batch_rejected_by_a_filter_of_your_own() -> None:
    """The advice names the filter that rejects most, and only the bound that it has."""
    filters = (Filter(over="max", low=1e-4), Filter(statistic="k3", over="mean", high=4e-4))
    experiment = preset("fp8-rollout").override({"recipe.correction": Correction(name="custom", filters=filters)})
    p = torch.linspace(-0.08, 0.08, 40, dtype=torch.float64)[:, None].expand(40, 6)
    metrics = batch(torch.zeros_like(p), p, experiment.recipe.correction)
    alarm = only(alarms([step(1, **metrics)], experiment), "mostly-rejected")
    assert "recipe.correction.filters.1.high to 0.00" in alarm.cure
    assert "filters.1.low" not in alarm.cure


# ---- the engine


def test_tokens_without_a_log_prob() -> None:
    alarm = only(alarms([*run_of(2), step(3, nan_count=7.0), step(4, loss_nan_count=2.0)]), "nan-tokens")
    assert (alarm.step, alarm.last_step, alarm.severity) == (3, 4, "critical")
    assert "7 sampled tokens" in alarm.what
    assert alarms([step(1, loss_nan_count=math.nan)]) == []


@pytest.mark.parametrize(("share", "severity"), [(0.004, "warning"), (0.2, "critical")])
def test_keys_that_the_scale_clips(share: float, severity: str) -> None:
    alarm = only(alarms([*run_of(2), *(step(n, kv_saturation_k=share) for n in (3, 4))]), "kv-saturation")
    assert (alarm.severity, alarm.step) == (severity, 3)
    assert f"{share:.2%} of the cached keys" in alarm.what
    assert "recalibration" in alarm.cure


def test_scales_from_the_prompts_alone_may_clip_a_little() -> None:
    assert alarms([step(1, kv_saturation_v=0.002), *run_of(3)[1:]]) == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"policy": "every-step"}, ["stale-scales"]),
        ({"policy": "every-k-steps", "every": 4}, []),
        ({"policy": "every-k-steps", "every": 3}, ["stale-scales"]),
        ({"policy": "first-step"}, []),
    ],
)
def test_scales_older_than_the_policy_allows(policy: dict, expected: list[str]) -> None:
    experiment = EXPERIMENT.override({f"recipe.recalibration.{key}": value for key, value in policy.items()})
    records = [step(n, scale_version=0) for n in range(1, 5)]
    raised = alarms(records, experiment)
    assert [alarm.name for alarm in raised] == expected
    assert all("3 steps older" in alarm.what for alarm in raised)


def test_scales_that_fell_back_to_the_default() -> None:
    """NeMo RL#3225: with QK-norm nothing else shows it."""
    lost = [dataclasses.replace(r, kv_scales={"q": [1.0], "k": [1.0, 1.0], "v": [1.0, 1.0]}) for r in run_of(3)]
    assert only(alarms(lost, EXPERIMENT), "scales-default").severity == "critical"
    assert alarms(lost, EXPERIMENT.override({"recipe.recalibration.policy": "unit"})) == []
    calibrated = [dataclasses.replace(r, kv_scales={"q": [1.0], "k": [1.0], "v": [0.03]}) for r in run_of(3)]
    assert alarms(calibrated, EXPERIMENT) == []


def test_fp8_that_was_asked_for_and_is_not_there() -> None:
    """NeMo RL#3755: hooks that match no layer."""
    alarm = only(alarms(run_of(2, active={**FP8_ROLLOUT, "rollout.linears": "bf16"}), EXPERIMENT), "not-active")
    assert alarm.severity == "critical"
    assert "rollout.linears (2 steps)" in alarm.what
    assert "kv_cache" not in alarm.what


def test_weights_that_did_not_arrive() -> None:
    late = [*run_of(2), step(3, staleness=1.0), step(4)]
    assert only(alarms(late, EXPERIMENT), "stale-weights").step == 3
    assert alarms(late, EXPERIMENT.override({"grpo.staleness": 1})) == []


def test_updates_too_small_for_fp8_codes() -> None:
    alarm = only(alarms(run_of(6, codes_changed=2e-6)), "codes-frozen")
    assert "2.0e-06" in alarm.what
    assert alarms(run_of(6, codes_changed=2e-6, lr=0.0)) == [], "nothing was to be learned"
    assert alarms(run_of(6, codes_changed=None)) == []
    frozen = preset("fp8-rollout", **{"lora.rank": 8})
    assert alarms(run_of(6, codes_changed=0.0), frozen) == [], "a frozen base is meant to stay"


# ---- learning


def test_answers_cut_off() -> None:
    alarm = only(alarms(run_of(5, truncated_share=0.6)), "truncated")
    assert "60%" in alarm.what
    assert "sampling.max_new_tokens" in alarm.cure


def test_no_group_to_learn_from() -> None:
    alarm = only(alarms(run_of(6, zero_advantage_share=1.0, accuracy=0.0, grad_norm=None)), "no-advantage")
    assert "accuracy 0.00" in alarm.what
    assert alarms([*run_of(4), step(5, zero_advantage_share=1.0), step(6)]) == []


def test_updates_that_were_skipped_for_their_gradient() -> None:
    def with_event(event: str) -> list[StepRecord]:
        return [*run_of(2), dataclasses.replace(step(3), events=[event])]

    alarm = only(alarms(with_event("update skipped: the gradient of lm_head is not finite")), "update-skipped")
    assert "the gradient of lm_head is not finite" in alarm.what
    assert alarms(with_event("update skipped: no sequence of this mini-batch carries a gradient")) == []


def test_entropy_that_collapses_or_surges() -> None:
    collapsed = [step(n, entropy=0.2 if n < 6 else 0.004) for n in range(1, 16)]
    assert only(alarms(collapsed), "entropy-collapse").last_step == 15
    solved = [step(n, entropy=0.2 if n < 6 else 0.004, accuracy=0.5 if n < 6 else 0.98) for n in range(1, 16)]
    assert alarms(solved) == []
    surging = [step(n, entropy=0.2 * 1.2**n, surprisal_gap=0.0) for n in range(1, 16)]
    assert only(alarms(surging), "entropy-surge").severity == "warning"


def test_rollouts_that_get_better_while_the_policy_does_not() -> None:
    def records(last: float) -> list[StepRecord]:
        start = StepRecord(
            step=0, weight_version=0, time=0.0, elapsed=0.0, metrics={"heldout_accuracy": 0.5}, timings={}, tokens={},
            active={}, engine={"weight_version": 0, "scale_version": 0},
        )  # fmt: skip
        trained = [step(n, accuracy=0.5 + 0.02 * n) for n in range(1, 20)]
        return [start, *trained, step(20, accuracy=0.9, heldout_accuracy=last)]

    later = [step(n, accuracy=0.95) for n in range(21, 30)]
    assert alarms([*records(0.82), *later], EXPERIMENT) == [], "rollouts after the evaluation are of a later policy"
    fallen = alarms(records(0.3), EXPERIMENT)
    assert [(alarm.name, alarm.severity) for alarm in fallen] == [
        ("sampler-fitted", "critical"), ("accuracy-fell", "critical"),
    ]  # fmt: skip
    alarm = only(alarms(records(0.55), EXPERIMENT), "sampler-fitted")
    assert (alarm.severity, alarm.step) == ("warning", 20)
    assert alarms(records(0.82), EXPERIMENT) == []


def test_a_spike_that_the_median_passes_over_is_told() -> None:
    records = [step(n, token_mult_prob_error=130.0 if n == 7 else 1.004, max_abs_diff=12.0) for n in range(1, 11)]
    alarm = only(alarms(records, EXPERIMENT), "mismatch-spike")
    assert (alarm.step, alarm.last_step) == (7, 7)
    assert "TMPE of 130 in step 7" in alarm.what
    above = [step(n, token_mult_prob_error=130.0 if n == 7 else 1.4) for n in range(1, 11)]
    assert "130 in step 7 alone" in only(alarms(above, EXPERIMENT), "mismatch-level").what


# ---- all of them


def test_alarms_of_a_broken_run_say_what_to_do_and_the_worst_comes_first() -> None:
    broken = run_of(
        12, token_mult_prob_error=1e4, nan_count=1.0, ess=0.1, kv_saturation_k=0.3, truncated_share=0.5,
        zero_advantage_share=1.0, codes_changed=0.0,
    )  # fmt: skip
    raised = alarms(broken, EXPERIMENT)
    assert len(raised) == 7
    order = [alarm.severity for alarm in raised]
    assert order == sorted(order), "critical before warning"
    for alarm in raised:
        assert alarm.name in RULES
        assert all(len(text) > 20 for text in (alarm.what, alarm.cause, alarm.cure)), alarm.name
        assert any(character.isdigit() for character in alarm.what), alarm.name
        assert str(alarm).startswith(f"{alarm.severity}: {alarm.name}, steps 1 to 12\n")


def test_cures_name_settings_that_exist(small: Experiment) -> None:
    """Every group.setting in the text of a rule can be set."""
    text = "".join(inspect.getsource(module) for module in (correction, engine, learning, mismatch))
    for path in set(re.findall(r"\b((?:recipe|grpo|sampling)\.[a-z_0-9.]*[a-z_0-9])", text)) - BOUNDS:
        node: Any = small
        for part in path.split("."):
            assert hasattr(node, part), path
            node = getattr(node, part)


def test_a_window_suggested_is_one_that_can_be_set(small: Experiment) -> None:
    for name in ("icepop", "sequence-mask", "geometric-mask"):
        experiment = small.override({"recipe.correction": {"name": name, "low": 1.0, "high": 1.0}})
        g = torch.zeros(10, 3, dtype=torch.float64)
        p = g + torch.linspace(0.1, 0.3, 10, dtype=torch.float64)[:, None]
        (alarm,) = [a for a in alarms([step(1, **batch(g, p, experiment.recipe.correction))], experiment)
                    if a.name == "batch-rejected"]  # fmt: skip
        found = dict(re.findall(r"(recipe\.correction\.\w+) to ([\d.]+)", alarm.cure))
        changed = experiment.override({key: float(value.rstrip(".")) for key, value in found.items()})
        assert batch(g, p, changed.recipe.correction)["kept_share"] >= 0.8, name


# ---- after a switch


def test_the_recipe_in_force_is_what_a_step_is_held_to() -> None:
    off = dict.fromkeys(FP8_ROLLOUT, "bf16")
    records = [*run_of(2), *(step(number, off, tokens_differing=0.0, token_mult_prob_error=1.0) for number in (3, 4))]
    to = Switch(3, 1, {}, preset("bf16").recipe, 0.0)
    assert "not-active" in [alarm.name for alarm in alarms_in_force(records, EXPERIMENT, [])]
    assert alarms_in_force(records, EXPERIMENT, [to]) == []
    assert alarms_in_force([step(1, off), *records[2:]], EXPERIMENT, [to]) == [], "step 1 was before it"
    assert alarms_in_force(records[:2], EXPERIMENT, [to]) == [], "no step under it yet"


def test_the_kernels_of_vllm_are_named_as_a_cause() -> None:
    records = run_of(6, token_mult_prob_error=1.2)
    alarm = only(alarms(records, preset("bf16", engine="vllm")), "mismatch-level")
    assert "vLLM adds up and rounds otherwise" in alarm.cause
    assert not any("vLLM" in alarm.cause for alarm in alarms(records, preset("bf16")))
