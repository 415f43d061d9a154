"""What vLLM is told for an Experiment, as data: tested everywhere, also where vLLM or the GPU is missing.

    device   rollout.linears                how, and why so
    cpu      any granularity, scale, format  emulated: vLLM's linears quantise with labkit's own quantiser
    cuda     block                           an FP8 *checkpoint* (weight, weight_scale_inv) in vLLM's block kernel
    cuda     row, FP32 scales                the same in compressed-tensors form (weight, weight_scale)

On a GPU the weights are quantised here, once, and sent as codes and scales. vLLM's online FP8 would instead take FP32
scales and, by its defaults, quantise the result *again* to powers of two: a quarter of the weights then differ from the
Recipe's. Sent as a checkpoint they are the trainer's to the bit, whatever the formula. Activations are quantised by
vLLM's kernels; with powers of two all formulas agree, with FP32 scales theirs differs from others in about one code of
a thousand, which `VLLMEngine.active` says.

    VLLM_USE_DEEP_GEMM_E8M0              power-of-2 scales for activations; vLLM reads it once in a process
    VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER  0: the kernel for few tokens, which quantises by rules of its own

What vLLM can't do is refused by `labkit.config.engines`, and here where the model's shape decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from labkit.config import Experiment, Recipe

if TYPE_CHECKING:
    from labkit.models.decoder import DecoderConfig

LONGEST = 4096  # tokens of prompt and response: what vLLM must be able to hold at once
EXPECTED = 512  # tokens that a sequence is taken to need when the cache is sized; vLLM queues what does not fit
MOST_SEQUENCES = 256
CACHE_LIMIT = {"cpu": 1 << 30, "cuda": 16 << 30}
PAGE = 128  # tokens in a block of vLLM's cache on a CPU; larger than a GPU's
BLOCK = 128

COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its model can be reached and read back
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Linears:
    """How vLLM's linear layers come to multiply in FP8. `scale_name`: what a weight's scales are called, if sent."""

    quantization: Mapping[str, Any]  # quantization_config of config.json
    scale_name: str | None
    state: Literal["fp8", "emulated"]
    why: str


@dataclass(frozen=True)
class Plan:
    device: str
    environment: Mapping[str, str]  # where the user has not set it
    binding: frozenset[str]  # of those, the ones that must hold
    arguments: Mapping[str, Any]  # of vllm.LLM, but for the model's folder
    linears: Linears | None  # None: BF16
    longest: int


def make_plan(experiment: Experiment, config: "DecoderConfig", dtype: str = "bfloat16") -> Plan:
    """Raises ValueError, with the way out, for a model whose shape vLLM has no kernel for."""
    if config.moe:
        raise ValueError("vLLM gets dense models only from labkit, not a mixture of experts yet: set engine to local")
    recipe, device = experiment.recipe, experiment.device
    longest = min(config.max_positions, LONGEST)
    sequences = experiment.grpo.prompts_per_step * experiment.grpo.group_size
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "load_format": "dummy",  # weights come by refit, always
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from; vLLM's own default is not
        "max_model_len": longest + 1,  # scoring asks for one token after the last
        "max_num_seqs": min(sequences, MOST_SEQUENCES),
        "kv_cache_memory_bytes": _cache_bytes(_width(recipe, dtype), config, device, sequences, longest),
        "kv_cache_dtype": f"fp8_{recipe.scaling.kv_format}" if recipe.rollout.kv_cache else "auto",
    }
    environment = dict(COMMON)
    binding = {"VLLM_ENABLE_V1_MULTIPROCESSING"}
    if device == "cpu":
        environment["TORCH_COMPILE_DISABLE"] = "1"  # else the first log-prob of each batch size compiles C++
        arguments["enforce_eager"] = True
        if recipe.rollout.kv_cache and config.head_dim % 32:
            what = f"vLLM's FP8 cache on a CPU needs heads of a multiple of 32, this model's have {config.head_dim}"
            raise ValueError(f"{what}: turn recipe.rollout.kv_cache off, or set engine to local")
    else:
        arguments["gpu_memory_utilization"] = 0.4  # only checked to be free: the cache's size is given
        if recipe.rollout.kv_cache:
            arguments["attention_config"] = {"backend": "FLASH_ATTN"}
        kernels = {
            "VLLM_USE_DEEP_GEMM": "1",
            "VLLM_USE_DEEP_GEMM_E8M0": "1" if recipe.scaling.scale == "pow2" else "0",
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
        }
        environment |= kernels  # in BF16 too, so that block FP8 can be switched on later
        if recipe.rollout.linears and recipe.scaling.granularity == "block":
            binding |= kernels.keys()
    linears = _linears(recipe, config, device)
    return Plan(device, environment, frozenset(binding), arguments, linears, longest)


def _width(recipe: Recipe, dtype: str) -> int:
    """Bytes of a number in the cache."""
    return 1 if recipe.rollout.kv_cache else {"bfloat16": 2, "float32": 4}[dtype]


def _cache_bytes(width: int, config: "DecoderConfig", device: str, sequences: int, longest: int) -> int:
    """Room for the whole batch up to a limit, and for the longest sequence in any case."""
    per_page = PAGE * 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    pages = sequences * -(-min(longest, EXPECTED) // PAGE)
    least = -(-(longest + 1) // PAGE) + 1  # vLLM keeps one block for itself
    return max(min(pages * per_page, CACHE_LIMIT[device]), least * per_page)


def _linears(recipe: Recipe, config: "DecoderConfig", device: str) -> Linears | None:
    if not recipe.rollout.linears:
        return None
    covered = [layer for layer in range(config.num_layers) if recipe.covers(layer, config.num_layers)]
    scaling = recipe.scaling
    if device == "cpu":
        quantization = {
            "quant_method": "labkit",
            "layers": covered,
            "format": scaling.format,
            "granularity": scaling.granularity,
            "scale": scaling.scale,
            "formula": scaling.formula,
        }
        return Linears(quantization, None, "emulated", "labkit's quantiser inside vLLM's linears")
    kept = [f"model.layers.{layer}.{part}" for layer in range(config.num_layers) if layer not in covered
            for part in PROJECTIONS]  # fmt: skip
    _check_shape(config, scaling.granularity)
    if scaling.granularity == "block":
        block = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*kept, "lm_head"],
        }
        rule = "" if scaling.scale == "pow2" else ", activations by vLLM's rule"
        return Linears(block, "weight_scale_inv", "fp8", f"vLLM's block kernel on labkit's weights{rule}")
    half = {"num_bits": 8, "type": "float", "symmetric": True}
    row = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": half | {"strategy": "channel", "dynamic": False},
                "input_activations": half | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": [*kept, "lm_head"],
    }
    return Linears(row, "weight_scale", "fp8", "vLLM's row kernel on labkit's weights, activations by vLLM's rule")


PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def _check_shape(config: "DecoderConfig", granularity: str) -> None:
    multiple = {"block": BLOCK, "row": 16}[granularity]
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "the width of Q": config.num_heads * config.head_dim,
        "the width of K and V": config.num_kv_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size % multiple:
            what = f"vLLM's FP8 {granularity} kernels need multiples of {multiple}, but {name} is {size}"
            way = "set recipe.scaling.granularity to row (with scale fp32), " if granularity == "block" else ""
            raise ValueError(f"{what}: {way}turn recipe.rollout.linears off, or choose another model")
