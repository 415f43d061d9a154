"""Exports: what the other framework would read, and what it can't be told."""

import ast
from typing import Any

import pytest
import yaml

from labkit.config import CORRECTIONS, RECIPES, Experiment, preset
from labkit.config.export import Exported, nemo_rl, trl, verl

EXPORTS = {"nemo_rl": nemo_rl, "verl": verl, "trl": trl}


def read(exported: Exported) -> dict[str, Any]:
    """The settings in the text: a YAML mapping, or the keywords of GRPOConfig."""
    if "GRPOConfig" not in exported.text:
        return yaml.safe_load(exported.text)
    call = ast.parse(exported.text).body[-1].value  # type: ignore[attr-defined]
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def corrected(name: str, recipe: str = "fp8-e2e", **bounds: Any) -> Experiment:
    return preset(recipe).override({"recipe.correction": {"name": name, **bounds}})


def without_counterpart(exported: Exported) -> bool:
    return any("has no counterpart" in note for note in exported.notes)


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_preset_can_be_read_back_and_its_notes_stand_in_the_text(export: Any, recipe: str) -> None:
    exported = export(preset(recipe))
    assert read(exported)
    words = " ".join(line.lstrip("# -") for line in exported.text.splitlines())
    for note in exported.notes:
        assert " ".join(note.split()[:6]) in " ".join(words.split())


# ---- NeMo RL: grpo-llama3.1-8b-instruct-2n8g-megatron-fp8-e2e.yaml, grpo-qwen3-8b-base-1n8g-fp8-kvcache-megatron.yaml


def test_nemo_rl_end_to_end_has_the_keys_of_its_own_recipe() -> None:
    experiment = preset(
        "fp8-e2e-fp32-scales", **{"grpo.minibatches": 4, "grpo.lr": 5e-7, "sampling.max_new_tokens": 64}
    )
    settings = read(nemo_rl(experiment))
    trainer, engine = settings["policy"]["megatron_cfg"], settings["policy"]["generation"]["vllm_cfg"]
    assert settings["defaults"] == "grpo_math_1B.yaml"
    assert trainer["fp8_cfg"] == {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}
    assert trainer["env_vars"] == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert trainer["optimizer"]["use_precision_aware_optimizer"] is False
    assert trainer["optimizer"]["lr"] == 5e-7
    assert (engine["precision"], engine["use_deep_gemm"]) == ("fp8", True)
    assert engine["pow2_weight_scaling_factors"] is False
    assert "kv_cache_dtype" not in engine
    assert settings["policy"]["train_global_batch_size"] == 16 * 8 // 4
    assert settings["policy"]["generation"]["max_new_tokens"] == 64
    assert settings["policy"]["dtensor_cfg"]["enabled"] is False


def test_nemo_rl_cache_follows_the_recipe() -> None:
    exported = nemo_rl(preset("fp8-rollout-kv-unit"))
    engine = read(exported)["policy"]["generation"]["vllm_cfg"]
    assert engine["kv_cache_dtype"] == "fp8"
    assert "fp8_cfg" not in read(exported)["policy"]["megatron_cfg"]
    assert any("recalibrates after every step, not unit" in note for note in exported.notes)


TIS, USE = "truncated_importance_sampling", "use_importance_sampling_correction"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tis", {f"{TIS}_type": "tis", f"{TIS}_ratio": 2.0, f"{TIS}_ratio_min": None}),
        ("icepop", {f"{TIS}_type": "icepop", f"{TIS}_ratio": 5.0, f"{TIS}_ratio_min": 0.5}),
        ("geometric-mask", {f"{TIS}_type": "seq-mask-tis", f"{TIS}_ratio": 1.002, f"{TIS}_ratio_min": 0.999}),
        ("nemo-rl/importance-sampling", {USE: True, f"{TIS}_type": None}),
        ("nemo-rl/sequence", {USE: True, "sequence_level_importance_ratios": True, "token_level_loss": False}),
        ("cispo", {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 4.0}),
        ("on-policy", {"force_on_policy_ratio": True, f"{TIS}_ratio": 2.0}),
        ("openrlhf/tis", {f"{TIS}_ratio": 5.0, f"{TIS}_ratio_min": 0.5}),
    ],
)
def test_nemo_rl_corrections(name: str, expected: dict[str, Any]) -> None:
    exported = nemo_rl(corrected(name))
    loss = read(exported)["loss_fn"]
    assert {key: loss.get(key) for key in expected} == expected
    assert not without_counterpart(exported)


