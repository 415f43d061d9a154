"""The whole loop on the shipped tiny policy, a few steps each."""

import json
import math
from pathlib import Path

import pytest

from labkit.config import ConfigError, Experiment, Recipe, preset
from labkit.rl.loop import Loop
from labkit.runs.record import StepRecord

SMALL = {
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "eval_prompts": 8,
    "keep_rollouts": 2,
    "sampling.max_new_tokens": 40,
}
LORA = {"lora.rank": 8, "grpo.lr": 2e-3}
TIMES = {"time", "elapsed", "timings"}


def experiment(recipe: str, steps: int = 2, **changes) -> Experiment:
    return preset(recipe, steps=steps, eval_every=steps, **{**SMALL, **changes})


def run(recipe: str, steps: int = 2, **changes) -> list[StepRecord]:
    return list(Loop(experiment(recipe, steps, **changes)).steps())


def without_times(record: StepRecord) -> dict:
    return {key: value for key, value in vars(record).items() if key not in TIMES}


@pytest.mark.parametrize("recipe", ["bf16", "fp8-e2e", "fp8-e2e-e5m2-grads", "fp8-e2e-row"])
def test_a_recipe_that_treats_both_sides_alike_has_exactly_no_mismatch(recipe: str) -> None:
    for record in run(recipe, steps=3)[1:]:
        assert record.metrics["token_mult_prob_error"] == 1.0
        assert record.metrics["gen_kl_error"] == 0.0
        assert record.metrics["tokens_differing"] == 0.0
        assert record.metrics["ess"] == 1.0


def test_a_frozen_base_is_quantised_and_sent_once_and_agrees_without_a_correction() -> None:
    loop = Loop(experiment("fp8-frozen-base", 3, **LORA))
    brought: list[int] = []
    refit = loop.engine.refit
    loop.engine.refit = lambda weights, *rest: (brought.append(len(weights)), refit(weights, *rest))  # type: ignore
    start, *trained = loop.steps()
    assert start.active["train.adapters"]["detail"].startswith("rank 8 on 28 of 29 layers, ")
    for record in trained:
        assert record.metrics["token_mult_prob_error"] == 1.0
        assert record.metrics["tokens_differing"] == 0.0
        assert record.metrics["grad_norm"] > 0
    assert [record.metrics["codes_changed"] for record in trained] == [None, 0.0, 0.0]
    assert brought == [2 * 28] * 3


@pytest.mark.parametrize("recipe", ["fp8-rollout", "fp8-rollout-kv", "fp8-e2e-kv"])
def test_fp8_on_the_rollout_side_alone_shows_as_mismatch(recipe: str) -> None:
    for record in run(recipe)[1:]:
        assert 1.0 < record.metrics["token_mult_prob_error"] < 1.2
        assert record.metrics["tokens_differing"] > 0.5


def test_unit_scales_are_recorded_and_a_clipping_scale_hurts() -> None:
    unit = run("fp8-rollout-kv-unit")
    assert unit[1].kv_scales == {"q": [1.0] * 4, "k": [1.0] * 4, "v": [1.0] * 4}
    calibrated = run("fp8-rollout-kv")[1].metrics["gen_kl_error"]
    clipped = run("fp8-rollout-kv", **{"recipe.recalibration.margin": 0.3})[1].metrics["gen_kl_error"]
    assert clipped > 10 * calibrated


