"""Hugging Face folders (config.json, model.safetensors, tokenizer.json) to and from a `Policy`.

Four families share the one `Decoder`; what tells them apart is written here and nowhere else:

    family      architecture           qkv bias   QK-norm   head_dim                        experts
    llama       LlamaForCausalLM       no         no        config, else hidden / heads     no
    qwen2       Qwen2ForCausalLM       yes        no        config, else hidden / heads     no
    qwen3       Qwen3ForCausalLM       no         yes       config                          no
    qwen3_moe   Qwen3MoeForCausalLM    no         yes       config                          yes

Experts are single tensors by name in a folder, whatever a library makes of them in memory. Which layers have them
follows from `decoder_sparse_step` (every n-th) and `mlp_only_layers` (not these). Their number is `num_experts`, or
`num_local_experts` in folders that transformers 5 wrote.

A checkpoint that needs anything the Decoder doesn't do (RoPE scaled otherwise than Llama 3.1's, sliding windows, other
biases, quantised weights) is refused with the key that asks for it: a model that is nearly right gives plausible
log-probs and a mismatch nobody can explain. RoPE is read from `rope_theta` and `rope_scaling` or the newer
`rope_parameters`, and written as both. Weights come from model.safetensors, or from the shards that
model.safetensors.index.json lists.
"""

import json
import math
import shutil
from dataclasses import astuple
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.moe import MoEConfig
from labkit.models.policy import Family, Policy
from labkit.models.rope import Llama3Scaling
from labkit.models.tokenizer import Tokenizer, read_json

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
QK_NORM = ("qwen3", "qwen3_moe")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # as Llama3Scaling
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


# Reading


def read_folder(path: str | PathLike[str], dtype: torch.dtype = torch.float32) -> Policy:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json; give the folder that AutoModelForCausalLM.save_pretrained wrote"
        )
    family, config = read_config(read_json(folder / "config.json"))
    weights = _checked(_read_weights(folder, dtype), config, folder)
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens but config.json says vocab_size = "
            f"{config.vocab_size}; take both from the same model"
        )
    return Policy(config, weights, tokenizer, folder.resolve().name, family)


def read_config(raw: dict[str, Any]) -> tuple[Family, DecoderConfig]:
    """The Decoder's view of a config.json; ValueError naming the first key that it can't honour."""
    family = _family(raw)
    required = [*SIZES, "rms_norm_eps", *(["head_dim"] if family in QK_NORM else [])]
    if missing := [key for key in required if raw.get(key) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}; copy it again from the model's source")
    for key in (*SIZES, *OPTIONAL_SIZES):
        if raw.get(key) is not None:
            _check_positive(key, raw[key], whole=True)
    _check_positive("rms_norm_eps", raw["rms_norm_eps"])
    _refuse_unsupported(raw, family)
    heads = raw["num_attention_heads"]
    return family, DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rope_scaling=_rope_scaling(raw),
        rope_theta=_rope_theta(raw),
        rms_eps=raw["rms_norm_eps"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        qk_norm=family in QK_NORM,
        qkv_bias=family == "qwen2",
        max_positions=raw["max_position_embeddings"],
        moe=_experts(raw) if family == "qwen3_moe" else None,
    )


def _experts(raw: dict[str, Any]) -> MoEConfig:
    sizes = {
        "num_experts": raw.get("num_experts", raw.get("num_local_experts")),
        "num_experts_per_tok": raw.get("num_experts_per_tok"),
        "moe_intermediate_size": raw.get("moe_intermediate_size"),
        "decoder_sparse_step": raw.get("decoder_sparse_step", 1),
    }
    if missing := [key for key, value in sizes.items() if value is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}; copy it again from the model's source")
    for key, value in sizes.items():
        _check_positive(key, value, whole=True)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"config.json has mlp_only_layers = {dense!r}, not a list; copy it again from its source")
    step = sizes["decoder_sparse_step"]
    layers = [n for n in range(raw["num_hidden_layers"]) if (n + 1) % step == 0 and n not in dense]
    if not layers:
        raise _unsupported("mlp_only_layers", dense, "Qwen3ForCausalLM for a model none of whose layers has experts")
    return MoEConfig(
        num_experts=sizes["num_experts"],
        experts_per_token=sizes["num_experts_per_tok"],
        intermediate_size=sizes["moe_intermediate_size"],
        layers=tuple(layers),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )


def _check_positive(key: str, value: Any, whole: bool = False) -> None:
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        kind = "whole number" if whole else "number"
        raise ValueError(f"config.json has {key} = {value!r}, not a positive {kind}; copy it again from its source")


