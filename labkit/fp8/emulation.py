"""Fake quantisation: x' = dequantise(quantise(x)), bit for bit as :mod:`labkit.fp8.quantization`, but fast.

FP8 GEMMs are emulated on dequantised operands. With pow2 scales x' is exact in x's own bfloat16, and a
bfloat16 GEMM with float32 accumulation is then what an FP8 GEMM computes up to the order of summation. With
fp32 scales x' needs float32. Emulation costs time: it never makes anything faster than BF16.

Two implementations give the same bits and the tests hold them to it: a C kernel (:mod:`labkit.fp8.native`)
and torch operators, which serve CUDA tensors, formulas that are functions, and machines without a C compiler
(``LABKIT_NATIVE=0`` forces them).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.fp8 import native
from labkit.fp8.formats import decode, get_format
from labkit.fp8.quantization import Formula, Tile, check, encode, from_tiles, tile_scaling, to_tiles

CACHED_ELEMENTS = 1 << 17
"""Elements the CPU fallback handles at once: the temporaries of more would not stay in cache."""


def fake_quantize(
    x: Tensor, fmt: str = "e4m3", tile: Tile = (1, 128), scale: str = "pow2", formula: Formula = "te"
) -> Tensor:
    """Quantise and dequantise bfloat16 or float32 ``x``; the result is x.dtype for pow2 scales, else float32.

    Has no gradient: Float8Linear quantises inside its own backward. Raises ValueError as ``quantize`` does,
    for float16 (which cannot hold every dequantised value), and for an x that requires grad where autograd is
    recording.
    """
    check(x, fmt, tile, scale, formula)
    if x.dtype == torch.float16:
        raise ValueError("float16 cannot hold every dequantised value: convert x to bfloat16 or float32 first")
    _refuse_grad(x, "fake_quantize")
    out_dtype = x.dtype if scale == "pow2" else torch.float32
    x_MK = x.detach().reshape(-1, x.shape[-1])
    if x.device.type == "cpu" and isinstance(formula, str) and native.available()[0]:
        return native.fake_quantize(x_MK, fmt, tile, scale, formula, out_dtype).view(x.shape)
    return torch_fake_quantize(x_MK, fmt, tile, scale, formula, out_dtype).view(x.shape)


def torch_fake_quantize(
    x_MK: Tensor, fmt: str, tile: Tile, scale: str, formula: Formula, out_dtype: torch.dtype
) -> Tensor:
    """``fake_quantize`` in torch operators, for 2-D x on any device."""
    rows = max(1, CACHED_ELEMENTS // (x_MK.shape[1] * tile[0])) * tile[0] if tile else len(x_MK)
    if x_MK.device.type == "cpu" and len(x_MK) > rows:
        parts = [torch_fake_quantize(x, fmt, tile, scale, formula, out_dtype) for x in x_MK.split(rows)]
        return torch.cat(parts)
    tiles = to_tiles(x_MK, tile)
    scaling = tile_scaling(tiles, x_MK, get_format(fmt), tile, scale, formula)
    values = decode(encode(tiles, scaling, get_format(fmt)), get_format(fmt))
    values *= scaling.scale.where(scaling.finite, float("nan"))
    return from_tiles(values.to(out_dtype), x_MK.shape)


def to_grid(x: Tensor, scale: float, fmt: str = "e4m3") -> Tensor:
    """RNE(clamp(x / scale, -F, F)) as FP8 values *without* their scale, in x.dtype (bfloat16 or float32).

    The static quantiser of attention and KV cache: stored = E4M3(x / scale), used as stored * scale. NaN
    stays NaN.
    """
    get_format(fmt)
    if not torch.finfo(torch.float32).tiny <= scale < math.inf:
        raise ValueError(f"scale is {scale}, it must be positive and finite in float32: calibrate it, or use 1.0")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"to_grid takes bfloat16 or float32, not {x.dtype}: convert x first")
    _refuse_grad(x, "to_grid")
    if x.device.type == "cpu" and native.available()[0]:
        return native.to_grid(x.detach(), scale, fmt)
    return torch_to_grid(x, scale, fmt)


def torch_to_grid(x: Tensor, scale: float, fmt: str) -> Tensor:
    """``to_grid`` in torch operators, for any device."""
    form = get_format(fmt)
    scaled = (x.detach().to(torch.float32) / torch.tensor(scale, device=x.device)).clamp_(-form.max, form.max)
    return decode(scaled.to(form.dtype).view(torch.uint8), form).where(~scaled.isnan(), float("nan")).to(x.dtype)


def _refuse_grad(x: Tensor, name: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} has no gradient: call it under torch.no_grad() or on x.detach()")
