"""The policy that a run has trained, as it leaves the lab: a Hugging Face folder, and adapters as PEFT keeps them.

    FOLDER/config.json, model.safetensors, tokenizer.json   what `model=FOLDER`, transformers and vLLM load
    FOLDER/adapter/adapter_config.json                      of a run with lora: what PEFT puts beside the base model
                   adapter_model.safetensors

Weights are the BF16 copy that the trainer computes with. Adapters are merged into it, W + alpha / r · B A in FP32 and
rounded once, which is not what the run computed to the bit: there the base's output and the adapter's are added.
"""

import json
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from labkit import models
from labkit.config import Experiment
from labkit.models import Policy
from labkit.models.huggingface import write_folder
from labkit.models.lora import adapters, merged
from labkit.rl.faults import Faults

if TYPE_CHECKING:
    from labkit.runs import Run

ADAPTER = "adapter"


def trained(run: "Run") -> Policy:
    """The policy of the last checkpoint, with adapters beside its weights. ValueError if there is no checkpoint."""
    from labkit.runs import checkpoint

    path = checkpoint.latest(run.directory)
    if path is None:
        raise ValueError(f"run {run.id} has no checkpoint yet: wait for one (checkpoint_every), or stop it")
    experiment = run.experiment
    _, state = checkpoint.load(path, experiment)
    policy = Faults(experiment.faults).policy(models.load(experiment.model))
    return replace(policy, weights=policy.weights | state["trainer"]["parameters"]).to(torch.bfloat16)


def save(policy: Policy, experiment: Experiment, folder: str | PathLike[str]) -> None:
    """Write a folder for `policy`, which has been trained as the Experiment says."""
    write_folder(replace(policy, weights=merged(policy.weights, experiment.lora)), folder)
    if own := adapters(policy.weights):
        place = Path(folder) / ADAPTER
        place.mkdir(exist_ok=True)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": experiment.model,
            "r": experiment.lora.rank,
            "lora_alpha": experiment.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(experiment.lora.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (place / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in own.items()}
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
