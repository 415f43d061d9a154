"""What leaves the lab is what was trained: as one model, and as adapters for PEFT."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from labkit import models
from labkit.analysis.trained import save, trained
from labkit.models.lora import adapters, merged
from labkit.rl.loop import Loop
from labkit.runs import Run, checkpoint
from labkit.runs.store import RunDirectory

from .conftest import small

PART = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize("rank", [0, 4])
def test_the_folder_of_a_run_is_its_policy(rank: int, tmp_path: Path) -> None:
    changes = {"lora.rank": rank, "lora.alpha": 8} if rank else {}
    experiment = small("bf16", **changes, **{"steps": 1, "grpo.lr": 1e-2, "grpo.warmup_steps": 0})
    run = Run(RunDirectory.create(experiment, tmp_path))
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        trained(run)
    loop = Loop(experiment)
    list(loop.steps())
    checkpoint.save(run.directory, experiment, 1, loop.state_dict())
    weights = loop.trainer.weights()
    policy = trained(run)
    assert all(torch.equal(policy.weights[name], weights[name]) for name in weights)
    save(policy, experiment, tmp_path / "out")
    found = models.load(tmp_path / "out", torch.bfloat16).weights
    start = models.load("tiny", torch.bfloat16).weights
    assert found.keys() == start.keys()
    if not rank:
        assert all(torch.equal(found[name], weights[name]) for name in found)
        assert not (tmp_path / "out" / "adapter").exists()
        return
    held = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert len(held) == len(adapters(weights)) == 56
    A, B = (held[f"base_model.model.{PART}.lora_{letter}.weight"].float() for letter in "AB")
    weight = start[f"{PART}.weight"]
    assert torch.equal(found[f"{PART}.weight"], (weight.float() + 2 * (B @ A)).bfloat16())
    assert not torch.equal(found[f"{PART}.weight"], weight)
    assert torch.equal(found["model.norm.weight"], start["model.norm.weight"])
    settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 8)
    assert "up_proj" in settings["target_modules"]


def test_weights_without_adapters_are_merged_into_themselves() -> None:
    policy = models.load("tiny")
    same = merged(policy.weights, small("bf16").lora)
    assert all(torch.equal(same[name], tensor) for name, tensor in policy.weights.items())
