"""The FP8 cache of vLLM on a CPU, rounded to nearest.

    wanted   code = RNE(clamp(k / s_k, ±max))       as GPU kernels store keys and values, and the embedded engine
    vLLM     code = RTZ(clamp(k / s_k, ±max))       its kernel for CPUs cuts the mantissa off (0.32)

Cutting off makes every key and value 4 % smaller on average, which flattens the attention: a bias, several times the
mismatch that an FP8 cache has. So K and V are rounded before the kernel gets them, to

    k' = s_k · RNE(clamp(k / s_k, ±max)) · 33/32

A factor of 33/32 goes between 1/32 and 15/32 of the way to the next code. That is more than k' loses in BF16, so the
kernel cuts it off to the code that is wanted; and less than half of the way, so a kernel that rounds to nearest arrives
at the same one. Only the cache ever sees k': vLLM's attention on a CPU reads keys and values from there.

Counts what the scales clip on the way, as the embedded engine does.
"""

from typing import Any

from torch import Tensor

from labkit.fp8 import to_grid
from labkit.rollout.kv_cache import Saturation

INTO_THE_CODE = 33 / 32


class RoundedCache:
    """Acts in every attention layer from when it is made."""

    def __init__(self, attentions: list[Any], fmt: str) -> None:
        self.fmt = fmt
        self.saturation = Saturation()
        for attention in attentions:
            attention.register_forward_pre_hook(self._round)

    def _round(self, attention: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *others = inputs
        k = self._rounded("k", k, attention._k_scale_float)
        v = self._rounded("v", v, attention._v_scale_float)
        return q, k, v, *others

    def _rounded(self, part: str, x: Tensor, scale: float) -> Tensor:
        self.saturation.count(part, x, scale, self.fmt)
        return to_grid(x, scale, self.fmt) * (scale * INTO_THE_CODE)
