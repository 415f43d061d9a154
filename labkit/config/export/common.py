"""What the three exports share: the result, the head of a file, and what none of the frameworks has."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from labkit.config.correction import Correction, Filter
from labkit.config.experiment import Experiment
from labkit.config.locations import SHIPPED
from labkit.config.own import KINDS, short
from labkit.config.recipe import Router

HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
MODEL_PLACEHOLDER = "PATH_OR_HUB_NAME"


class Exported(NamedTuple):
    text: str
    notes: tuple[str, ...]


def head(title: str, usage: str, notes: Sequence[str]) -> str:
    """Comment lines: what the file is, how it is used, and the notes."""
    lines = [title, usage, "", "What is not the same there:" if notes else "Every setting has a counterpart."]
    for note in notes:
        lines += textwrap.wrap(note, 112, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def model_name(experiment: Experiment, notes: list[str]) -> str:
    """The model as a Hugging Face name or path; a placeholder for the policy that only labkit has."""
    model = experiment.model
    if model in SHIPPED:
        notes.append(f"model: {model} is labkit's own policy; put a Hugging Face model for {MODEL_PLACEHOLDER}")
        return MODEL_PLACEHOLDER
    return HUB_NAMES.get(model, model)


def shared_notes(experiment: Experiment, framework: str) -> list[str]:
    """What has no counterpart in any of the frameworks."""
    recipe = experiment.recipe
    whose = "yours" if KINDS["task"].owns(experiment.task) else "labkit's"
    notes = [f"task: {short(experiment.task)} is {whose}; give {framework} your data set and reward"]
    if KINDS["engine"].owns(experiment.engine):
        notes.append(f"engine: {short(experiment.engine)} is yours and stays behind")
    if experiment.sampling.max_new_tokens is None:
        notes.append("sampling.max_new_tokens: the task's own here; set the response length there")
    if experiment.lora.rank:
        notes.append(
            f"lora: rank {experiment.lora.rank}, alpha {experiment.lora.alpha:g}; set {framework}'s own adapters"
        )
    if experiment.faults:
        notes.append(f"faults: {', '.join(experiment.faults)} stay behind")
    if recipe.uses_fp8 and not recipe.keep_bf16.lm_head:
        notes.append(f"keep_bf16.lm_head: {framework} always keeps the output projection in high precision")
    if recipe.uses_fp8 and recipe.scaling.formula != "vllm":
        notes.append(
            f"scaling.formula: engine and trainer follow their own rules there, other than "
            f"{short(recipe.scaling.formula)}, and maybe from each other in the last bits"
        )
    if recipe.router != Router():
        notes.append(f"router: {recipe.router.dtype}, replay {recipe.router.replay}; {framework} has its own settings")
    if experiment.grpo.aux_loss_coef:
        notes.append(f"grpo.aux_loss_coef: {experiment.grpo.aux_loss_coef:g}; {framework} has a setting of its own")
    if experiment.trainer_attention == "math":
        notes.append(
            "trainer_attention: engine and trainer have different kernels there, so the mismatch is never exactly 0"
        )
    return notes


def kept_layers(experiment: Experiment) -> dict[str, object]:
    """Megatron Core's own switch for the first and last layers of the trainer; {} where all layers are FP8."""
    keep = experiment.recipe.keep_bf16
    if not (keep.first_layers or keep.last_layers):
        return {}
    return {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": keep.first_layers,
        "num_layers_at_end_in_bf16": keep.last_layers,
    }


def correction_note(correction: Correction, framework: str, reasons: Sequence[str]) -> str:
    name = correction.short_str() or "none"
    return f"correction: {name} has no counterpart in {framework} ({'; '.join(reasons)}); written without a correction"


def plain_ratio(found: Filter, over: str) -> bool:
    """Whether a filter bounds r itself (over token), W (sum) or G (mean), for all advantages."""
    return found.statistic == "ratio" and found.over == over and found.when == "always"


def unshared(correction: Correction) -> list[str]:
    """Reasons that hold for every framework."""
    reasons = []
    if correction.calibrate_clip_every:
        reasons.append("no calibrated clip")
    if correction.anchor:
        reasons.append("no pull towards the engine")
    if correction.objective == "ratio":
        reasons.append("no unclipped ratio")
    if KINDS["correction"].owns(correction.weight):
        reasons.append("no weight of your own")
    if correction.weight == "geometric":
        reasons.append("no geometric weight")
    return reasons
