"""The engine's key/value cache, in BF16 or FP8, and the attention that reads it.

FP8 cache (per layer, per tensor, scales s_k, s_v from the last recalibration):

    stored      k8 = RNE(clamp(k / s_k, +-448))          one of the 8-bit grid values
    attention   S = (q @ k8^T) * s_k / sqrt(d)           the scale multiplies FP32 scores, not the cache
                O = (softmax(S) @ v8) * s_v

FP8 attention on top: q is quantised too (s_q) and the probabilities become E4M3, so both matmuls have 8-bit
operands and FP32 accumulation (`labkit.fp8.fp8_attention`).

A Recipe makes K and V FP8, or all four of Q, K, V and P, in every layer. KVPrecision can say any other choice of
them, layer by layer, which is how a mismatch is traced to its parts (`labkit.analysis.attribution`).

On a CPU the 8-bit grid values are held in BF16, where they are exact: same numbers, no memory saved. On a GPU the
cache of a layer whose K and V are both FP8 is *packed*, one byte an element. A decode step then reads the bytes with
the kernel of `labkit.fp8.triton_attention`, where it can run; prefill and scoring unpack them first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.config import Recipe
from labkit.fp8 import KVScales, decode_kernel, fp8_attention, get_format, math_attention, scaled_mm, to_grid
from labkit.models.attention import MASKED, causal_bias
from labkit.models.decoder import DecoderConfig


@dataclass(frozen=True)
class KVPrecision:
    """What is FP8 in the attention of each layer; nothing while `scales` is None."""

    fmt: str = "e4m3"
    scales: KVScales | None = None
    parts: tuple[frozenset[str], ...] = ()  # by layer: those of q, k, v, p (the probabilities) that are FP8

    @classmethod
    def from_recipe(cls, recipe: Recipe, num_layers: int) -> "KVPrecision":
        """Without scales, which come with each refit."""
        parts = {"k", "v"} if recipe.rollout.kv_cache else set()
        parts |= {"q", "p"} if recipe.rollout.attention else set()
        return cls(recipe.scaling.kv_format, None, (frozenset(parts),) * num_layers)

    def scale(self, layer: int, part: str) -> float | None:
        """The scale of q, k or v in a layer; None where it is BF16."""
        if self.scales is None or part not in self.parts[layer]:
            return None
        by_layer: tuple[float, ...] = getattr(self.scales, part)
        return by_layer[layer]

    def quantizes_p(self, layer: int) -> bool:
        return self.scales is not None and "p" in self.parts[layer]


class Saturation:
    """Counts the elements written to a cache and those among them that their scale clipped."""

    def __init__(self) -> None:
        self._clipped: dict[str, Tensor] = {}  # where the values are: reading them would make the GPU wait
        self._written: dict[str, int] = {}

    def count(self, part: str, values: Tensor, scale: float, fmt: str) -> None:
        clipped = (values.abs() > scale * get_format(fmt).max).sum()
        self._clipped[part] = self._clipped[part] + clipped if part in self._clipped else clipped
        self._written[part] = self._written.get(part, 0) + values.numel()

    def shares(self) -> dict[str, float]:
        """ "k" and "v", each if it is FP8: the share that was clipped, from 0 to 1."""
        return {part: int(self._clipped[part]) / written for part, written in self._written.items()}


class KVCache:
    """Static buffers K, V [B, G, T, d] per layer, where `starts_B` is; `length` columns are filled.

    `packed`: whether FP8 keys and values are held as bytes; None: on a GPU.
    """

    def __init__(
        self,
        config: DecoderConfig,
        starts_B: Tensor,
        num_columns: int,
        precision: KVPrecision,
        dtype: torch.dtype = torch.bfloat16,
        packed: bool | None = None,
    ) -> None:
        device = starts_B.device
        shape = (len(starts_B), config.num_kv_heads, num_columns, config.head_dim)
        packed = device.type == "cuda" if packed is None else packed
        fp8 = [None not in (precision.scale(i, "k"), precision.scale(i, "v")) for i in range(config.num_layers)]
        dtypes = [torch.uint8 if packed and both else dtype for both in fp8]
        self.keys = [torch.zeros(shape, dtype=kind, device=device) for kind in dtypes]
        self.values = [torch.zeros(shape, dtype=kind, device=device) for kind in dtypes]
        self.has_kernel = bool(decode_kernel.choose(scaled_mm.machine(device)).kernel)
        self.starts_B = starts_B
        self.precision = precision
        self.saturation = Saturation()
        self.length = 0
        self._padding_bias = _padding_bias(starts_B, num_columns)

    def rows(self, index: Tensor) -> "KVCache":
        """The cache of the chosen sequences (repeats allowed: one prefill serves a whole group)."""
        chosen = object.__new__(KVCache)
        chosen.keys = [k[index] for k in self.keys]
        chosen.values = [v[index] for v in self.values]
        chosen.starts_B = self.starts_B[index]
        chosen.precision, chosen.saturation, chosen.length = self.precision, self.saturation, self.length
        chosen.has_kernel = self.has_kernel
        chosen._padding_bias = self._padding_bias[index]
        return chosen

    def bias(self, num_queries: int) -> Tensor:
        """For the `num_queries` newest columns, which `attend` has just written."""
        end = self.length + num_queries
        return self._padding_bias[..., :end] if num_queries == 1 else causal_bias(self.starts_B, num_queries, end)

    def attend(self, layer: int, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        """Write the new keys and values, then attend over everything up to them."""
        precision = self.precision
        k_grid, k_scale = self._quantize("k", layer, k_BGTd)
        v_grid, v_scale = self._quantize("v", layer, v_BGTd)
        keys, values = self._store(layer, k_grid, v_grid)
        scales = {"sm_scale": q_BHTd.shape[-1] ** -0.5, "k_scale": k_scale, "v_scale": v_scale}
        q_scale, quantize_p = precision.scale(layer, "q"), precision.quantizes_p(layer)
        q = q_BHTd if q_scale is None else to_grid(q_BHTd, q_scale, precision.fmt)
        if keys.dtype == torch.uint8:
            form = get_format(precision.fmt)
            keys, values = keys.view(form.dtype), values.view(form.dtype)
            if self.has_kernel and q.shape[2] == 1:
                from labkit.fp8.triton_attention import decode_attention  # Triton is only where there is a GPU

                columns = keys.shape[2]
                return decode_attention(
                    q, keys, values, self.starts_B, columns, q_scale=q_scale, quantize_p=quantize_p, **scales
                )
            keys, values = keys.to(q.dtype), values.to(q.dtype)
        bias = self.bias(q.shape[2])
        if q_scale is None and not quantize_p:
            return math_attention(q, keys, values, bias, **scales)
        return fp8_attention(
            q, keys, values, bias,
            q_scale=1.0 if q_scale is None else q_scale, fmt=precision.fmt, quantize_p=quantize_p, **scales,
        )  # fmt: skip

    def advance(self, num_columns: int) -> None:
        """The columns just written count from now on (all layers have seen them)."""
        self.length += num_columns

    def _quantize(self, part: str, layer: int, x_BGTd: Tensor) -> tuple[Tensor, float]:
        """Grid values and their scale, or x itself and 1."""
        scale = self.precision.scale(layer, part)
        if scale is None:
            return x_BGTd, 1.0
        self.saturation.count(part, self._without_padding(x_BGTd), scale, self.precision.fmt)
        return to_grid(x_BGTd, scale, self.precision.fmt), scale

    def _without_padding(self, x_BGTd: Tensor) -> Tensor:
        num_columns = x_BGTd.shape[2]
        if num_columns == 1:  # decoding: padding stands before every prompt's last token
            return x_BGTd
        columns_T = torch.arange(self.length, self.length + num_columns, device=x_BGTd.device)
        real_BT = columns_T >= self.starts_B[:, None]
        return x_BGTd.transpose(1, 2)[real_BT]

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + k.shape[2]
        if self.keys[layer].dtype == torch.uint8:
            form = get_format(self.precision.fmt)
            k, v = k.to(form.dtype).view(torch.uint8), v.to(form.dtype).view(torch.uint8)
        self.keys[layer][:, :, start:end] = k
        self.values[layer][:, :, start:end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


def _padding_bias(starts_B: Tensor, num_columns: int) -> Tensor:
    padded_BT = torch.arange(num_columns, device=starts_B.device) < starts_B[:, None]
    return torch.where(padded_BT, MASKED, 0.0)[:, None, None]
