from typing import Any

import pytest

from labkit.config import ConfigError, Experiment

ON_GPU = {"engine": "vllm", "device": "cuda"}
FP8_CACHE = {"kv_cache": True, "attention": True}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"trainer": "te"}, "device: Transformer Engine computes on CUDA devices only; set it to cuda"),
        (
            {"engine": "vllm", "recipe": {"rollout": {"linears": True}, "keep_bf16": {"lm_head": False}}},
            "recipe.keep_bf16.lm_head: vLLM never quantises the lm_head",
        ),
        (
            {"engine": "vllm", "recipe": {"rollout": {"kv_cache": True}, "recalibration": {"policy": "engine"}}},
            "recipe.recalibration.policy: vLLM no longer measures scales itself; choose every-step",
        ),
        (
            {"engine": "vllm", "recipe": {"rollout": {"kv_cache": True, "attention": True}}},
            "recipe.rollout.attention: vLLM on a CPU reads the FP8 cache but multiplies in BF16; turn it off",
        ),
        (
            {"engine": "vllm", "sampling": {"temperature": 0.005}},
            "sampling.temperature: vLLM raises anything below 0.01 to that; set it to at least 0.01",
        ),
        (
            {"engine": "vllm", "device": "cuda", "recipe": {"rollout": {"kv_cache": True}}},
            "recipe.rollout.attention: vLLM's attention on a GPU quantises Q and P too where the cache is FP8; turn it",
        ),
        (
            ON_GPU | {"recipe": {"rollout": FP8_CACHE, "scaling": {"kv_format": "e5m2"}}},
            "recipe.scaling.kv_format: vLLM's FP8 attention on a GPU is E4M3 only; set it to e4m3",
        ),
        (
            ON_GPU | {"recipe": {"rollout": {"linears": True}, "scaling": {"format": "e5m2"}}},
            "recipe.scaling.format: vLLM's FP8 kernels on a GPU are E4M3 only; set it to e4m3",
        ),
        (
            ON_GPU | {"recipe": {"rollout": {"linears": True}, "scaling": {"granularity": "tensor"}}},
            "recipe.scaling.granularity: vLLM gives the fused q, k, v one scale, the trainer three; choose block",
        ),
        (
            ON_GPU | {"recipe": {"rollout": {"linears": True}, "scaling": {"granularity": "mx"}}},
            "recipe.scaling.granularity: no kernel of vLLM takes MX weights that were quantised here; choose block",
        ),
        (
            ON_GPU | {"recipe": {"rollout": {"linears": True}, "scaling": {"granularity": "row"}}},
            "recipe.scaling.scale: vLLM's scale of a token on a GPU is never rounded to a power of 2; set it to fp32",
        ),
        (
            {"engine": "vllm", "faults": ["scales-dropped"], "recipe": {"rollout": {"kv_cache": True}}},
            "engine: faults are built into local, not vllm; set it to local, or drop faults",
        ),
        ({"cluster": {"overlap": True}}, "cluster.overlap: needs an engine of its own, not placement process"),
        ({"engine": "vllm", "eval_engine": True}, "eval_engine: needs a second engine, which only the local one"),
        ({"cluster": {"address": "auto"}}, "cluster.address: a run in one process uses no Ray"),
        (
            {"cluster": {"placement": "separate", "overlap": True}},
            "grpo.staleness: the next batch is sampled before this step's weights exist; set it to at least 1",
        ),
    ],
)
def test_what_can_not_work_together_is_refused_with_the_way_out(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(**settings)
    assert caught.value.problems[0].startswith(line)


def test_what_can_work_together_is_accepted() -> None:
    Experiment(engine="vllm", recipe={"rollout": {"linears": True, "kv_cache": True}})
    Experiment(**ON_GPU, recipe={"rollout": {"linears": True, **FP8_CACHE}})
    Experiment(**ON_GPU, recipe={"rollout": {"linears": True}, "scaling": {"granularity": "row", "scale": "fp32"}})
    Experiment(cluster={"placement": "separate", "overlap": True}, grpo={"staleness": 1})


FP8 = {"train": {"fprop": True, "dgrad": True, "wgrad": True}}


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ({"train": {"fprop": True, "wgrad": True}}, "recipe.train: Transformer Engine has FP8 for all three GEMMs"),
        ({"train": {"dgrad": True, "wgrad": True}}, "recipe.train: Transformer Engine has FP8 for all three GEMMs"),
        ({**FP8, "scaling": {"granularity": "row"}}, "recipe.scaling.granularity: Transformer Engine has no recipe"),
        ({**FP8, "scaling": {"format": "e5m2"}}, "recipe.scaling.format: Transformer Engine has E5M2 for gradients"),
        ({**FP8, "scaling": {"formula": "deepgemm"}}, "recipe.scaling.formula: Transformer Engine computes scales by"),
    ],
)
def test_what_transformer_engine_can_not_do_is_refused_with_the_way_out(recipe: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(trainer="te", device="cuda", recipe=recipe)
    assert caught.value.problems[0].startswith(line)
    assert "trainer" in caught.value.problems[0]


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        FP8,
        {"train": {"fprop": True}},
        {**FP8, "scaling": {"granularity": "tensor", "scale": "fp32", "grad_format": "e5m2"}},
        {**FP8, "scaling": {"granularity": "mx"}},
        {"rollout": {"linears": True}, "scaling": {"granularity": "row"}},  # the rollout's alone
    ],
)
def test_what_transformer_engine_can_do_is_accepted(recipe: dict[str, Any]) -> None:
    Experiment(trainer="te", device="cuda", recipe=recipe)


def test_faults_are_not_lost_on_a_gpu() -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(device="cuda", faults=["scales-dropped"], recipe={"rollout": {"kv_cache": True}})
    assert caught.value.problems == ("device: faults are built into cpu, not cuda; set it to cpu, or drop faults",)
