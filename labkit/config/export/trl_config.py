"""TRL: a GRPOConfig. It generates with vLLM in the training precision and has no FP8 switch of its own."""

import math
from typing import Any

from labkit.config.correction import Correction, Filter
from labkit.config.experiment import Experiment
from labkit.config.export.common import (
    Exported,
    correction_note,
    head,
    model_name,
    plain_ratio,
    shared_notes,
    unshared,
)

_USE = "Give it to GRPOTrainer(model=MODEL, args=config, reward_funcs=..., train_dataset=...); for one process."
_KEY = "vllm_importance_sampling"


def trl(experiment: Experiment) -> Exported:
    notes: list[str] = []
    grpo, sampling, correction = experiment.grpo, experiment.sampling, experiment.recipe.correction
    model = model_name(experiment, notes)
    rollouts = grpo.prompts_per_step * grpo.group_size
    update = rollouts // grpo.minibatches
    micro_batch = math.gcd(update, grpo.micro_batch)
    arguments: dict[str, Any] = {
        "output_dir": f"runs/{experiment.name}",
        "seed": experiment.seed,
        "bf16": True,
        "max_steps": experiment.steps * grpo.minibatches,
        "num_generations": grpo.group_size,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": update // micro_batch,
        "generation_batch_size": rollouts,
        "learning_rate": grpo.lr,
        "lr_scheduler_type": "linear" if grpo.lr_decay == "linear" else "constant_with_warmup",
        "warmup_steps": grpo.warmup_steps,
        "weight_decay": grpo.weight_decay,
        "adam_beta1": grpo.betas[0],
        "adam_beta2": grpo.betas[1],
        "max_grad_norm": grpo.max_grad_norm,
        "scale_rewards": "group" if grpo.normalize else "none",
        "beta": grpo.kl_coef,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "use_vllm": True,
        "vllm_mode": "server" if experiment.recipe.rollout.kv_cache else "colocate",
        "loss_type": "dapo" if grpo.loss_level == "token" else "grpo",
    }
    if sampling.max_new_tokens is not None:
        arguments["max_completion_length"] = sampling.max_new_tokens
    settings, reasons = _correction(correction, grpo.minibatches)
    if reasons:
        notes.append(correction_note(correction, "TRL", reasons))
        settings = {f"{_KEY}_correction": False}
    arguments |= _clip(experiment, settings, notes) | settings
    notes += [*_grpo_notes(experiment), *_fp8_notes(experiment, model), *shared_notes(experiment, "TRL")]
    notes.append("evaluation: give an eval_dataset, eval_strategy and eval_steps; it samples with the same engine")
    body = "".join(f"    {key}={value!r},\n" for key, value in arguments.items())
    text = f"from trl import GRPOConfig\n\nMODEL = {model!r}\nconfig = GRPOConfig(\n{body})\n"
    return Exported(head(f"{experiment.name} for TRL", _USE, notes) + text, tuple(notes))


def _clip(experiment: Experiment, settings: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    grpo, correction = experiment.grpo, experiment.recipe.correction
    low = grpo.clip_low if correction.clip_low is None else correction.clip_low
    high = grpo.clip_high if correction.clip_high is None else correction.clip_high
    if settings.get("loss_type") == "cispo":
        return {"epsilon_high": 1 + high}  # TRL's is the bound itself
    clip = {"epsilon": low, "epsilon_high": high}
    if grpo.dual_clip is None:
        return clip
    if grpo.dual_clip <= 1 + high:
        notes.append(f"grpo.dual_clip: TRL's delta has to be above {1 + high:g}; written without")
        return clip
    return {**clip, "delta": grpo.dual_clip}


def _grpo_notes(experiment: Experiment) -> list[str]:
    grpo, notes = experiment.grpo, []
    if grpo.baseline != "group":
        notes.append("grpo.baseline: TRL compares with the group's mean, not leave-one-out")
    if grpo.kl_coef and grpo.kl_type != "k3":
        notes.append(f"grpo.kl_type: TRL's penalty is k3, not {grpo.kl_type}")
    if grpo.staleness:
        notes.append("grpo.staleness: GRPOTrainer samples with the weights at hand; written on-policy")
    return notes


def _fp8_notes(experiment: Experiment, model: str) -> list[str]:
    recipe, notes = experiment.recipe, []
    if recipe.rollout.linears:
        notes.append("rollout.linears: TRL can't quantise the weights it sends to vLLM; its rollout stays BF16")
    if any(on for _, on in recipe.train):
        notes.append("train: no switch in GRPOConfig; accelerate's mixed_precision fp8 is another recipe (no blocks)")
    if recipe.rollout.kv_cache:
        notes.append(
            f"rollout.kv_cache: a setting of the server: trl vllm-serve --model {model} --kv_cache_dtype fp8; its "
            "scales are 1.0, nothing recalibrates them"
        )
    return notes


def _correction(correction: Correction, minibatches: int) -> tuple[dict[str, Any], list[str]]:
    reasons = unshared(correction)
    settings: dict[str, Any] = {f"{_KEY}_correction": correction.weight != "none"}
    filters = list(correction.filters)
    for each in [each for each in filters if _off_policy(each)]:
        settings["off_policy_mask_threshold"] = each.high
        filters.remove(each)
    if correction.weight in ("token", "sequence"):
        low, high, mode = correction.floor, correction.cap, "truncate"
        over = "token" if correction.weight == "token" else "sum"
        if filters and plain_ratio(filters[0], over) and low is high is None:
            low, high, mode = filters[0].low, filters[0].high, "mask"
            filters = filters[1:]
        if low is high is None:
            low = 0.0  # TRL wants a bound; a ratio is never below this one
        settings |= {f"{_KEY}_mode": f"{correction.weight}_{mode}", f"{_KEY}_clip_max": high, f"{_KEY}_clip_min": low}
    reasons += [f"no filter on {each.short_str()}" for each in filters]
    if correction.normalize:
        reasons.append("weights aren't normalised")
    if correction.filters and correction.denominator == "drop":
        reasons.append("rejected tokens stay in the loss's mean")
    if correction.old_policy == "rollout":
        reasons.append("no ratio against the engine's log-probs together with vLLM's own")
    if correction.old_policy == "current" and minibatches > 1:
        reasons.append("the ratio is 1 only with one update per batch")
    if correction.objective == "reinforce":
        reasons.append("no REINFORCE without the clip")
    if correction.objective == "cispo":
        settings["loss_type"] = "cispo"
        if correction.clip_low != 1.0:
            reasons.append("cispo has no lower bound")
    if correction.objective == "gspo":
        settings["importance_sampling_level"] = "sequence"
    return settings, reasons


def _off_policy(found: Filter) -> bool:
    """DeepSeek-V3.2's: mean(g - c) of responses with a negative advantage."""
    return (found.statistic, found.over, found.when, found.low) == ("k1", "mean", "negative", None)
