"""What a Hopper tensor core's narrow accumulator does to a dot product of FP8 values.

For each group of 32 products, with E the largest exponent among the products and the running sum,

    acc = trunc13( sum over the group of  trunc(a_k b_k 2^(13 - E))  +  trunc(acc 2^(13 - E)) ) 2^(E - 13)

Every term is aligned to the largest and cut, toward zero, to 13 bits behind the point; the new sum is cut to 13 bits of
its own. Nothing rounds up, so sums of one sign lose a little with every group, and the loss grows with K.

    fp32        exact to float32, what a CPU does
    promoted    a fresh chain for each 128 products, the chains added in float32 (DeepSeek-V3, DeepGEMM, TE's "split
                accumulator")
    fast        one chain over the whole of K (cuBLAS "fast accumulation")

The exponent of a product is that of its factors, 2^(ea + eb), so a product of mantissas 1.5 * 1.5 counts as below 2.
Values are codes without their scale: a scale per 128 products would be applied when its chain is promoted, which
pow2 scales do without another rounding.

Sources: DeepSeek-V3 report (arXiv 2412.19437) section 3.3.2, which found about 14 bits; the bit-level model is that of
the package mmaemu, validated there against H100, and the tests hold vectors of it. Left out: Blackwell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.fp8.formats import get_format

GROUP = 32
FRACTION_BITS = 13
CHAIN = 128
ACCUMULATORS = ("fp32", "promoted", "fast")
_EXPONENT = 0x7F800000
_KEPT = ~((1 << (23 - FRACTION_BITS)) - 1)
_FLOOR = 2.0**-40  # below the product of any two FP8 values of use here: keeps 2^(13 - E) finite where all are zero


def accumulate(a_MK: Tensor, b_NK: Tensor, accumulator: str, fmt: str = "e4m3") -> Tensor:
    """a b^T in float32 [M, N], of FP8 values (without scales) as float32; K a multiple of 128."""
    return running_sums(a_MK, b_NK, accumulator, fmt)[-1]


def running_sums(a_MK: Tensor, b_NK: Tensor, accumulator: str, fmt: str = "e4m3") -> Tensor:
    """The sums after each 128 products, float32 [K / 128, M, N]."""
    if accumulator not in ACCUMULATORS:
        raise ValueError(f"unknown accumulator {accumulator!r}: choose one of {', '.join(ACCUMULATORS)}")
    if a_MK.shape[1] != b_NK.shape[1] or a_MK.shape[1] % CHAIN:
        raise ValueError(f"both operands need the same K, a multiple of {CHAIN}: got {a_MK.shape} and {b_NK.shape}")
    a_CMK = a_MK.float().unflatten(1, (-1, CHAIN)).transpose(0, 1)
    b_CNK = b_NK.float().unflatten(1, (-1, CHAIN)).transpose(0, 1)
    if accumulator == "fp32":
        return (a_CMK @ b_CNK.mT).cumsum(0)
    smallest = 2.0 ** get_format(fmt).min_exponent
    zero_MN = torch.zeros(len(a_MK), len(b_NK))
    if accumulator == "promoted":
        return _chain(a_CMK, b_CNK, zero_MN.expand(len(a_CMK), -1, -1), smallest).cumsum(0)
    sums = [zero_MN]
    for a_MC, b_NC in zip(a_CMK, b_CNK, strict=True):
        sums.append(_chain(a_MC, b_NC, sums[-1], smallest))
    return torch.stack(sums[1:])


def _chain(a: Tensor, b: Tensor, acc: Tensor, smallest: float) -> Tensor:
    """acc [..., M, N] after the 128 products of a [..., M, 128] and b [..., N, 128]."""
    for k in range(0, CHAIN, GROUP):
        a_g, b_g = a[..., k : k + GROUP], b[..., k : k + GROUP]
        products = a_g[..., :, None, :] * b_g[..., None, :, :]
        exponents = _power(a_g, smallest)[..., :, None, :] * _power(b_g, smallest)[..., None, :, :]
        largest = exponents.amax(-1).maximum(_floor(acc)).clamp_(min=_FLOOR)
        unit = 2.0**FRACTION_BITS / largest
        whole = products.mul_(unit[..., None]).trunc_().sum(-1) + (acc * unit).trunc_()
        acc = _cut(whole / unit)
    return acc


def _power(x: Tensor, smallest: float) -> Tensor:
    """2^exponent of FP8 values as their exponent field has it (subnormals: the smallest normal), 0 where x is 0."""
    return _floor(x).clamp(min=smallest).where(x != 0, 0.0)


def _floor(x: Tensor) -> Tensor:
    """|x| rounded down to a power of two."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def _cut(x: Tensor) -> Tensor:
    """x with 13 fraction bits, cut toward zero."""
    return (x.view(torch.int32) & _KEPT).view(torch.float32)
