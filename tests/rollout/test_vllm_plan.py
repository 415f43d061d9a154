import dataclasses
from typing import Any

import pytest

from labkit import models
from labkit.config import Experiment
from labkit.hardware import packages
from labkit.models.decoder import DecoderConfig
from labkit.models.moe import MoEConfig
from labkit.rollout import build_engine
from labkit.rollout.vllm import launch
from labkit.rollout.vllm.plan import CACHE_LIMIT, LONGEST, make_plan

TINY = DecoderConfig(32, 128, 384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, max_positions=256)
QWEN_8B = DecoderConfig(151936, 4096, 12288, 36, num_heads=32, num_kv_heads=8, head_dim=128, max_positions=40960)
SMOLLM2 = DecoderConfig(49152, 576, 1536, 30, num_heads=9, num_kv_heads=3, head_dim=64, max_positions=8192)


def experiment(device: str = "cpu", **settings: Any) -> Experiment:
    return Experiment(engine="vllm", device=device, **settings)


def test_bf16_on_a_cpu() -> None:
    plan = make_plan(experiment(), TINY)
    assert plan.linears is None
    assert plan.arguments["kv_cache_dtype"] == "auto"
    assert plan.arguments["logprobs_mode"] == "processed_logprobs"
    assert plan.arguments["enforce_eager"]
    assert plan.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert plan.environment["TORCH_COMPILE_DISABLE"] == "1"


def test_the_cache_of_an_fp32_model_has_as_many_pages() -> None:
    bf16, fp32 = (make_plan(experiment(), QWEN_8B, dtype).arguments for dtype in ("bfloat16", "float32"))
    assert (bf16["dtype"], fp32["dtype"]) == ("bfloat16", "float32")
    small = experiment(**{"grpo": {"prompts_per_step": 1, "group_size": 2}})  # the longest sequence decides
    sizes = [make_plan(small, SMOLLM2, dtype).arguments["kv_cache_memory_bytes"] for dtype in ("bfloat16", "float32")]
    assert sizes[1] == 2 * sizes[0]


def test_a_cpu_gets_the_whole_recipe_by_emulation() -> None:
    recipe = {
        "rollout": {"linears": True, "kv_cache": True},
        "scaling": {"format": "e5m2", "kv_format": "e5m2", "granularity": "row", "scale": "fp32", "formula": "vllm"},
        "keep_bf16": {"first_layers": 1, "last_layers": 2},
    }
    plan = make_plan(experiment(recipe=recipe), TINY)
    assert plan.arguments["kv_cache_dtype"] == "fp8_e5m2"
    assert plan.linears is not None
    assert plan.linears.state == "emulated"
    assert plan.linears.scale_name is None  # weights are sent in BF16
    assert plan.linears.quantization == {
        "quant_method": "labkit", "layers": [1], "format": "e5m2", "granularity": "row", "scale": "fp32",
        "formula": "vllm",
    }  # fmt: skip


@pytest.mark.parametrize(("scale", "e8m0"), [("pow2", "1"), ("fp32", "0")])
def test_blocks_on_a_gpu_are_sent_as_a_checkpoint_and_never_requantised(scale: str, e8m0: str) -> None:
    recipe = {
        "rollout": {"linears": True, "kv_cache": True, "attention": True},
        "scaling": {"scale": scale},
        "keep_bf16": {"last_layers": 35},
    }
    plan = make_plan(experiment("cuda", recipe=recipe), QWEN_8B)
    assert plan.environment["VLLM_USE_DEEP_GEMM_E8M0"] == e8m0
    assert plan.environment["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"
    assert {"VLLM_USE_DEEP_GEMM_E8M0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "VLLM_USE_DEEP_GEMM"} <= plan.binding
    assert plan.arguments["attention_config"] == {"backend": "FLASH_ATTN"}
    assert plan.arguments["kv_cache_dtype"] == "fp8_e4m3"
    assert "enforce_eager" not in plan.arguments
    assert plan.linears is not None
    assert (plan.linears.state, plan.linears.scale_name) == ("fp8", "weight_scale_inv")
    assert plan.linears.quantization["weight_block_size"] == [128, 128]
    kept = plan.linears.quantization["modules_to_not_convert"]
    assert "model.layers.1.self_attn.q_proj" in kept
    assert "model.layers.0.self_attn.q_proj" not in kept
    assert ("activations by vLLM's rule" in plan.linears.why) == (scale == "fp32")


def test_rows_on_a_gpu_take_the_other_kind_of_checkpoint() -> None:
    recipe = {"rollout": {"linears": True}, "scaling": {"granularity": "row", "scale": "fp32"}}
    plan = make_plan(experiment("cuda", recipe=recipe), SMOLLM2)
    assert plan.linears is not None
    assert plan.linears.scale_name == "weight_scale"
    group = plan.linears.quantization["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")


def test_a_shape_without_a_kernel_is_refused_with_the_way_out() -> None:
    recipe = {"rollout": {"linears": True}}
    with pytest.raises(ValueError, match=r"multiples of 128, but hidden_size is 576: set recipe.scaling.granularity"):
        make_plan(experiment("cuda", recipe=recipe), SMOLLM2)
    experts = dataclasses.replace(TINY, moe=MoEConfig(4, 2, 64, layers=(0, 1, 2, 3)))
    with pytest.raises(ValueError, match=r"not a mixture of experts yet: set engine to local"):
        make_plan(experiment(), experts)
    narrow = dataclasses.replace(TINY, head_dim=48)
    with pytest.raises(ValueError, match=r"heads of a multiple of 32, this model's have 48: turn recipe.rollout.kv_ca"):
        make_plan(experiment(recipe={"rollout": {"kv_cache": True}}), narrow)


def test_the_cache_holds_the_batch_within_limits() -> None:
    def size(config: DecoderConfig, **settings: Any) -> int:
        return int(make_plan(experiment(**settings), config).arguments["kv_cache_memory_bytes"])

    token = 2 * 4 * 2 * 32 * 2  # K and V of every layer and head in BF16
    assert size(TINY) == 16 * 8 * 256 * token
    assert size(TINY, recipe={"rollout": {"kv_cache": True}}) == 16 * 8 * 256 * token // 2
    assert size(SMOLLM2, grpo={"prompts_per_step": 1000}) == CACHE_LIMIT["cpu"]
    few = size(QWEN_8B, grpo={"prompts_per_step": 1, "group_size": 2})
    assert few >= (LONGEST + 1) * 2 * 36 * 8 * 128 * 2  # one sequence of full length fits in any case


def test_an_environment_that_contradicts_the_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(experiment("cuda", recipe={"rollout": {"linears": True}}), QWEN_8B)
    for name, value in plan.environment.items():
        monkeypatch.setenv(name, value)
    launch.set_environment(plan)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    with pytest.raises(ValueError, match="VLLM_USE_DEEP_GEMM_E8M0 is 0 in this process, but this recipe needs 1"):
        launch.set_environment(plan)


def test_a_vllm_for_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device cuda needs the package vllm; the vLLM that is installed is for cpu"):
        launch.check_platform(make_plan(experiment("cuda"), QWEN_8B), "cpu")


@pytest.mark.skipif(packages.vllm()[0], reason="vLLM is there")
def test_a_missing_vllm_is_named_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="vLLM is not installed: the README's section on real engines has the command"):
        build_engine(models.load("tiny"), experiment(), lambda: None)
