"""Attention by explicit matrix products, in BF16 and in FP8.

    S = (q k^T) sm_scale k_scale + bias        P = softmax(S)        o = P v v_scale

    q [B, H, Tq, d];  k, v [B, Hkv, Tk, d] with Hkv dividing H (grouped-query attention: query head h reads
    key head h // (H / Hkv));  bias float32 [B, 1, Tq or 1, Tk], 0 where a key is visible, -1e30 where not;
    result [B, H, Tq, d]. Scores and softmax are float32.

Query heads of one group are folded into the query dimension, so k and v are never repeated in memory and one
kernel serves prefill, decode and training. For the short sequences of a CPU lab this is faster than fused
attention, and the rollout and the trainer can share it to the bit.

``math_attention`` takes ordinary bfloat16 q, k, v, or an FP8 cache: k and v on the FP8 grid (:func:`to_grid`)
with their scales, which then enter as two scalars. Differentiable by autograd.

``fp8_attention`` has every matmul operand in FP8 with float32 accumulation, as FlashAttention-3 computes it:

    S = (q_grid k_grid^T) sm_scale q_scale k_scale + bias
    P~ = FP8(2^8 exp(S - max S))            l = sum exp(S - max S) in float32, before quantising
    o = (P~ v_grid) v_scale / (2^8 l)

Without the factor 2^8 every weight below 2^-10 of the largest would round to zero in E4M3; with it only those
below 2^-18 do. The largest P~ is 256, inside the format. P~ takes v's format, since the tensor core
multiplies equal types. No gradient. The output has q's dtype (bfloat16 in the engine).

To study one operand, the others can stay as they are: a tensor that is not on the grid comes with scale 1, and with
``quantize_p=False`` P~ is exp(S - max S) in v's dtype. Scores and sums stay float32.

Sources: FlashAttention-3 (arXiv 2407.08608) and vLLM's use of it; NeMo RL's FP8 KV cache and attention.
"""

from __future__ import annotations

from torch import Tensor

from labkit.fp8.emulation import to_grid

P_SCALE = 2.0**-8


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention with float32 softmax; k and v are values, or FP8 grid values with their scales."""
    q_folded = fold_groups(q, k)
    scores = (q_folded @ k.mT).float() * (sm_scale * k_scale)
    weights = add_bias(scores, bias, q).softmax(-1).to(q.dtype)
    out = weights @ v
    if v_scale != 1.0:
        out = (out.float() * v_scale).to(q.dtype)
    return out.view(q.shape)


def fp8_attention(
    q_grid: Tensor,
    k_grid: Tensor,
    v_grid: Tensor,
    bias: Tensor,
    *,
    sm_scale: float,
    q_scale: float,
    k_scale: float,
    v_scale: float,
    fmt: str = "e4m3",
    quantize_p: bool = True,
) -> Tensor:
    """Attention over FP8 grid values with FP8 probabilities; the result is of q's dtype."""
    q_folded = fold_groups(q_grid, k_grid).float()
    scores = (q_folded @ k_grid.float().mT) * (sm_scale * q_scale * k_scale)
    scores = add_bias(scores, bias, q_grid)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    row_sum = weights.sum(-1, keepdim=True)
    if quantize_p:
        out = to_grid(weights, P_SCALE, fmt) @ v_grid.float() * (v_scale * P_SCALE)
    else:
        out = weights.to(v_grid.dtype).float() @ v_grid.float() * v_scale
    return (out / row_sum).to(q_grid.dtype).view(q_grid.shape)


def fold_groups(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, Tq, d] -> [B, Hkv, (H / Hkv) Tq, d], the query heads of a group one after another."""
    batch, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads: H must be a multiple of Hkv")
    return q.reshape(batch, kv_heads, heads // kv_heads * queries, dim)


def add_bias(scores: Tensor, bias: Tensor, q: Tensor) -> Tensor:
    """Add bias [B, 1, Tq or 1, Tk] to folded scores [B, Hkv, G Tq, Tk]."""
    batch, kv_heads, _, keys = scores.shape
    by_head = scores.view(batch, kv_heads, -1, q.shape[2], keys)
    return (by_head + bias[:, :, None]).view(scores.shape)