def test_the_records_tell_the_whole_step() -> None:
    start, *steps = run("fp8-e2e-kv")
    assert start.step == 0
    assert set(start.metrics) == {"heldout_accuracy"}
    assert steps[-1].metrics["heldout_accuracy"] is not None
    record = steps[0]
    for phase in ("generate", "reward", "logprobs", "update", "recalibrate", "refit", "verify"):
        assert record.timings[phase] > 0, phase
    assert record.tokens["generated"] == record.metrics["num_tokens"]
    assert record.tokens["padded"] >= record.tokens["trained"] > 0
    assert record.active.pop("train.attention")["state"] == "bf16"
    assert {name: component["state"] for name, component in record.active.items()} == {
        name: "emulated"
        for name in (
            "rollout.linears", "rollout.kv_cache", "rollout.attention", "train.fprop", "train.dgrad", "train.wgrad",
        )
    }  # fmt: skip
    (sample, _) = record.samples
    assert len(sample["g"]) == len(sample["p"]) == len(sample["tokens"])
    assert sample["prompt"].endswith("=")
    for name, value in record.metrics.items():
        assert value is None or not math.isnan(value), name


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ({"policy": "every-step"}, [0, 1, 2, 3]),
        ({"policy": "every-k-steps", "every": 2}, [0, 0, 2, 2]),
        ({"policy": "first-step"}, [0, 1, 1, 1]),
        ({"policy": "unit"}, [0, 0, 0, 0]),
        ({"policy": "engine"}, [0, 1, 2, 3]),
    ],
)
def test_scales_are_as_old_as_the_policy_says(policy: dict, versions: list[int]) -> None:
    changes = {f"recipe.recalibration.{key}": value for key, value in policy.items()}
    records = run("fp8-rollout-kv", steps=4, **changes)[1:]
    assert [record.engine["scale_version"] for record in records] == versions
    assert [record.engine["weight_version"] for record in records] == [0, 1, 2, 3]
    distinct = {tuple(record.kv_scales["k"]) for record in records if record.kv_scales}
    assert len(distinct) == len(set(versions))


def test_stale_weights_reach_the_engine_as_late_as_asked() -> None:
    records = run("fp8-rollout-kv", steps=5, **{"grpo.staleness": 2, "grpo.lr": 1e-3, "grpo.warmup_steps": 0})[1:]
    assert [record.engine["weight_version"] for record in records] == [0, 0, 0, 1, 2]
    assert [record.engine["scale_version"] for record in records] == [0, 0, 0, 1, 2]
    assert [record.metrics["staleness"] for record in records] == [0, 1, 2, 2, 2]
    fresh, stale = records[0].metrics["gen_kl_error"], records[-1].metrics["gen_kl_error"]
    assert stale > 10 * fresh, "weights two large updates old are further away than FP8 makes them"


@pytest.mark.parametrize(
    "correction",
    ["bypass", "verl/bypass_pg_is", "on-policy", "gspo", "cispo", "prime-rl/dppo", "off-policy-mask", "slime/mis"],
)
def test_every_kind_of_objective_trains(correction: str) -> None:
    changes = {"recipe.correction": correction, "grpo.minibatches": 2, "grpo.lr": 1e-3, "grpo.warmup_steps": 0}
    for record in run("fp8-rollout", steps=2, **changes)[1:]:
        assert math.isfinite(record.metrics["loss"])
        assert record.metrics["grad_norm"] > 0
        assert record.events == []


def test_calibrated_clipping_moves_the_bounds_when_due() -> None:
    changes = {
        "recipe.correction": {"name": "custom", "weight": "token", "calibrate_clip_every": 2},
        "grpo.minibatches": 4, "grpo.lr": 3e-3, "grpo.warmup_steps": 0,
    }  # fmt: skip
    bounds = [(r.metrics["clip_low"], r.metrics["clip_high"]) for r in run("fp8-e2e", steps=3, **changes)[1:]]
    assert bounds[0] == (0.2, 0.28), "those in force in step 1, after which they are calibrated"
    assert bounds[1] != bounds[0]
    assert bounds[2] == bounds[1], "step 2 is not due"


def test_the_verdict_in_force_is_that_on_the_policy_as_it_now_is() -> None:
    """A first update that moves every response out of the window leaves the second mini-batch nothing to learn."""
    changes = {"recipe.correction.name": "verl/bypass_pg_geo_rs", "grpo.minibatches": 2, "grpo.warmup_steps": 0}
    _, still = run("bf16", steps=1, **changes, **{"grpo.lr": 0.0})
    _, moved = run("bf16", steps=1, **changes, **{"grpo.lr": 0.3})
    assert still.events == []
    (event,) = moved.events
    assert event.startswith("update skipped: every sequence was rejected by verl/bypass_pg_geo_rs")


