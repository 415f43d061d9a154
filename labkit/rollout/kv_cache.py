"""The engine's key/value cache, in BF16 or FP8, and the attention that reads it.

FP8 cache (per layer, per tensor, scales s_k, s_v from the last recalibration):

    stored      k8 = RNE(clamp(k / s_k, +-448))          one of the 8-bit grid values
    attention   S = (q @ k8^T) * s_k / sqrt(d)           the scale multiplies FP32 scores, not the cache
                O = (softmax(S) @ v8) * s_v

FP8 attention on top: q is quantised too (s_q) and the probabilities become E4M3, so both matmuls have 8-bit
operands and FP32 accumulation (`labkit.fp8.fp8_attention`).

Emulated: the 8-bit grid values are held in BF16, where they are exact. Same numbers, no memory saved.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.fp8 import KVScales, fp8_attention, math_attention, to_grid
from labkit.models.attention import MASKED, causal_bias
from labkit.models.decoder import DecoderConfig


@dataclass(frozen=True)
class KVPrecision:
    """BF16 when `scales` is None; then `fp8_attention` is False too."""

    fmt: str = "e4m3"
    scales: KVScales | None = None
    fp8_attention: bool = False


class KVCache:
    """Static buffers K, V [B, G, T, d] per layer; `length` columns are filled."""

    def __init__(self, config: DecoderConfig, starts_B: Tensor, num_columns: int, precision: KVPrecision) -> None:
        shape = (len(starts_B), config.num_kv_heads, num_columns, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(config.num_layers)]
        self.starts_B = starts_B
        self.precision = precision
        self.length = 0
        self._padding_bias = _padding_bias(starts_B, num_columns)

    def rows(self, index: Tensor) -> "KVCache":
        """The cache of the chosen sequences (repeats allowed: one prefill serves a whole group)."""
        chosen = object.__new__(KVCache)
        chosen.keys = [k[index] for k in self.keys]
        chosen.values = [v[index] for v in self.values]
        chosen.starts_B = self.starts_B[index]
        chosen.precision, chosen.length = self.precision, self.length
        chosen._padding_bias = self._padding_bias[index]
        return chosen

    def bias(self, num_queries: int) -> Tensor:
        """For the `num_queries` newest columns, which `attend` has just written."""
        end = self.length + num_queries
        return self._padding_bias[..., :end] if num_queries == 1 else causal_bias(self.starts_B, num_queries, end)

    def attend(self, layer: int, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        """Write the new keys and values, then attend over everything up to them."""
        precision, scales = self.precision, self.precision.scales
        start, end = self.length, self.length + q_BHTd.shape[2]
        bias = self.bias(end - start)
        sm_scale = q_BHTd.shape[-1] ** -0.5
        if scales is None:
            keys, values = self._store(layer, start, end, k_BGTd, v_BGTd)
            return math_attention(q_BHTd, keys, values, bias, sm_scale=sm_scale)

        k_scale, v_scale = scales.k[layer], scales.v[layer]
        k8, v8 = to_grid(k_BGTd, k_scale, precision.fmt), to_grid(v_BGTd, v_scale, precision.fmt)
        keys, values = self._store(layer, start, end, k8, v8)
        if not precision.fp8_attention:
            return math_attention(q_BHTd, keys, values, bias, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale)
        q_scale = scales.q[layer]
        return fp8_attention(
            to_grid(q_BHTd, q_scale, precision.fmt), keys, values, bias,
            sm_scale=sm_scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, fmt=precision.fmt,
        )  # fmt: skip

    def advance(self, num_columns: int) -> None:
        """The columns just written count from now on (all layers have seen them)."""
        self.length += num_columns

    def _store(self, layer: int, start: int, end: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer][:, :, start:end] = k
        self.values[layer][:, :, start:end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


def _padding_bias(starts_B: Tensor, num_columns: int) -> Tensor:
    padded_BT = torch.arange(num_columns) < starts_B[:, None]
    return torch.where(padded_BT, MASKED, 0.0)[:, None, None]