def test_nemo_rl_knows_all_of_its_own() -> None:
    for name in (name for name in CORRECTIONS if name.startswith("nemo-rl/")):
        assert not without_counterpart(nemo_rl(corrected(name)))
    exported = nemo_rl(corrected("nemo-rl/seq-logprob-error"))
    assert read(exported)["grpo"]["seq_logprob_error_threshold"] == 2.0


def test_nemo_rl_refuses_fp8_rollouts_without_a_correction_so_that_one_of_weight_1_is_written() -> None:
    loss = read(nemo_rl(preset("fp8-rollout")))["loss_fn"]
    assert (loss[USE], loss[f"{TIS}_ratio"], loss[f"{TIS}_ratio_min"]) == (True, 1.0, 1.0)
    assert read(nemo_rl(preset("bf16")))["loss_fn"][USE] is False


# ---- verl: RolloutCorrectionConfig's presets, trainer/config/algorithm.py

GEO, K3, TOKEN, SEQUENCE = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", "0.01"), ("token", 2.0), ("sequence", 2.0)
NOTHING = (None, None)
VERL = {
    "decoupled_token_is": (TOKEN, NOTHING, None),
    "decoupled_seq_is": (SEQUENCE, NOTHING, None),
    "decoupled_token_icepop": (("token", "0.5_5.0"), NOTHING, None),
    "decoupled_seq_is_rs": (SEQUENCE, ("seq_sum_k1", "0.5_2"), None),
    "decoupled_geo_rs": (NOTHING, GEO, None),
    "decoupled_geo_rs_seq_tis": (SEQUENCE, GEO, None),
    "decoupled_geo_rs_token_tis": (TOKEN, GEO, None),
    "decoupled_k3_rs": (NOTHING, K3, None),
    "decoupled_k3_rs_seq_tis": (SEQUENCE, K3, None),
    "decoupled_k3_rs_token_tis": (TOKEN, K3, None),
    "bypass_ppo_clip": (NOTHING, NOTHING, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (NOTHING, GEO, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (NOTHING, K3, "ppo_clip"),
    "bypass_pg_is": (SEQUENCE, NOTHING, "reinforce"),
    "bypass_pg_token_icepop": (("token", "0.5_5.0"), NOTHING, "reinforce"),
    "bypass_pg_geo_rs": (NOTHING, GEO, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": (SEQUENCE, GEO, "reinforce"),
    "bypass_pg_geo_rs_token_tis": (TOKEN, GEO, "reinforce"),
    "disabled": (NOTHING, NOTHING, None),
}


def test_the_table_has_all_of_verls() -> None:
    assert {f"verl/{name}" for name in VERL} == {name for name in CORRECTIONS if name.startswith("verl/")}


@pytest.mark.parametrize("name", VERL)
def test_verl_gets_its_own_presets_back(name: str) -> None:
    weight, rejection, loss = VERL[name]
    exported = verl(corrected(f"verl/{name}"))
    settings = read(exported)
    found = settings["algorithm"]["rollout_correction"]
    actor = settings["actor_rollout_ref"]["actor"]
    assert not without_counterpart(exported)
    assert (found["rollout_is"], found.get("rollout_is_threshold")) == weight
    assert (found["rollout_rs"], found.get("rollout_rs_threshold")) == rejection
    assert (found["bypass_mode"], found.get("loss_type")) == (loss is not None, loss)
    assert actor["policy_loss"]["loss_mode"] == ("bypass_mode" if loss else "vanilla")
    assert actor["policy_loss"].get("rollout_correction") == (found if loss else None)


def test_verl_windows_are_reciprocal_where_they_are_not_symmetric() -> None:
    exported = verl(corrected("geometric-mask", low=0.8, high=1.6))
    assert read(exported)["algorithm"]["rollout_correction"]["rollout_rs_threshold"] == "0.625_1.25"


def test_verl_end_to_end_has_the_keys_of_its_documentation() -> None:
    settings = read(verl(preset("fp8-e2e-e5m2-grads", **{"grpo.minibatches": 2})))["actor_rollout_ref"]
    assert settings["rollout"]["quantization"] == "fp8"
    assert settings["rollout"]["n"] == 8
    assert settings["actor"]["ppo_mini_batch_size"] == 8  # prompts, not responses
    assert settings["actor"]["optim"]["override_optimizer_config"] == {"fp8_recipe": "blockwise"}
    trainer = settings["actor"]["megatron"]["override_transformer_config"]
    assert trainer == {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    assert "quantization" not in read(verl(preset("bf16")))["actor_rollout_ref"]["rollout"]


def test_verl_says_that_it_does_not_calibrate() -> None:
    exported = verl(preset("fp8-rollout-kv"))
    engine = read(exported)["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
    assert engine == {"kv_cache_dtype": "fp8_e4m3"}
    assert any(note.startswith("recalibration.policy") for note in exported.notes)
    assert not any(note.startswith("recalibration.policy") for note in verl(preset("fp8-rollout-kv-unit")).notes)


# ---- TRL: GRPOConfig

IS = "vllm_importance_sampling"


@pytest.mark.parametrize(
    ("name", "mode", "low", "high"),
    [
        ("trl/sequence_mask", "sequence_mask", None, 3.0),
        ("trl/sequence_truncate", "sequence_truncate", None, 3.0),
        ("trl/token_mask", "token_mask", None, 3.0),
        ("trl/token_truncate", "token_truncate", None, 3.0),
        ("icepop", "token_mask", 0.5, 5.0),
        ("importance-sampling", "token_truncate", 0.0, None),
    ],
)
def test_trl_modes(name: str, mode: str, low: float | None, high: float | None) -> None:
    settings = read(trl(corrected(name)))
    assert settings[f"{IS}_correction"] is True
    assert settings[f"{IS}_mode"] == mode
    assert (settings[f"{IS}_clip_min"], settings[f"{IS}_clip_max"]) == (low, high)


def test_trl_objectives() -> None:
    assert read(trl(corrected("off-policy-mask")))["off_policy_mask_threshold"] == 0.5
    cispo = read(trl(corrected("trl/cispo")))
    assert (cispo["loss_type"], cispo["epsilon_high"]) == ("cispo", 5.0)  # TRL's bound is not 1 + epsilon
    gspo = read(trl(corrected("trl/gspo")))
    assert (gspo["importance_sampling_level"], gspo["epsilon"], gspo["epsilon_high"]) == ("sequence", 3e-4, 4e-4)
    none = read(trl(preset("bf16")))
    assert none[f"{IS}_correction"] is False


def test_trl_batches_are_whole_updates() -> None:
    settings = read(trl(preset("bf16", steps=10, **{"grpo.minibatches": 4, "grpo.micro_batch": 24})))
    one_update = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    assert one_update == 16 * 8 // 4
    assert settings["generation_batch_size"] == 16 * 8
    assert settings["max_steps"] == 40


def test_trl_has_no_fp8_and_says_so() -> None:
    notes = " ".join(trl(preset("fp8-e2e-kv")).notes)
    assert all(word in notes for word in ("rollout.linears", "train:", "--kv_cache_dtype fp8"))


# ---- what stays behind


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_a_correction_without_counterpart_is_named_and_left_out_whole(export: Any) -> None:
    exported = export(corrected("prime-rl/dppo", recipe="bf16"))
    assert without_counterpart(exported)
    text = exported.text.replace("# ", "")
    assert "prime-rl/dppo" in text
    settings = str(read(exported))
    assert not any(trace in settings for trace in ("'tis'", "'token'", "bypass_mode': True", "token_mask"))


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_a_custom_composition_goes_over_by_what_it_is(export: Any) -> None:
    experiment = preset("fp8-rollout").override(
        {"recipe.correction": {"name": "custom", "weight": "token", "cap": 3.0}}
    )
    exported = export(experiment)
    assert not without_counterpart(exported)
    assert "3.0" in str(read(exported))


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"recipe.keep_bf16.lm_head": False}, "keep_bf16.lm_head"),
        ({"grpo.staleness": 4}, "grpo.staleness"),
        ({"recipe.train": {"fprop": True, "dgrad": False, "wgrad": False}}, "train:"),
        ({"faults": ["wrong-temperature"]}, "faults"),
        ({}, "model: tiny"),
        ({"model": "tiny-moe"}, "model: tiny-moe is labkit's own"),
        ({"model": "tiny-moe", "recipe.router.replay": "r3"}, "router: bf16, replay r3"),
        ({"model": "tiny-moe", "grpo.aux_loss_coef": 0.01}, "grpo.aux_loss_coef: 0.01"),
    ],
)
def test_what_can_not_go_over_is_in_the_notes(export: Any, changes: dict[str, Any], word: str) -> None:
    assert any(note.startswith(word) for note in export(preset("fp8-e2e").override(changes)).notes)


def test_a_language_model_goes_by_its_hub_name() -> None:
    experiment = preset("bf16", "smollm2")
    assert read(nemo_rl(experiment))["policy"]["model_name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in trl(experiment).text
