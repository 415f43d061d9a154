"""NeMo RL: a YAML that starts from its grpo_math_1B.yaml.

Always the Megatron trainer, also for BF16: FP8 training and the FP8 KV cache exist only there, and arms that are to be
compared need one trainer.
"""

from typing import Any

from labkit.config import yaml_io
from labkit.config.experiment import Experiment
from labkit.config.export.common import (
    Exported,
    correction_note,
    head,
    kept_layers,
    model_name,
    plain_ratio,
    shared_notes,
    unshared,
)

_USE = "Put it in examples/configs of NeMo RL and run: uv run examples/run_grpo.py --config examples/configs/THIS.yaml"
_PPO = {"use_importance_sampling_correction": False}


def nemo_rl(experiment: Experiment) -> Exported:
    notes: list[str] = []
    grpo, sampling = experiment.grpo, experiment.sampling
    loss, threshold = _loss(experiment, notes)
    policy: dict[str, Any] = {
        "model_name": model_name(experiment, notes),
        "train_global_batch_size": grpo.prompts_per_step * grpo.group_size // grpo.minibatches,
        "max_grad_norm": grpo.max_grad_norm,
        "sequence_packing": {"enabled": grpo.packing},
        "dtensor_cfg": {"enabled": False},
        "optimizer": None,
        "scheduler": None,
        "megatron_cfg": _trainer(experiment, notes),
        "generation": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or None,
            "vllm_cfg": _engine(experiment, notes),
        },
    }
    if sampling.max_new_tokens is not None:
        policy["generation"]["max_new_tokens"] = sampling.max_new_tokens
    steps: dict[str, Any] = {
        "num_prompts_per_step": grpo.prompts_per_step,
        "num_generations_per_prompt": grpo.group_size,
        "max_num_steps": experiment.steps,
        "normalize_rewards": grpo.normalize,
        "use_leave_one_out_baseline": grpo.baseline == "leave-one-out",
        "val_period": experiment.eval_every,
        "max_val_samples": experiment.eval_prompts,
        "seed": experiment.seed,
        **threshold,
    }
    if grpo.staleness:
        steps["async_grpo"] = {"enabled": True, "max_trajectory_age_steps": grpo.staleness}
        policy["generation"]["vllm_cfg"]["async_engine"] = True
        policy["generation"]["colocated"] = {"enabled": False}
        notes.append(
            f"grpo.staleness: rollouts are at most {grpo.staleness} steps old there, not always; generation needs GPUs "
            "of its own: set policy.generation.colocated.resources"
        )
    notes += shared_notes(experiment, "NeMo RL")
    notes.append("evaluation: by the engine there, in the rollout's precision, not by the unquantised policy")
    settings = {"defaults": "grpo_math_1B.yaml", "grpo": steps, "loss_fn": loss, "policy": policy}
    return Exported(head(f"{experiment.name} for NeMo RL", _USE, notes) + yaml_io.dump(settings), tuple(notes))


def _engine(experiment: Experiment, notes: list[str]) -> dict[str, Any]:
    recipe = experiment.recipe
    scaling, keep = recipe.scaling, recipe.keep_bf16
    if not recipe.rollout.linears:
        if recipe.rollout.kv_cache:
            notes.append("rollout.kv_cache: NeMo RL has an FP8 cache only with FP8 linears; written without")
        return {"precision": "bfloat16"}
    if scaling.format != "e4m3":
        notes.append(f"scaling.format: the rollout is E4M3 there, not {scaling.format}")
    if scaling.granularity not in ("block", "mx"):
        notes.append(f"scaling.granularity: the rollout has block scales there, not one per {scaling.granularity}")
    engine: dict[str, Any] = {
        "precision": "fp8",
        "use_deep_gemm": True,
        "num_first_layers_in_bf16": keep.first_layers,
        "num_last_layers_in_bf16": keep.last_layers,
    }
    if scaling.granularity == "mx":
        engine["is_mx"] = True
        notes.append("scaling.granularity: mx needs Blackwell")
    else:
        pow2 = scaling.scale == "pow2"
        engine |= {"pow2_weight_scaling_factors": pow2, "pow2_activation_scaling_factors": pow2}
    if recipe.rollout.kv_cache:
        engine["kv_cache_dtype"] = "fp8"
        notes += _cache_notes(experiment)
    return engine


