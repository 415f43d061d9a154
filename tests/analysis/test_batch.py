"""A batch is what the run would train on next, and a file brings all of it back."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from labkit.analysis import Batch, collect, whatif
from labkit.config import ConfigError, Experiment
from labkit.rl import mismatch
from labkit.rl.loop import Loop
from labkit.runs import Run, RunDirectory, checkpoint
from labkit.runs.record import StepRecord

from .conftest import small

BatchOf = Callable[[str], Batch]


def assert_is_the_batch_of(batch: Batch, record: StepRecord) -> None:
    assert float(batch.rewards_B.mean()) == record.metrics["reward"]
    assert batch.rollouts.num_tokens == record.tokens["generated"]
    assert batch.rollouts.weight_version == record.weight_version
    rows = torch.linspace(0, len(batch.rollouts) - 1, len(record.samples)).long().tolist()
    for row, sample in zip(rows, record.samples, strict=True):
        length = len(sample["tokens"])
        assert batch.rollouts.response(row) == sample["tokens"]
        assert batch.rollouts.logprobs_BR[row, :length].tolist() == sample["g"]
        assert batch.p_BR[row, :length].tolist() == sample["p"]
        assert float(batch.advantages_B[row]) == sample["advantage"]


def test_a_collected_batch_is_the_one_that_the_first_step_trains_on(batch_of: BatchOf) -> None:
    stream = Loop(small("fp8-rollout-kv")).steps()
    next(stream)
    batch = batch_of("fp8-rollout-kv")
    assert_is_the_batch_of(batch, next(stream))
    assert batch.sampled_with is None
    assert batch.scales is not None
    assert repr(batch).startswith("Batch('fp8-rollout-kv-tiny-s0', 16 responses, ")


def stopped_after(experiment: Experiment, step: int, folder: Path) -> tuple[Run, StepRecord]:
    """A run with a checkpoint, and the record of the step that follows."""
    directory = RunDirectory.create(experiment, folder)
    loop = Loop(experiment)
    stream = loop.steps()
    while next(stream).step < step:
        pass
    checkpoint.save(directory, experiment, step, loop.state_dict())
    return Run(directory), next(stream)


def test_of_a_run_it_is_the_batch_after_the_last_checkpoint(tmp_path: Path) -> None:
    run, following = stopped_after(small("fp8-rollout"), 2, tmp_path)
    batch = collect(run)
    assert batch.version == 2
    assert_is_the_batch_of(batch, following)


def test_weights_that_were_older_than_the_trainers_are_kept(tmp_path: Path) -> None:
    run, following = stopped_after(small("bf16", **{"grpo.staleness": 1}), 2, tmp_path)
    batch = collect(run)
    assert_is_the_batch_of(batch, following)
    assert (batch.version, batch.rollouts.weight_version) == (2, 1)
    assert batch.sampled_with is not None
    assert batch.engine_weights is batch.sampled_with
    assert any(not torch.equal(tensor, batch.weights[name]) for name, tensor in batch.engine_weights.items())


def test_a_run_without_a_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    run = Run(RunDirectory.create(small("bf16"), tmp_path))
    with pytest.raises(ValueError, match="no checkpoint yet: wait for one"):
        collect(run)


def test_a_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"device: what-ifs .* with device=cpu"):
        collect(Experiment(device="cuda"))


def test_a_preset_goes_by_its_name() -> None:
    with pytest.raises(ConfigError, match="did you mean fp8-rollout"):
        collect("fp8-rolout")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rollout-kv"])
def test_a_file_brings_all_of_it_back(recipe: str, batch_of: BatchOf, tmp_path: Path) -> None:
    batch = batch_of(recipe)
    older = {name: tensor * 0.5 for name, tensor in batch.weights.items()}
    for stored in (batch, dataclasses.replace(batch, sampled_with=older)):
        stored.save(tmp_path / "batch.safetensors")
        loaded = Batch.load(tmp_path / "batch.safetensors")
        assert loaded.experiment == stored.experiment
        assert (loaded.scales, loaded.version) == (stored.scales, stored.version)
        assert loaded.engine_weights.keys() == stored.engine_weights.keys()
        for name, tensor in stored.weights.items():
            assert torch.equal(loaded.weights[name], tensor)
            assert torch.equal(loaded.engine_weights[name], stored.engine_weights[name])
        assert (loaded.sampled_with is None) == (stored.sampled_with is None)
        for name in ("rewards_B", "advantages_B", "p_BR"):
            assert torch.equal(getattr(loaded, name), getattr(stored, name))
        for field in dataclasses.fields(stored.rollouts):
            assert_equal(getattr(loaded.rollouts, field.name), getattr(stored.rollouts, field.name))


def assert_equal(a: object, b: object) -> None:
    assert torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def test_files_that_are_no_batches_are_named(batch_of: BatchOf, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Batch.load(tmp_path / "missing.safetensors")
    (tmp_path / "text").write_text("not a batch")
    with pytest.raises(ValueError, match="cannot be read as a batch"):
        Batch.load(tmp_path / "text")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is no stored batch: make one with"):
        Batch.load(tmp_path / "other.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "newer.safetensors", {"kind": "labkit-batch", "schema": "99"})
    with pytest.raises(ValueError, match="newer labkit: update labkit"):
        Batch.load(tmp_path / "newer.safetensors")


def test_routes_are_kept_and_recipes_with_and_without_replay_compare_on_one_batch(tmp_path: Path) -> None:
    batch = collect(small("fp8-rollout", **{"model": "tiny-moe", "recipe.router.replay": "r3"}))
    batch.save(tmp_path / "routed.safetensors")
    again = Batch.load(tmp_path / "routed.safetensors")
    assert again.rollouts.routes_BTLK is not None
    assert torch.equal(again.rollouts.routes_BTLK, batch.rollouts.routes_BTLK)
    own = again.experiment.recipe.override({"router.replay": "off"})
    replayed, free = whatif(again, [again.experiment.recipe, own], ["none"]).rows
    recorded = mismatch(batch.rollouts.logprobs_BR, batch.p_BR, batch.rollouts.mask_BR)
    assert replayed.gen_kl == recorded["gen_kl_error"]
    assert replayed.gen_kl != free.gen_kl