def test_a_switch_of_something_else_leaves_a_calibrated_clip_alone() -> None:
    loop = Loop(experiment("fp8-e2e", steps=2, **{"recipe.correction.name": "calibrated-clip"}))
    assert [record.step for record, _ in zip(loop.steps(), range(2), strict=False)] == [0, 1]
    calibrated, start = loop.clip, Loop(loop.experiment).clip
    assert calibrated != start
    loop.switch(loop.recipe.override({"train.wgrad": False}))
    assert loop.clip == calibrated
    loop.switch(loop.recipe.override({"correction": {"name": "tis"}}))
    assert loop.clip != calibrated


def after_switch(recipe: str, to: Recipe, steps: int = 4, at: int = 2, **changes) -> list[StepRecord]:
    loop = Loop(experiment(recipe, steps, **changes))
    records = []
    for record in loop.steps():
        records.append(record)
        if record.step == at:
            loop.switch(to)
    return records


def test_a_switched_recipe_rules_from_the_next_step_on_and_is_in_the_record() -> None:
    to = preset("fp8-rollout-kv").recipe
    records = after_switch("bf16", to)
    assert [record.recipe_version for record in records] == [0, 0, 0, 1, 1]
    assert [record.metrics.get("tokens_differing", 0.0) > 0 for record in records] == [False, False, False, True, True]
    assert records[3].active["rollout.kv_cache"]["state"] == "emulated"
    assert records[2].active["rollout.kv_cache"]["state"] == "bf16"
    assert records[3].events[0].startswith("recipe v1: rollout.linears off → on, rollout.kv_cache off → on")
    control = run("bf16", steps=4)
    assert records[2].metrics == control[2].metrics
    assert records[3].metrics["lr"] == control[3].metrics["lr"], "the schedule goes on"


def test_switching_there_and_back_leaves_no_trace() -> None:
    loop, control = (Loop(experiment("fp8-e2e-kv", steps=2)) for _ in range(2))
    first = next(loop.steps())
    assert next(control.steps()).metrics == first.metrics
    own = loop.recipe
    assert loop.switch(preset("bf16").recipe)
    assert loop.switch(own)
    assert loop.switch(own) == {}, "nothing to do"
    assert without_notices(list(loop.steps())) == without_notices(list(control.steps()))


def without_notices(records: list[StepRecord]) -> list[dict]:
    left_out = {*TIMES, "events", "recipe_version"}
    return [{key: value for key, value in vars(record).items() if key not in left_out} for record in records]


def test_a_recipe_that_cannot_be_carried_out_is_refused_and_changes_nothing() -> None:
    loop = Loop(experiment("fp8-e2e-kv", steps=1))
    before, sampled = loop.recipe, loop.engine
    with pytest.raises(ConfigError, match="leave none of the model's 4 layers"):
        loop.switch(preset("fp8-e2e").recipe.override({"keep_bf16.first_layers": 4}))
    assert (loop.recipe, loop.engine) == (before, sampled)
    assert list(loop.steps())[1].events == []


def test_a_loop_resumed_after_a_switch_goes_on_under_the_switched_recipe() -> None:
    exp, to = experiment("bf16", steps=4), preset("fp8-e2e-kv").recipe
    whole = after_switch("bf16", to, at=1)
    first = Loop(exp)
    for record in first.steps():
        if record.step == 1:
            first.switch(to)
        if record.step == 2:
            break
    second = Loop(exp)
    second.load_state_dict(first.state_dict())
    assert second.recipe == to
    assert [without_times(r) for r in second.steps()] == [without_times(r) for r in whole[3:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"grpo.minibatches": 2},
        {"grpo.staleness": 2},
        {"grpo.staleness": 2, "recipe.recalibration.policy": "engine"},
        {"recipe.correction": {"name": "custom", "calibrate_clip_every": 1}},
        LORA,
        LORA | {"grpo.staleness": 2},
    ],
    ids=["minibatches", "staleness", "staleness-engine-scales", "calibrated-clip", "adapters", "adapters-staleness"],
)
def test_resuming_a_loop_reproduces_it_bit_for_bit(changes: dict) -> None:
    exp = experiment("fp8-e2e-kv", steps=4, **{"recipe.train.wgrad": "lora.rank" not in changes, **changes})
    whole = list(Loop(exp).steps())
    first = Loop(exp)
    stream = first.steps()
    for _ in range(3):
        next(stream)
    second = Loop(exp)
    second.load_state_dict(first.state_dict())
    rest = list(second.steps())
    assert [record.step for record in rest] == [3, 4]
    assert [without_times(r) for r in rest] == [without_times(r) for r in whole[3:]]


