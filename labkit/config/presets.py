"""Recipes by name, and the Experiments that start from them."""

from typing import Any

from labkit.config.correction import Correction
from labkit.config.errors import ConfigError, did_you_mean
from labkit.config.experiment import Experiment
from labkit.config.recipe import Recalibration, Recipe, Rollout, Scaling, Train

_LINEARS = Rollout(linears=True)
_ROLLOUT = Rollout(linears=True, kv_cache=True, attention=True)
_TRAIN = Train(fprop=True, dgrad=True, wgrad=True)
_TIS = Correction(name="tis")

_PRESETS = [
    (Recipe(name="bf16"), "BF16 everywhere: the control that belongs in every plot"),
    (
        Recipe(name="fp8-rollout", rollout=_LINEARS),
        "FP8 linears in the rollout, BF16 training, no correction",
    ),
    (
        Recipe(name="fp8-rollout-tis", rollout=_LINEARS, correction=_TIS),
        "fp8-rollout with truncated importance sampling, cap 2",
    ),
    (
        Recipe(name="fp8-rollout-icepop", rollout=_LINEARS, correction=Correction(name="icepop")),
        "fp8-rollout with IcePop: tokens whose ratio leaves 0.5 to 5 are dropped",
    ),
    (
        Recipe(name="fp8-rollout-mx", rollout=_LINEARS, scaling=Scaling(granularity="mx"), correction=_TIS),
        "fp8-rollout-tis with MXFP8 scales, one for 32 values",
    ),
    (
        Recipe(name="fp8-rollout-kv", rollout=_ROLLOUT, correction=_TIS),
        "fp8-rollout-tis and an FP8 KV cache and attention, recalibrated every step",
    ),
    (
        Recipe(
            name="fp8-rollout-kv-unit",
            rollout=_ROLLOUT,
            recalibration=Recalibration(policy="unit"),
            correction=_TIS,
        ),
        "fp8-rollout-kv with all Q/K/V scales 1.0, as when calibrated ones are lost",
    ),
    (
        Recipe(name="fp8-e2e", rollout=_LINEARS, train=_TRAIN, correction=_TIS),
        "FP8 end to end: linears of the rollout, and fprop, dgrad and wgrad of the training, with TIS",
    ),
    (
        Recipe(name="fp8-e2e-kv", rollout=_ROLLOUT, train=_TRAIN, correction=_TIS),
        "fp8-e2e and an FP8 KV cache and attention, recalibrated every step",
    ),
    (
        Recipe(name="fp8-e2e-fprop", rollout=_LINEARS, train=Train(fprop=True), correction=_TIS),
        "fp8-e2e with BF16 gradients: only the forward of the training is FP8",
    ),
    (
        Recipe(name="fp8-frozen-base", rollout=_LINEARS, train=Train(fprop=True, dgrad=True)),
        "FP8 linears on both sides without wgrad and correction: for LoRA on a frozen base (lora.rank=16)",
    ),
    (
        Recipe(
            name="fp8-e2e-e5m2-grads",
            rollout=_LINEARS,
            train=_TRAIN,
            scaling=Scaling(grad_format="e5m2"),
            correction=_TIS,
        ),
        "fp8-e2e with output gradients in E5M2: more range, one bit less precision",
    ),
    (
        Recipe(
            name="fp8-e2e-fp32-scales",
            rollout=_LINEARS,
            train=_TRAIN,
            scaling=Scaling(scale="fp32"),
            correction=_TIS,
        ),
        "fp8-e2e with FP32 instead of power-of-2 scales, as on Hopper",
    ),
    (
        Recipe(
            name="fp8-e2e-tensor",
            rollout=_LINEARS,
            train=_TRAIN,
            scaling=Scaling(granularity="tensor"),
            correction=_TIS,
        ),
        "fp8-e2e with one scale a tensor: it depends on the batch, so the two sides can't agree",
    ),
    (
        Recipe(
            name="fp8-e2e-row",
            rollout=_LINEARS,
            train=_TRAIN,
            scaling=Scaling(granularity="row"),
            correction=_TIS,
        ),
        "fp8-e2e with one scale a token and one an output channel",
    ),
]

RECIPES: dict[str, Recipe] = {preset_recipe.name: preset_recipe for preset_recipe, _ in _PRESETS}
DESCRIPTIONS: dict[str, str] = {preset_recipe.name: text for preset_recipe, text in _PRESETS}

# What an Experiment has to change for a model, as overrides.
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"eval_every": 10},
    "tiny-moe": {"eval_every": 10, "grpo.lr": 2e-4},
    "smollm2": {
        "grpo.prompts_per_step": 8,
        "grpo.group_size": 8,
        "grpo.micro_batch": 64,
        "grpo.lr": 4e-5,
        "grpo.lr_decay": "linear",
        "trainer_attention": "sdpa",
        "steps": 12,
        "eval_every": 4,
        "eval_prompts": 128,
    },
}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"recipe: no preset {name!r}; {did_you_mean(name, RECIPES)}")
    return RECIPES[name]


def preset(recipe_name: str, model: str = "tiny", /, **overrides: Any) -> Experiment:
    """An Experiment by the name of its recipe: preset("fp8-e2e", seed=1, **{"grpo.lr": 1e-4})."""
    if not isinstance(model, str):
        raise ConfigError(f"model: must be a name or the path of a folder, got {model!r}")
    start = Experiment(recipe=recipe(recipe_name)).override(MODEL_DEFAULTS.get(model, {}))
    return start.override({"model": model} | overrides)