def _cache_notes(experiment: Experiment) -> list[str]:
    recipe, notes = experiment.recipe, []
    again = recipe.recalibration
    if again.policy != "every-step":
        notes.append(f"recalibration.policy: NeMo RL recalibrates after every step, not {again.policy}")
    if (again.margin, again.percentile) != (1.05, 99.9):
        notes.append("recalibration: margin 1.05 and percentile 99.9 are fixed there")
    if recipe.scaling.kv_format != "e4m3":
        notes.append(f"scaling.kv_format: the cache is E4M3 there, not {recipe.scaling.kv_format}")
    follows = "is FP8" if recipe.rollout.attention else "is BF16 here and FP8"
    notes.append(f"rollout.attention: {follows} there where vLLM's FlashAttention 3 serves an FP8 cache")
    if experiment.grpo.staleness:
        notes.append("rollout.kv_cache: NeMo RL refuses an FP8 cache with asynchronous rollouts; drop one of the two")
    return notes


def _trainer(experiment: Experiment, notes: list[str]) -> dict[str, Any]:
    recipe, grpo = experiment.recipe, experiment.grpo
    linear = grpo.lr_decay == "linear"
    trainer: dict[str, Any] = {
        "enabled": True,
        "optimizer": {
            "lr": grpo.lr,
            "min_lr": 0.0 if linear else grpo.lr,
            "weight_decay": grpo.weight_decay,
            "adam_beta1": grpo.betas[0],
            "adam_beta2": grpo.betas[1],
        },
        "scheduler": {
            "lr_decay_style": grpo.lr_decay,
            "lr_decay_iters": max(experiment.steps * grpo.minibatches, grpo.warmup_steps + 1),
            "lr_warmup_iters": grpo.warmup_steps,
            "lr_warmup_init": 0.0,
        },
    }
    train, scaling = recipe.train, recipe.scaling
    switches = (train.fprop, train.dgrad, train.wgrad)
    if any(switches) and not all(switches):
        notes.append(
            "train: fprop, dgrad and wgrad are FP8 together there; written "
            + ("with all three" if train.fprop else "without FP8 training")
        )
    if not train.fprop:
        return trainer
    recipes = {"block": "blockwise", "mx": "mxfp8", "tensor": "tensorwise", "row": "blockwise"}
    if scaling.granularity == "row":
        notes.append("scaling.granularity: the trainer has no scales per row; written with blocks")
    if scaling.format != "e4m3":
        notes.append(f"scaling.format: the trainer's forward is E4M3 there, not {scaling.format}")
    trainer["optimizer"]["use_precision_aware_optimizer"] = False
    trainer["fp8_cfg"] = {
        "enabled": True,
        "fp8": "hybrid" if scaling.grad_format == "e5m2" else "e4m3",
        "fp8_recipe": recipes[scaling.granularity],
        "fp8_param": False,
    }
    trainer["env_vars"] = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if scaling.scale == "fp32" else "0"}
    if kept := kept_layers(experiment):
        trainer["model_overrides"] = kept
    return trainer