def test_a_fully_rejected_batch_updates_nothing_and_goes_on() -> None:
    changes = {
        "recipe.correction": {"name": "geometric-mask", "low": 1.0, "high": 1.0},
        "recipe.keep_bf16.lm_head": False,
        "grpo.prompts_per_step": 8,
    }
    records = run("fp8-rollout", steps=2, **changes)[1:]
    for record in records:
        assert record.metrics["kept_share"] == 0.0
        assert record.metrics["ess"] == 0.0
        assert record.metrics["grad_norm"] is None
        assert record.events == ["update skipped: every sequence was rejected by geometric-mask1..1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"grpo.kl_coef": 0.05},
        {"grpo.minibatches": 4},
        {"grpo.loss_level": "sequence", "grpo.baseline": "leave-one-out"},
        {"grpo.packing": False, "grpo.dual_clip": 3.0},
        {"sampling.top_p": 0.9, "sampling.temperature": 0.8},
        {"recipe.scaling.scale": "fp32"},
        {"recipe.scaling.granularity": "mx"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_variants_of_the_step_run_and_stay_finite(changes: dict) -> None:
    record = run("fp8-e2e", steps=1, **changes)[1]
    assert math.isfinite(record.metrics["loss"])
    assert record.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=0.02)
    assert record.metrics["probs_ratio_min"] is not None


def test_several_updates_leave_the_first_on_policy_and_the_next_off() -> None:
    record = run("bf16", steps=1, **{"grpo.minibatches": 4, "grpo.lr": 1e-3, "grpo.warmup_steps": 0})[1]
    assert record.metrics["probs_ratio_min"] < 1.0 < record.metrics["probs_ratio_max"]


def test_the_policy_learns() -> None:
    """Twenty-four half-size steps at the default learning rate lift the accuracy well above the start."""
    changes = {"grpo.prompts_per_step": 8, "grpo.group_size": 8, "grpo.lr": 3e-4, "sampling.max_new_tokens": None}
    records = run("fp8-e2e", steps=24, **changes)[1:]
    accuracy = [record.metrics["accuracy"] for record in records]
    assert sum(accuracy[-5:]) / 5 > sum(accuracy[:5]) / 5 + 0.2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("1+1=?!", "line 2: the tokenizer has no token for '!'"), ("1" * 300 + "=", "line 2: the prompt has 302 tokens")],
)
def test_a_row_the_model_cannot_take_is_named(prompt: str, message: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(30)]
    rows[1]["prompt"] = prompt
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        Loop(experiment("bf16", task=f"dataset:{path}"))


def test_a_small_held_out_set_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(30)))
    start = next(Loop(experiment("bf16", task=f"dataset:{path}")).steps())
    assert start.events == ["held-out accuracy rests on 2 problems, not 8"]


def test_mistakes_are_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        Loop(experiment("bf16", task_options={"operators": 3}))
    with pytest.raises(ConfigError, match="leave none of the model's 4 layers in FP8"):
        Loop(experiment("fp8-e2e", **{"recipe.keep_bf16.first_layers": 2, "recipe.keep_bf16.last_layers": 2}))
    with pytest.raises(ValueError, match="there is no model"):
        Loop(experiment("bf16", model="no/such/folder", task="arithmetic"))
