"""Where a mismatch comes from: exact at both ends, and right about errors that were planted."""

import dataclasses
import io
from collections.abc import Callable
from functools import cache

import pytest
import torch
from rich.console import Console

from labkit.analysis import Attribution, Batch, attribute, collect
from labkit.analysis.attribution import Component, _Operands, _parts
from labkit.fp8 import Float8Linear, LinearFormat
from labkit.rollout import LocalEngine

from .conftest import small

BatchOf = Callable[[str], Batch]
AttributionOf = Callable[[str, str], Attribution]


@pytest.fixture(scope="module")
def attribution_of(batch_of: BatchOf) -> AttributionOf:
    return cache(lambda recipe, compute: attribute(batch_of(recipe), compute))


def by_name(attribution: Attribution) -> dict[str, Component]:
    return {row.name: row for row in attribution.rows}


@pytest.mark.parametrize("recipe", ["fp8-rollout", "fp8-rollout-kv", "fp8-e2e-kv"])
def test_all_components_together_are_the_recorded_mismatch(recipe: str, attribution_of: AttributionOf) -> None:
    found = attribution_of(recipe, "bf16")
    assert found.together == found.recorded
    assert found.recorded.gen_kl > 0
    names = set(by_name(found))
    assert ("linears" in names) == (recipe != "fp8-e2e-kv")  # FP8 on both sides: no difference
    assert {"K", "V", "Q", "P", "K: layer 3", "V: layer 0"} <= names or recipe == "fp8-rollout"


@pytest.mark.parametrize("recipe", ["bf16", "fp8-e2e"])
def test_with_one_recipe_on_both_sides_there_is_nothing_to_attribute(recipe: str, batch_of: BatchOf) -> None:
    found = attribute(batch_of(recipe))
    assert found.rows == []
    assert (found.together.tmpe, found.together.gen_kl) == (1.0, 0.0)


