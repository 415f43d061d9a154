"""verl: a Hydra config that starts from its ppo_megatron_trainer.

verl's k1 is log(g / p), so a window on r becomes the window of reciprocals in rollout_rs_threshold.
"""

import math
from typing import Any

from labkit.config import yaml_io
from labkit.config.correction import Correction, Filter
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

_USE = "Run: python3 -m verl.trainer.main_ppo --config-path=FOLDER --config-name=THIS, with your data"
_KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_OVER = {"token": "token", "sum": "seq_sum", "mean": "seq_mean", "max": "seq_max"}
_UNBOUNDED = 1e9  # above e^20, where verl clamps ratios
_NO_DUAL_CLIP = 10000.0  # verl's dual clip can't be turned off; its own scripts write this


def verl(experiment: Experiment) -> Exported:
    notes: list[str] = []
    grpo, sampling, correction = experiment.grpo, experiment.sampling, experiment.recipe.correction
    model = model_name(experiment, notes)
    rollout_correction, reasons = _correction(correction)
    bypass = rollout_correction["bypass_mode"]
    mode = "bypass_mode" if bypass else {"gspo": "gspo", "cispo": "cispo"}.get(correction.objective, "vanilla")
    if reasons:
        notes.append(correction_note(correction, "verl", reasons))
        rollout_correction, bypass, mode = _none(), False, "vanilla"
    data: dict[str, Any] = {"train_batch_size": grpo.prompts_per_step, "seed": experiment.seed}
    if sampling.max_new_tokens is not None:
        data["max_response_length"] = sampling.max_new_tokens
    if mode == "gspo" and grpo.loss_level == "token":
        notes.append("grpo.loss_level: gspo is averaged by sequence there")
    actor_loss: dict[str, Any] = {"policy_loss": {"loss_mode": mode}}
    if bypass:
        actor_loss["policy_loss"]["rollout_correction"] = rollout_correction
        actor_loss["use_rollout_log_probs"] = True
    actor: dict[str, Any] = {
        "ppo_mini_batch_size": grpo.prompts_per_step // grpo.minibatches,
        "use_dynamic_bsz": True,
        "clip_ratio_low": grpo.clip_low if correction.clip_low is None else correction.clip_low,
        "clip_ratio_high": grpo.clip_high if correction.clip_high is None else correction.clip_high,
        "clip_ratio_c": grpo.dual_clip or _NO_DUAL_CLIP,
        "loss_agg_mode": "token-mean" if grpo.loss_level == "token" else "seq-mean-token-mean",
        "use_kl_loss": grpo.kl_coef > 0,
        "kl_loss_coef": grpo.kl_coef,
        "kl_loss_type": _KL_TYPES[grpo.kl_type],
        **actor_loss,
        **_trainer(experiment, notes),
    }
    settings = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_megatron_trainer", "_self_"],
        "data": data,
        "algorithm": {
            "adv_estimator": _estimator(experiment, notes),
            "norm_adv_by_std_in_grpo": grpo.normalize,
            "rollout_correction": rollout_correction,
        },
        "actor_rollout_ref": {"model": {"path": model}, "actor": actor, "rollout": _engine(experiment, notes)},
        "trainer": {"total_training_steps": experiment.steps, "test_freq": experiment.eval_every},
    }
    if grpo.staleness:
        notes.append("grpo.staleness: verl's asynchronous trainers are programs of their own; written on-policy")
    notes += shared_notes(experiment, "verl")
    notes.append("evaluation: by the engine there, in the rollout's precision and greedily, on all of data.val_files")
    return Exported(head(f"{experiment.name} for verl", _USE, notes) + yaml_io.dump(settings), tuple(notes))


def _estimator(experiment: Experiment, notes: list[str]) -> str:
    grpo = experiment.grpo
    if grpo.baseline == "group":
        return "grpo"
    if not grpo.normalize:
        return "rloo"
    notes.append("grpo.baseline: verl's leave-one-out isn't normalised; written with the group's mean")
    return "grpo"


def _engine(experiment: Experiment, notes: list[str]) -> dict[str, Any]:
    recipe, sampling = experiment.recipe, experiment.sampling
    scaling, keep = recipe.scaling, recipe.keep_bf16
    engine: dict[str, Any] = {
        "name": "vllm",
        "n": experiment.grpo.group_size,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "seed": experiment.seed,
        "calculate_log_probs": True,
    }
    if recipe.rollout.linears:
        engine["quantization"] = "fp8"
        if (scaling.format, scaling.granularity, scaling.scale) != ("e4m3", "block", "fp32"):
            notes.append(f"scaling: the rollout is e4m3/block/fp32 there, not {scaling.short_str()}")
        if keep.first_layers or keep.last_layers:
            notes.append("keep_bf16: verl's vLLM rollout has no switch for the first and last layers")
    if recipe.rollout.kv_cache:
        engine["engine_kwargs"] = {"vllm": {"kv_cache_dtype": f"fp8_{scaling.kv_format}"}}
        if recipe.recalibration.policy != "unit":
            notes.append(
                f"recalibration.policy: verl does not calibrate the cache, its scales are 1.0, not "
                f"{recipe.recalibration.policy}"
            )
        follows = "is FP8" if recipe.rollout.attention else "is BF16 here and FP8"
        notes.append(f"rollout.attention: {follows} there where vLLM's FlashAttention 3 serves an FP8 cache")
    return engine


