"""Decode attention over an FP8 key/value cache: one query token per sequence, as a Triton kernel.

    S_t = (q . k8_t) sm_scale q_scale k_scale       t = start .. end - 1, the columns of the sequence
    P~_t = exp(S_t - max S)                         l = sum_t exp(S_t - max S)
    o   = (sum_t P~_t v8_t) v_scale / l

    q       [B, H, 1, d] bfloat16: values, or FP8 grid values with their q_scale
    k8, v8  [B, G, T, d] FP8 (E4M3 or E5M2), read where they lie; only columns start .. end - 1 are read
    starts  [B] int64
    o       [B, H, 1, d] bfloat16

With ``quantize_q`` q is multiplied as FP8, else k8 as bfloat16, in which it is exact; with ``quantize_p`` P~ is
FP8(2^8 P~), else bfloat16. Scores and sums are float32. This is :func:`labkit.fp8.attention.fp8_attention` term by
term, with the maximum over the whole row, so P~ has the same bits; only the order of the sums is another. That takes
two passes over the keys, the second of them from the cache of the GPU at these lengths. Triton multiplies FP8 as FP8
on Ada, and with so few rows as float16 on Hopper and Blackwell, in which FP8 is exact.

One program per sequence and key head; the H / G query heads that share it are the rows of its products, padded to the
16 that a tensor core takes. Left out: splitting long sequences over several programs (flash decoding), paging.

Triton is imported here alone, and this module only where there is a GPU (`labkit.fp8.decode_kernel`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.fp8.attention import P_SCALE

BLOCK = 64  # keys in one product


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, o_ptr,
    score_scale, out_scale, end,
    kv_batch, kv_head, kv_column, dim,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    QUANTIZE_Q: tl.constexpr, QUANTIZE_P: tl.constexpr, P_FACTOR: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, channel, column = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    fp8: tl.constexpr = k_ptr.dtype.element_ty
    wide: tl.constexpr = q_ptr.dtype.element_ty
    start = tl.load(starts_ptr + sequence).to(tl.int32)

    q_offset = (sequence * tl.num_programs(1) + head) * GROUP * dim
    q_place = q_offset + row[:, None] * dim + channel[None, :]
    q_there = (row[:, None] < GROUP) & (channel[None, :] < dim)
    q = tl.load(q_ptr + q_place, mask=q_there, other=0.0)
    if QUANTIZE_Q:
        q = q.to(fp8)
    kv_offset = sequence.to(tl.int64) * kv_batch + head * kv_head

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    for first in range(start, end, KEYS):
        there = first + column < end
        place = kv_offset + (first + column)[None, :] * kv_column + channel[:, None]
        k = tl.load(k_ptr + place, mask=there[None, :] & (channel[:, None] < dim), other=0.0)
        scores = tl.dot(q, k if QUANTIZE_Q else k.to(wide)) * score_scale
        largest = tl.maximum(largest, tl.max(tl.where(there[None, :], scores, -float("inf")), 1))

    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(start, end, KEYS):
        there = first + column < end
        place = kv_offset + (first + column)[None, :] * kv_column + channel[:, None]
        k = tl.load(k_ptr + place, mask=there[None, :] & (channel[:, None] < dim), other=0.0)
        scores = tl.dot(q, k if QUANTIZE_Q else k.to(wide)) * score_scale
        weights = tl.where(there[None, :], tl.exp(scores - largest[:, None]), 0.0)
        total += tl.sum(weights, 1)
        place = kv_offset + (first + column)[:, None] * kv_column + channel[None, :]
        v = tl.load(v_ptr + place, mask=there[:, None] & (channel[None, :] < dim), other=0.0)
        if QUANTIZE_P:
            out += tl.dot((weights * P_FACTOR).to(fp8), v)
        else:
            out += tl.dot(weights.to(wide), v.to(wide))

    out = out * out_scale / total[:, None]
    tl.store(o_ptr + q_place, out.to(wide), mask=q_there)


def decode_attention(
    q_BH1d: Tensor,
    k8_BGTd: Tensor,
    v8_BGTd: Tensor,
    starts_B: Tensor,
    end: int,
    *,
    sm_scale: float,
    q_scale: float | None,
    k_scale: float,
    v_scale: float,
    quantize_p: bool,
) -> Tensor:
    """Attend over columns start .. end - 1 of each sequence. q_scale None: q holds values, not grid values."""
    B, H, _, d = q_BH1d.shape
    G = k8_BGTd.shape[1]
    assert k8_BGTd.stride() == v8_BGTd.stride(), "keys and values lie alike"
    assert k8_BGTd.stride(3) == 1, "channels lie side by side"
    q = q_BH1d.contiguous()
    out = torch.empty_like(q)
    _kernel[(B, G)](
        q, k8_BGTd, v8_BGTd, starts_B, out,
        sm_scale * (q_scale or 1.0) * k_scale, v_scale * (P_SCALE if quantize_p else 1.0), end,
        k8_BGTd.stride(0), k8_BGTd.stride(1), k8_BGTd.stride(2), d,
        GROUP=H // G, ROWS=max(16, triton.next_power_of_2(H // G)), DIM=max(32, triton.next_power_of_2(d)), KEYS=BLOCK,
        QUANTIZE_Q=q_scale is not None, QUANTIZE_P=quantize_p, P_FACTOR=1.0 / P_SCALE,
    )  # fmt: skip
    return out