def test_a_sole_group_is_everything_alone_and_nothing_when_left_out(attribution_of: AttributionOf) -> None:
    found = attribution_of("fp8-rollout", "fp32")
    linears = by_name(found)["linears"]
    assert linears.alone == found.together
    assert (linears.left_out.tmpe, linears.left_out.gen_kl) == (1.0, 0.0)
    rows = by_name(found)
    assert set(rows) == {
        "linears", "linears: weights", "linears: activations",
        *(f"linears: {name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(f"linears: layer {layer}" for layer in range(4)),
    }  # fmt: skip
    for row in found.rows[1:]:
        assert 0 < row.alone.gen_kl < 2 * linears.alone.gen_kl
    assert rows["linears: weights"].left_out == rows["linears: activations"].alone


def test_fp8_in_the_trainer_alone_is_a_component_too() -> None:
    batch = collect(small("bf16", **{"recipe.train.fprop": True, "recipe.keep_bf16.lm_head": False}))
    found = attribute(batch, "bf16")
    assert found.together == found.recorded
    assert found.recorded.gen_kl > 0
    assert "lm_head" in by_name(found)


def test_another_kernel_in_the_trainer_is_a_component() -> None:
    batch = collect(small("bf16", trainer_attention="sdpa"))
    found = attribute(batch, "bf16")
    assert list(by_name(found)) == ["kernel"]
    assert found.rows[0].alone == found.together
    assert found.together.gen_kl == pytest.approx(found.recorded.gen_kl, rel=0.2)  # sdpa is not batch-invariant
    assert attribute(batch, "fp32").together.gen_kl < found.together.gen_kl / 100  # roundings, nothing else


def test_kernel_and_cache_together_reproduce_the_run() -> None:
    batch = collect(small("fp8-rollout-kv", trainer_attention="sdpa"))
    found = attribute(batch, "bf16")
    assert found.together.gen_kl == pytest.approx(found.recorded.gen_kl, rel=0.2)
    rows = by_name(found)
    assert {"kernel", "K", "V", "Q", "P", "linears"} <= set(rows)
    assert rows["kernel"].alone.gen_kl < rows["linears"].alone.gen_kl


def test_a_planted_bad_scale_is_found(batch_of: BatchOf) -> None:
    """Values of layer 2 clipped to a tenth of their range: that component alone does it, and without it all is well."""
    batch = batch_of("fp8-rollout-kv")
    assert batch.scales is not None
    v = tuple(scale * (0.1 if layer == 2 else 1) for layer, scale in enumerate(batch.scales.v))
    found = attribute(dataclasses.replace(batch, scales=dataclasses.replace(batch.scales, v=v)), "fp32")
    worst = max((row for row in found.rows if ":" in row.name), key=lambda row: row.alone.gen_kl)
    assert worst.name == "V: layer 2"
    assert worst.alone.gen_kl > 0.5 * found.together.gen_kl
    assert worst.left_out.gen_kl < 0.2 * found.together.gen_kl
    least = min((row for row in found.rows if row.name != "V"), key=lambda row: row.left_out.gen_kl)
    assert least.name == "V: layer 2"


def test_fp32_shows_below_the_rounding_floor_of_bf16(attribution_of: AttributionOf) -> None:
    fp32, bf16 = (by_name(attribution_of("fp8-rollout-kv", compute))["V: layer 3"] for compute in ("fp32", "bf16"))
    assert fp32.alone.gen_kl < bf16.alone.gen_kl / 2


def stale(batch: Batch) -> Batch:
    """The same tokens, drawn by weights two versions older."""
    older = {name: tensor * 0.98 if "up_proj" in name else tensor for name, tensor in batch.weights.items()}
    engine = LocalEngine(batch.policy.config, batch.experiment.recipe)
    engine.refit(older, batch.scales, 3)
    g_BR = engine.score(batch.rollouts, batch.experiment.sampling)
    rollouts = dataclasses.replace(batch.rollouts, logprobs_BR=g_BR, weight_version=3)
    return dataclasses.replace(batch, rollouts=rollouts, sampled_with=older, version=5)


def test_older_weights_are_a_component(batch_of: BatchOf) -> None:
    found = attribute(stale(batch_of("fp8-rollout")), "bf16")
    rows = by_name(found)
    assert found.together == found.recorded
    assert rows["weights: 2 steps older"].alone.gen_kl > 0
    assert rows["weights: 2 steps older"].left_out == rows["linears"].alone


def test_older_weights_that_are_not_in_the_batch_are_said_to_be_missing(batch_of: BatchOf) -> None:
    batch = dataclasses.replace(stale(batch_of("bf16")), sampled_with=None)
    notes = attribute(batch).notes
    assert "staleness: not in this batch, which holds no weights but the trainer's" in notes
    assert notes[-1].startswith("the components do not make up what was recorded")


def test_what_teacher_forcing_cannot_show_is_noted(batch_of: BatchOf) -> None:
    found = attribute(batch_of("fp8-e2e-tensor"))
    assert found.recorded.gen_kl > 0
    assert found.together.gen_kl == 0.0
    assert any(note.startswith("scales per tensor") for note in found.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("granularity", "scale"),
    [("block", "pow2"), ("block", "fp32"), ("row", "fp32"), ("mx", "pow2"), ("tensor", "pow2")],
)
def test_operands_with_both_switches_are_the_fp8_linear(granularity: str, scale: str, dtype: torch.dtype) -> None:
    fmt = LinearFormat(fprop=True, granularity=granularity, scale=scale)
    torch.manual_seed(0)
    linear = Float8Linear(256, 128, bias=True, precision=fmt, dtype=dtype).requires_grad_(False)
    linear.bias.normal_()
    operands, x = _Operands(linear, fmt), torch.randn(8, 256, dtype=dtype)
    operands.fp8_weight = operands.fp8_input = True
    assert torch.equal(operands(x), linear(x))
    operands.fp8_input = False
    weights_only = operands(x)
    operands.fp8_weight = False
    assert torch.equal(operands(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    assert not torch.equal(weights_only, operands(x))


def test_the_table_shows_every_component(batch_of: BatchOf, attribution_of: AttributionOf) -> None:
    found = attribution_of("fp8-rollout", "fp32")
    screen = io.StringIO()
    Console(width=160, file=screen).print(found.table())
    drawn = screen.getvalue()
    for row in found.rows:
        assert row.name in drawn
    assert "recorded TMPE" in drawn
    with pytest.raises(ValueError, match="choose one of bf16, fp32"):
        attribute(batch_of("fp8-rollout"), "fp16")


def test_experts_are_a_component_and_their_numbers_are_no_layers() -> None:
    batch = collect(small("fp8-rollout", model="tiny-moe", **{"sampling.max_new_tokens": 8}))
    found = attribute(batch, "bf16")
    assert found.together == found.recorded
    names = set(by_name(found))
    assert {"linears: experts", *(f"linears: layer {layer}" for layer in range(4))} <= names
    assert "layer 3" in _parts(("linear", "model.layers.3.mlp.experts.1.up_proj", "w"))
    assert "layer 1" not in _parts(("linear", "model.layers.3.mlp.experts.1.up_proj", "w"))