def _group(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key of config.json, {} if there is none."""
    group = raw.get(key) or {}
    if not isinstance(group, dict):
        raise ValueError(f"config.json has {key} = {group!r}, not an object; copy it again from its source")
    return group


def _family(raw: dict[str, Any]) -> Family:
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else named
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise _unsupported("architectures", name, f"a model of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_unsupported(raw: dict[str, Any], family: Family) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", raw["hidden_act"], "a model with silu (SwiGLU)")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise _unsupported(key, raw[key], "a model without it (Qwen2's own q/k/v biases are supported)")
    if quantization := _group(raw, "quantization_config"):
        method = quantization.get("quant_method")
        raise _unsupported("quantization_config", method, "the unquantised checkpoint: FP8 is the Recipe's job")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported("partial_rotary_factor", raw["partial_rotary_factor"], "a model with full RoPE")
    if family != "llama" and _slides(raw):
        raise _unsupported("use_sliding_window", True, "a model whose layers all use full attention")


def _slides(raw: dict[str, Any]) -> bool:
    """Whether any layer really attends through a window; most Qwen configs name one but switch it off."""
    if raw.get("layer_types"):
        return "sliding_attention" in raw["layer_types"]
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return False
    unwindowed = raw.get("max_window_layers", 28)
    return not isinstance(unwindowed, int) or unwindowed < raw["num_hidden_layers"]


def _rope_theta(raw: dict[str, Any]) -> float:
    theta = _group(raw, "rope_parameters").get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json gives no rope_theta (nor rope_parameters.rope_theta); add the model's own")
    _check_positive("rope_theta", theta)
    return float(theta)


def _rope_scaling(raw: dict[str, Any]) -> Llama3Scaling | None:
    found = None
    for key in ("rope_parameters", "rope_scaling"):
        rope = _group(raw, key)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
            raise _unsupported(key, rope, "a model with plain RoPE (rope_type default) or Llama 3.1's (llama3)")
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise _unsupported(key, rope, "a model with full RoPE")
        if kind == "llama3":
            found = _llama3(key, rope)
    return found


def _llama3(key: str, rope: dict[str, Any]) -> Llama3Scaling:
    for name in LLAMA3_ROPE:
        _check_positive(f"{key}.{name}", rope.get(name), whole=name == "original_max_position_embeddings")
    return Llama3Scaling(*(rope[name] for name in LLAMA3_ROPE))


def _unsupported(key: str, value: object, instead: str) -> ValueError:
    return ValueError(f"config.json has {key} = {value!r}, which labkit's decoder can't do; use {instead}")


def _read_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    if (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        files = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors")
    weights: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder} lacks {file}, which {INDEX} lists; download it again")
        try:
            with safe_open(str(folder / file), framework="pt") as tensors:
                weights |= {name: tensors.get_tensor(name).to(dtype) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is damaged ({error}); download it again") from error
    return weights


def _checked(weights: dict[str, Tensor], config: DecoderConfig, folder: Path) -> dict[str, Tensor]:
    """The weights the Decoder has a place for, every one of them there, in its shape and finite."""
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        embedding = weights.get("model.embed_tokens.weight", torch.empty(0))
        if not torch.equal(weights.pop("lm_head.weight", embedding), embedding):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding; "
                "set tie_word_embeddings to false in config.json to keep both"
            )
    with torch.device("meta"):
        expected = Decoder(config).weights()
    if missing := sorted(expected.keys() - weights.keys()):
        raise _misfit(folder, "lacks", missing)
    if unexpected := sorted(weights.keys() - expected.keys()):
        raise _misfit(folder, "has no place in config.json for", unexpected)
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"{folder}: {name} is {tuple(weights[name].shape)} but config.json says "
                f"{tuple(tensor.shape)}; take config.json and the weights from the same model"
            )
        if not weights[name].isfinite().all():
            raise ValueError(f"{folder}: {name} holds NaN or infinity; take a checkpoint from before it diverged")
    return weights


def _misfit(folder: Path, what: str, names: list[str]) -> ValueError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ValueError(
        f"{folder} {what} {', '.join(names[:3])}{more}; take config.json and the weights from the same model"
    )


# Writing


def write_folder(policy: Policy, path: str | PathLike[str]) -> None:
    """A folder that `read_folder` and transformers load; weights keep their dtype."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in policy.weights.items()}
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(policy), indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / "config.json", folder / WEIGHTS)  # safetensors makes it readable by its owner only
    policy.tokenizer.save(folder)


def config_json(policy: Policy) -> dict[str, Any]:
    """What the config.json of a policy's folder says."""
    config, tokenizer = policy.config, policy.tokenizer
    architecture = next(name for name, family in ARCHITECTURES.items() if family == policy.family)
    eos_ids = list(tokenizer.eos_ids)
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling:
        rope = {"rope_type": "llama3", **dict(zip(LLAMA3_ROPE, astuple(config.rope_scaling), strict=True))}
    return {
        "architectures": [architecture],
        "model_type": policy.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        **({"rope_scaling": rope} if config.rope_scaling else {}),
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "dtype": str(policy.weights["model.embed_tokens.weight"].dtype).removeprefix("torch."),
        **({"attention_bias": False} if policy.family != "qwen2" else {"use_sliding_window": False}),
        **({} if config.moe is None else _experts_json(config.moe, config.num_layers)),
    }


def _experts_json(moe: MoEConfig, num_layers: int) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(num_layers) if n not in moe.layers],
    }
