"""The same tokens through other implementations: transformers everywhere, vLLM where it is installed."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from labkit.analysis import Batch, Kernels, kernels
from labkit.analysis.kernels import REFERENCE
from labkit.hardware import packages

pytest.importorskip("transformers")

BatchOf = Callable[[str], Batch]


def by_name(found: Kernels) -> dict[tuple[str, str], float]:
    return {(row.precision, row.implementation): row.mean_abs for row in found.rows}


def test_in_fp32_they_are_one_model_and_bf16_is_a_floor_under_fp8(batch_of: BatchOf) -> None:
    batch = batch_of("fp8-rollout-kv")
    found = kernels(batch)
    apart = by_name(found)
    assert apart[REFERENCE] == 0
    for (precision, implementation), mean_abs in apart.items():
        if (precision, implementation) == REFERENCE:
            continue
        low, high = {"FP32": (0, 1e-6), "BF16": (1e-4, 1.5e-3)}.get(precision, (1e-3, 1e-2))
        assert low < mean_abs < high, (precision, implementation)
    assert {precision for precision, _ in apart} == {
        "FP32", "BF16", "FP8 linears", "FP8 KV cache", "FP8 KV cache + attention", "FP8 linears + KV cache",
        "FP8 linears + KV cache + attention",
    }  # fmt: skip
    own = next(row for row in found.rows if row.precision.endswith("+ KV cache + attention"))
    assert torch.equal(own.logprobs_BR, batch.rollouts.logprobs_BR)  # the recipe that drew the tokens
    there, why = packages.vllm()
    assert found.missing == ({} if there else {"vLLM": why})
    assert (("BF16", "vLLM") in apart) == there


def test_a_batch_of_stale_weights_is_refused(batch_of: BatchOf) -> None:
    batch = batch_of("bf16")
    stale = dataclasses.replace(batch, sampled_with=batch.weights)
    with pytest.raises(ValueError, match="collect one with staleness 0"):
        kernels(stale)


@pytest.mark.skipif(not packages.vllm()[0], reason=packages.vllm()[1])
def test_what_vllm_cannot_do_has_a_reason_instead_of_a_row(batch_of: BatchOf) -> None:
    batch = batch_of("fp8-rollout")
    settings = {"recipe.keep_bf16.lm_head": False, "eval_engine": True}
    found = kernels(dataclasses.replace(batch, experiment=batch.experiment.override(settings)))
    assert "vLLM never quantises the lm_head" in found.missing["vLLM, FP8 linears"]
    assert [row.precision for row in found.rows if row.implementation == "vLLM"] == ["FP32", "BF16"]
    assert "tensor" not in repr(found.rows[0])