def _trainer(experiment: Experiment, notes: list[str]) -> dict[str, Any]:
    recipe, grpo = experiment.recipe, experiment.grpo
    linear = grpo.lr_decay == "linear"
    optim: dict[str, Any] = {
        "lr": grpo.lr,
        "min_lr": 0.0 if linear else grpo.lr,
        "lr_warmup_steps": grpo.warmup_steps,
        "lr_decay_style": grpo.lr_decay,
        "weight_decay": grpo.weight_decay,
        "betas": list(grpo.betas),
        "clip_grad": grpo.max_grad_norm,
    }
    train, scaling = recipe.train, recipe.scaling
    switches = (train.fprop, train.dgrad, train.wgrad)
    if any(switches) and not all(switches):
        notes.append(
            "train: fprop, dgrad and wgrad are FP8 together there; written "
            + ("with all three" if train.fprop else "without FP8 training")
        )
    if not train.fprop:
        return {"optim": optim}
    if (scaling.format, scaling.granularity) != ("e4m3", "block"):
        notes.append(f"scaling: verl documents FP8 training with E4M3 blocks, not {scaling.short_str()}")
    flag = "1" if scaling.scale == "fp32" else "0"
    notes.append(f"scaling.scale: the trainer takes it from the environment: NVTE_FP8_BLOCK_SCALING_FP32_SCALES={flag}")
    fp8 = {"fp8": "hybrid" if scaling.grad_format == "e5m2" else "e4m3", "fp8_recipe": "blockwise"}
    return {
        "optim": {**optim, "override_optimizer_config": {"fp8_recipe": "blockwise"}},
        "megatron": {"override_transformer_config": fp8 | kept_layers(experiment)},
    }


def _none() -> dict[str, Any]:
    return {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}


def _correction(correction: Correction) -> tuple[dict[str, Any], list[str]]:
    reasons = unshared(correction)
    settings = _none()
    filters = list(correction.filters)
    if correction.weight in ("token", "sequence"):
        settings |= {"rollout_is": correction.weight, "rollout_is_threshold": correction.cap or _UNBOUNDED}
        level = "token" if correction.weight == "token" else "sum"
        window = next((each for each in filters if plain_ratio(each, level) and each.low and each.high), None)
        if window is not None and correction.cap is None:
            settings["rollout_is_threshold"] = f"{window.low}_{window.high}"
            filters.remove(window)
        if correction.floor is not None:
            reasons.append("no floor of the weight")
        if correction.normalize:
            settings["rollout_is_batch_normalize"] = True
    if filters:
        said = [_rejection(each) for each in filters]
        reasons += [
            f"no filter on {each.short_str()}" for each, rule in zip(filters, said, strict=True) if rule is None
        ]
        rules = [rule for rule in said if rule is not None]
        settings["rollout_rs"] = ",".join(kind for kind, _ in rules)
        settings["rollout_rs_threshold"] = ",".join(bound for _, bound in rules)
    if correction.filters and correction.denominator == "drop":
        reasons.append("rejected tokens stay in the loss's mean")
    if correction.old_policy == "current":
        reasons.append("no ratio of 1")
    if correction.old_policy == "rollout":
        loss = {"ppo": "ppo_clip", "reinforce": "reinforce"}.get(correction.objective)
        settings |= {"bypass_mode": True, "loss_type": loss}
        if loss is None:
            reasons.append(f"no {correction.objective} against the engine's log-probs")
    elif correction.objective == "reinforce":
        reasons.append("REINFORCE only against the engine's log-probs")
    return settings, reasons


def _rejection(found: Filter) -> tuple[str, str] | None:
    """(option of rollout_rs, its threshold); None where verl has none."""
    low, high, over = found.low, found.high, _OVER[found.over]
    if found.when != "always":
        return None
    if found.statistic in ("k2", "k3") and high is not None and not low:
        return f"{over}_{found.statistic}", f"{high:.10g}"
    if found.over == "max":
        return None
    if found.statistic == "ratio":
        return f"{over}_k1", f"{1 / (high or _UNBOUNDED):.10g}_{1 / (low or 1 / _UNBOUNDED):.10g}"
    if found.statistic == "k1":
        least = 1 / _UNBOUNDED if low is None else math.exp(low)
        most = _UNBOUNDED if high is None else math.exp(high)
        return f"{over}_k1", f"{least:.10g}_{most:.10g}"
    return None
