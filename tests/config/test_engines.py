from typing import Any

import pytest

from labkit.config import ConfigError, Experiment


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
            {"engine": "vllm", "faults": ["scales-dropped"], "recipe": {"rollout": {"kv_cache": True}}},
            "engine: faults are built into local, not vllm; set it to local, or drop faults",
        ),
        ({"cluster": {"overlap": True}}, "cluster.overlap: needs an engine of its own, not placement process"),
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
    Experiment(engine="vllm", device="cuda", recipe={"rollout": {"kv_cache": True, "attention": True}})
    Experiment(cluster={"placement": "separate", "overlap": True}, grpo={"staleness": 1})
