"""Weights and scales into vLLM's model and out of it again.

Into it, `as_checkpoint` before and `repack` after vLLM's own reload:

    the whole set at once       vLLM fuses q, k, v and gate, up; a fused layer of which only a part comes keeps random
                                memory in the rest, without an error. The engine checks the set first
    a tied lm_head              on a CPU it multiplies with a packed copy of the embedding, which a reload leaves as it
                                was: with the weights of before, silently. It is packed again here

Out of it, `read_back`: not parameters, but what the kernels multiply with. On a CPU the BF16 weights are packed away
and their parameters empty, so they are asked for by multiplying: (I W^T)^T = W, exact in BF16, because each output is
one weight times 1, plus zeros. A stock FP8 kernel is asked in the same way where scales are powers of two (the codes of
1.0 are exact then); with FP32 scales W is no BF16 tensor, and codes and scales are read themselves.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.models.utils import extract_layer_index

from labkit.fp8 import KVScales, LinearFormat, get_format, quantize
from labkit.rollout.vllm.emulation import EmulatedLinear

PROBE_ROWS = 512  # rows of the identity at a time: what bounds the memory
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def as_checkpoint(
    weights: Mapping[str, Tensor], fp8: Collection[str], precision: LinearFormat, scale_name: str
) -> dict[str, Tensor]:
    """The weights named in `fp8` as codes, their scales beside them, as an FP8 checkpoint has them."""
    sent: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name not in fp8:
            sent[name] = weight
            continue
        tile = precision.tiles(1, weight.shape[1], weight.shape[0]).w
        q = quantize(weight, precision.fmt, tile, precision.scale, precision.formula)
        sent[name] = q.codes.view(get_format(precision.fmt).dtype)
        sent[name.removesuffix("weight") + scale_name] = q.scales
    return sent


def repack(model: Any) -> None:
    """Let a tied lm_head on a CPU see the new embedding."""
    if hasattr(model.lm_head, "cpu_linear") and model.lm_head.weight is model.get_submodule(EMBEDDING).weight:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def read_back(model: Any, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Everything the model computes with, under Hugging Face names."""
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield from _linear(path, module, model.packed_modules_mapping)
        elif path == HEAD:
            yield (
                f"{path}.weight",
                _through_identity(module, module.embedding_dim, module.num_embeddings_padded)[:vocab_size],
            )
        elif path == EMBEDDING:
            yield f"{path}.weight", module.weight.data[:vocab_size]
        else:
            for name, tensor in module.named_parameters(recurse=False):
                yield f"{path}.{name}", tensor.data


def fp8_operands(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Of `read_back` the FP8 weights, without the cost of the rest."""
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and is_fp8(module):
            found = _linear(path, module, model.packed_modules_mapping)
            yield from ((name, tensor) for name, tensor in found if name.endswith("weight"))


def _linear(path: str, layer: Any, packed: Mapping[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    """A linear layer, or the several that vLLM has fused into it."""
    parent, _, name = path.rpartition(".")
    parts = packed.get(name, [name])
    widths = layer.output_sizes if len(parts) > 1 else [layer.output_size]
    yield from zip((f"{parent}.{part}.weight" for part in parts), operand(layer).split(widths), strict=True)
    if layer.bias is not None:  # held in FP32 where a CPU kernel adds in FP32; the values are BF16's
        biases = layer.bias.data.bfloat16().split(widths)
        yield from zip((f"{parent}.{part}.bias" for part in parts), biases, strict=True)


def operand(layer: Any) -> Tensor:
    """W [out, in] as a linear layer multiplies with it; FP8 values dequantised."""
    if isinstance(layer.quant_method, EmulatedLinear):
        return layer.weight.data
    scales = getattr(layer, "weight_scale_inv", getattr(layer, "weight_scale", None))
    if scales is None or _powers_of_two(scales):
        return _through_identity(layer, layer.input_size, layer.output_size)
    codes = layer.weight.data
    if scales.shape[-1] == 1:  # one an output channel; the kernel's weight is transposed
        return codes.t().float() * scales.view(-1, 1)
    rows, columns = codes.shape
    return codes.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def _powers_of_two(scales: Tensor) -> bool:
    """Also of scales that a kernel has packed into exponents alone."""
    return scales.dtype != torch.float32 or not bool((scales.view(torch.int32) & 0x7FFFFF).any())


def is_fp8(layer: Any) -> bool:
    return isinstance(layer.quant_method, EmulatedLinear) or not isinstance(layer.quant_method, UnquantizedLinearMethod)


def _through_identity(layer: Any, in_features: int, out_features: int) -> Tensor:
    device = next(layer.parameters()).device
    w_NK = torch.empty(out_features, in_features, dtype=torch.bfloat16, device=device)
    for start in range(0, in_features, PROBE_ROWS):
        rows = torch.arange(start, min(start + PROBE_ROWS, in_features), device=device)
        identity = torch.zeros(len(rows), in_features, dtype=torch.bfloat16, device=device)
        identity[rows - start, rows] = 1.0
        w_NK[:, start : start + len(rows)] = layer.quant_method.apply(layer, identity, None).t()
    return w_NK


def linears(model: nn.Module) -> list[Any]:
    """vLLM's linear layers, fused ones once; without the lm_head."""
    return [module for module in model.modules() if isinstance(module, LinearBase)]


def attentions(model: nn.Module) -> list[Any]:
    """vLLM's attention layers, in the order of the model's."""
    found = [module for module in model.modules() if isinstance(module, Attention)]
    return sorted(found, key=lambda attention: extract_layer_index(attention.layer_name))


def write_scales(model: nn.Module, scales: KVScales) -> None:
    """Each is in up to three places: the tensor GPU kernels read, its copy on the host, the float of CPU kernels."""
    for attention, *values in zip(attentions(model), scales.q, scales.k, scales.v, strict=True):
        for part, value in zip("qkv", values, strict=True):
            getattr(attention, f"_{part}_scale").fill_(value)
            setattr(attention, f"_{part}_scale_float", value)
            if part != "q":
                getattr(attention, f"_{part}_scale_cpu").fill_(value)


def read_scales(model: nn.Module, version: int) -> KVScales:
    """As the layers hold them. Where tensor and float disagree it is the tensor's, so that the loss shows."""
    held: dict[str, list[float]] = {part: [] for part in "qkv"}
    for attention in attentions(model):
        for part, scales in held.items():
            exact, tensor = getattr(attention, f"_{part}_scale_float"), getattr(attention, f"_{part}_scale")
            same = torch.tensor(exact, dtype=torch.float32).item() == tensor.item()
            scales.append(exact if same else tensor.item())
    return KVScales(version, tuple(held["q"]), tuple(held["k"]), tuple(held["v"]))
