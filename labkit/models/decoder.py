"""A decoder in the Llama / Qwen2 / Qwen3 shape, dense or with a mixture of experts (`labkit.models.moe`).

    h   = x + o_proj(attend(rope(q_proj(n)), rope(k_proj(n)), v_proj(n)))        n  = rms_norm(x)
    x'  = h + down_proj(silu(gate_proj(n')) * up_proj(n'))                       n' = rms_norm(h)

Shapes: B sequences, T tokens, D hidden, H query heads, G key/value heads (H a multiple of G), d head size, V words.

The same module serves both sides of a run. The engine and the trainer differ only in what they hand in:

* ``precision`` of each linear layer (`labkit.fp8.Float8Linear`), chosen per side by the Recipe;
* ``attention``, a callable ``(layer, q_BHTd, k_BGTd, v_BGTd) -> o_BHTd`` that gets q and k after QK-norm and
  RoPE. It decides about masks, packing, the KV cache and FP8 (`labkit.models.attention`,
  `labkit.rollout.kv_cache`);
* ``routing``, which sees and may replace the experts that a mixture of experts chooses.

One forward for both is what makes "same kernels on both sides" a fact rather than a hope: with one recipe the
train-rollout mismatch is then exactly zero.

Parameters carry Hugging Face names, so a checkpoint is a `state_dict`. Left out: biases other than Q/K/V and
sliding windows; `labkit.models.huggingface` refuses checkpoints that need them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.fp8 import Float8Linear
from labkit.models.mlp import MLP
from labkit.models.moe import MoEConfig, Routing, SparseMoE
from labkit.models.rope import Llama3Scaling, rope_table, rotate

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    rms_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    max_positions: int = 4096
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads can't share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"RoPE rotates pairs of channels, but head_dim is odd ({self.head_dim})")


class RMSNorm(nn.Module):
    """x / rms(x) in FP32, cast back, times the weight (the order Hugging Face models use)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_f32 = x.float()
        normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        D, d = config.hidden_size, config.head_dim
        self.q_proj = Float8Linear(D, config.num_heads * d, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Float8Linear(D, config.num_kv_heads * d, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Float8Linear(D, config.num_kv_heads * d, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Float8Linear(config.num_heads * d, D, dtype=dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(d, config.rms_eps, dtype)
            self.k_norm = RMSNorm(d, config.rms_eps, dtype)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        B, T, _ = x_BTD.shape
        d = self.config.head_dim
        q_BTHd = self.q_proj(x_BTD).view(B, T, -1, d)
        k_BTGd = self.k_proj(x_BTD).view(B, T, -1, d)
        v_BTGd = self.v_proj(x_BTD).view(B, T, -1, d)
        if self.config.qk_norm:
            q_BTHd, k_BTGd = self.q_norm(q_BTHd), self.k_norm(k_BTGd)
        q_BHTd = rotate(q_BTHd.transpose(1, 2), cos, sin)
        k_BGTd = rotate(k_BTGd.transpose(1, 2), cos, sin)
        o_BHTd = attention(self.layer, q_BHTd, k_BGTd, v_BTGd.transpose(1, 2))
        return self.o_proj(o_BHTd.transpose(1, 2).reshape(B, T, -1))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps, dtype)
        self.self_attn = SelfAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps, dtype)
        self.mlp: MLP | SparseMoE
        if config.moe is not None and layer in config.moe.layers:
            self.mlp = SparseMoE(config.moe, config.hidden_size, layer, dtype)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, attention: Attention, routing: Routing | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos, sin, attention)
        normed_BTD = self.post_attention_layernorm(x_BTD)
        mlp = self.mlp
        return x_BTD + (mlp(normed_BTD, routing) if isinstance(mlp, SparseMoE) else mlp(normed_BTD))


class Body(nn.Module):
    """Everything but the output projection; its attribute names give the Hugging Face prefix ``model.``."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, dtype)


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config, dtype)
        self.lm_head = Float8Linear(config.hidden_size, config.vocab_size, dtype=dtype)
        if config.tie_word_embeddings:
            embedding = self.model.embed_tokens.weight
            assert isinstance(embedding, nn.Parameter)
            self.lm_head.weight = embedding

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, attention: Attention, routing: Routing | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] before the output projection; take `logits` of the positions you need."""
        x_BTD = self.model.embed_tokens(tokens_BT)
        config = self.config
        cos, sin = rope_table(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, x_BTD.dtype)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, cos, sin, attention, routing)
        return self.model.norm(x_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits, so that log-softmax never runs in BF16."""
        return self.lm_head(hidden).float()

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def linears(self) -> Iterator[tuple[int | None, str, Float8Linear]]:
        """(layer index, weight name, module) of every linear layer; the layer index of lm_head is None."""
        for name, module in self.named_modules():
            if isinstance(module, Float8Linear):
                parts = name.split(".")
                layer = int(parts[2]) if parts[0] == "model" else None
                yield layer, f"{name}.weight", module

    def weights(self) -> dict[str, Tensor]:
        """The parameters under their Hugging Face names; a tied lm_head is listed once, as the embedding."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        own = self.weights()
        if missing := sorted(own.keys() - weights.keys()):
            raise ValueError(f"the checkpoint lacks {', '.join(missing[:3])} ({len(missing)} tensors in all)")
        if unknown := sorted(weights.keys() - own.keys()):
            raise ValueError(f"the model has no place for {', '.join(unknown[:3])} ({len(unknown)} tensors in all)")
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:
                raise ValueError(f"{name} is {tuple(weights[name].shape)}, the model needs {tuple(tensor.shape)}")
            tensor.copy_(weights[name])
