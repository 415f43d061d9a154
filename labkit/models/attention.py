"""How the trainer attends: causal attention over whole sequences, padded or packed.

Both hold the batch in the layout of `Rollouts` (columns of T, prompts padded on the left). "packed" means that only
real tokens pass through the linear layers, [1, N, D] with N the tokens of the micro-batch; they are put back into
their padded places for the attention alone, which is where sequences must stay apart.

`kernel` is "math" (the rollout engine's own arithmetic, `labkit.fp8.math_attention`) or "sdpa" (torch's
scaled_dot_product_attention, which keeps FP32 scores: other roundings, hence a small mismatch with the rollout, as
between any two engines).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.fp8 import AmaxObserver, math_attention
from labkit.models.decoder import Attention

MASKED = -1e30  # finite, so that a row with nothing to attend to (padding) gives no NaN


def causal_bias(starts_B: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """[B, 1, Tq, Tk]: 0 where the query at column Tk - Tq + i may see the key at column j, else MASKED."""
    query_T = torch.arange(num_keys - num_queries, num_keys, device=starts_B.device)
    key_T = torch.arange(num_keys, device=starts_B.device)
    visible_BTT = (key_T <= query_T[:, None]) & (key_T >= starts_B[:, None, None])
    return torch.where(visible_BTT, 0.0, MASKED)[:, None]


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return math_attention(q, k, v, bias, sm_scale=q.shape[-1] ** -0.5)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    with sdpa_kernel(SDPBackend.MATH):  # its flash kernel for CPUs takes six times as long at these lengths
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"math": _math, "sdpa": _sdpa}


class PaddedAttention:
    """Causal attention over [B, T] with left padding."""

    def __init__(self, starts_B: Tensor, num_columns: int, kernel: str = "math") -> None:
        self.bias = causal_bias(starts_B, num_columns, num_columns)
        self.kernel = KERNELS[kernel]

    def __call__(self, layer: int, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        return self.kernel(q_BHTd, k_BGTd, v_BGTd, self.bias)


class PackedAttention:
    """The same for tokens packed into one row: token n of the pack sits at (row[n], column[n])."""

    def __init__(
        self, rows_N: Tensor, columns_N: Tensor, starts_B: Tensor, num_columns: int, kernel: str = "math"
    ) -> None:
        self.rows_N, self.columns_N = rows_N, columns_N
        self.padded_shape = (len(starts_B), num_columns)
        self.attend = PaddedAttention(starts_B, num_columns, kernel)

    def __call__(self, layer: int, q_1HNd: Tensor, k_1GNd: Tensor, v_1GNd: Tensor) -> Tensor:
        o_BHTd = self.attend(layer, self._unpack(q_1HNd), self._unpack(k_1GNd), self._unpack(v_1GNd))
        return o_BHTd.transpose(1, 2)[self.rows_N, self.columns_N].transpose(0, 1)[None]

    def _unpack(self, x_1hNd: Tensor) -> Tensor:
        _, heads, _, d = x_1hNd.shape
        padded_BThd = x_1hNd.new_zeros(*self.padded_shape, heads, d)
        padded_BThd = padded_BThd.index_put((self.rows_N, self.columns_N), x_1hNd[0].transpose(0, 1))
        return padded_BThd.transpose(1, 2)


class ObservedAttention:
    """Lets a calibration observer see q, k and v on their way into another attention."""

    def __init__(self, attention: Attention, observer: AmaxObserver) -> None:
        self.attention, self.observer = attention, observer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.observer.observe(layer, q, k, v)
        return self.attention(layer, q, k, v)