def _loss(experiment: Experiment, notes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The loss_fn group, and the one filter that lives in the grpo group."""
    grpo, correction = experiment.grpo, experiment.recipe.correction
    loss: dict[str, Any] = {
        "reference_policy_kl_penalty": grpo.kl_coef,
        "reference_policy_kl_type": grpo.kl_type,
        "ratio_clip_min": grpo.clip_low if correction.clip_low is None else correction.clip_low,
        "ratio_clip_max": grpo.clip_high if correction.clip_high is None else correction.clip_high,
        "ratio_clip_c": None if correction.objective == "cispo" else grpo.dual_clip,
        "token_level_loss": grpo.loss_level == "token",
    }
    settings, threshold, reasons = _correction(experiment)
    if reasons:
        notes.append(correction_note(correction, "NeMo RL", reasons))
        settings, threshold = dict(_PPO), {}
    demands = experiment.recipe.rollout.linears or grpo.staleness
    if demands and not settings["use_importance_sampling_correction"]:
        # NeMo RL asserts that FP8 and asynchronous rollouts come with one. Bounds of 1 make the weight exactly 1.
        notes.append("correction: NeMo RL demands one for FP8 or stale rollouts; truncated to 1..1 it weights nothing")
        settings |= _truncated("tis", 1.0, 1.0)
    if settings.get("token_level_loss", loss["token_level_loss"]) != loss["token_level_loss"]:
        level = "token" if settings["token_level_loss"] else "sequence"
        notes.append(f"grpo.loss_level: {correction.objective} is averaged by {level} there")
    return loss | settings, threshold


def _truncated(kind: str, high: float | None, low: float | None) -> dict[str, Any]:
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


def _correction(experiment: Experiment) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(keys of loss_fn, keys of grpo, reasons why it can't be said there)."""
    grpo, correction = experiment.grpo, experiment.recipe.correction
    reasons = unshared(correction)
    errors = [each for each in correction.filters if each.statistic == "mult-error" and each.over == "mean"]
    others = [each for each in correction.filters if each not in errors]
    threshold = {"seq_logprob_error_threshold": errors[0].high} if errors else {}
    if errors and (errors[0].low is not None or errors[0].when != "always"):
        reasons.append("mean exp|delta| is bounded from above only")
    settings: dict[str, Any] = dict(_PPO)
    if correction.weight == "none":
        reasons += [f"a filter on {each.key} needs a weight" for each in others]
    elif not others:
        settings = {"use_importance_sampling_correction": True}
        if correction.cap is not None:
            settings = _truncated("tis", correction.cap, correction.floor)
        elif correction.floor is not None:
            reasons.append("no floor without a cap")
    else:
        settings, reason = _filtered(correction.weight, others, correction.floor or correction.cap)
        reasons += reason
    gspo = correction.objective == "gspo"
    if correction.weight == "sequence" and not gspo:
        reasons.append("sequence weights come with GSPO's ratio only")
    if correction.weight == "token" and gspo:
        reasons.append("with GSPO's ratio the weight is that of the sequence")
    if gspo:
        settings |= {"sequence_level_importance_ratios": True, "token_level_loss": False}
    if correction.objective == "cispo":
        settings |= {"use_cispo": True, "token_level_loss": True}
    if correction.objective == "reinforce":
        settings["disable_ppo_ratio"] = True
    if correction.old_policy == "rollout" and (correction.objective != "reinforce" or grpo.minibatches > 1):
        reasons.append("no ratio against the engine's log-probs")
    if correction.old_policy == "current":
        settings["force_on_policy_ratio"] = True
        if grpo.minibatches > 1:
            reasons.append("force_on_policy_ratio needs one update per batch")
    if correction.normalize:
        reasons.append("weights aren't normalised")
    if correction.filters and (correction.denominator == "drop") == bool(others):
        reasons.append(f"rejected tokens {'stay in' if others else 'leave'} the loss's mean")
    return settings, threshold, reasons


def _filtered(weight: str, filters: list[Any], truncation: float | None) -> tuple[dict[str, Any], list[str]]:
    only = filters[0]
    if len(filters) > 1 or truncation is not None:
        return dict(_PPO), ["one truncation or one filter at a time"]
    if only.high is None:
        return dict(_PPO), ["no filter without an upper bound"]
    if plain_ratio(only, "token" if weight == "token" else "sum"):
        return _truncated("icepop", only.high, only.low or 0.0), []
    if weight == "token" and plain_ratio(only, "mean"):
        return _truncated("seq-mask-tis", only.high, only.low or 0.0), []
    return dict(_PPO), [f"no filter on {only.key}"]
