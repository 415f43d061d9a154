"""Quantisation to FP8 with one scale per tile: the definition every other module is held to.

    amax_t = max |x| over tile t            q = RNE(clamp(x * m_t, -F, F)) as FP8            x' = q * s_t

``x`` is [M, K]; ``F`` is the format's largest value (448 or 57344); ``s_t`` is the *dequantisation* scale
(float32), ``m_t`` the quantisation multiplier, about 1 / s_t. Tiles are (rows, columns), ragged at the right
and bottom edge as if zero-padded:

    (1, 128)    one scale per token and 128 channels      activations and gradients in DeepSeek-V3
    (128, 128)  one scale per 128 x 128 square            weights in DeepSeek-V3
    (128, 1)    128 tokens of one channel                 the same activations as an operand of wgrad
    (1, K)      one per row (token, channel);  (M, 1)  per column;  (1, 32)  MX;  None  per tensor

How s and m follow from amax differs between the systems that are to agree, and the bits differ with it:

    formula     amax floor     s                          m             pow2 scale
    te          none, 0 -> 1   1 / m                      F / amax      m rounded down to a power of two
    deepgemm    1e-4           amax / F                   1 / s         s rounded up
    vllm        see below      amax / F                   see below     s rounded up
    a function  F 2^-100       f(amax, F)                 1 / s         s rounded up

``te`` is Transformer Engine's Float8BlockScaling (an overflowing F / amax becomes the largest finite value of
x's own dtype) and, without tiles, its current scaling (there of float32); ``deepgemm`` is DeepGEMM's and
DeepSeek-V3's. ``vllm`` follows vLLM per tile: a square tile is its weight quantiser (= deepgemm); otherwise s
is at least 1 / (512 F), and 1 x c groups and columns divide, q = RNE(clamp(x / s)), while whole rows (1, K)
and whole tensors multiply by 1 / s. A row that is exactly one 128-group wide counts as a group. For amax
above the floors and pow2 scales all three formulas give the same bits. A function of the caller's own gets amax
[M/r, 1, K/c, 1] in float32 and F as a number, and returns the scale of each tile from its amax alone: rows may come in
several calls. Where s < amax / F it clips.

With pow2 scales x' is exact in bfloat16: three mantissa bits times a power of two (exceptions: results beyond
the dtype's range, and tiles at vLLM's floor, which is not a power of two). A zero tile has codes 0 and a
finite positive scale. A tile holding NaN or infinity becomes wholly NaN (code 0x7f, scale 1): visible at
once, never saturated away.

Sources: DeepSeek-V3 report (arXiv 2412.19437) section 3.3; Transformer Engine ``recipe_common.cuh`` and its
Python reference quantisers; DeepGEMM ``utils/math.py``; vLLM ``QuantFP8`` and ``per_block_cast_to_fp8``. Left
out: E8M0 storage of scales (they stay float32) and delayed scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.fp8.formats import NAN_CODE, Format, get_format

Tile = tuple[int, int] | None
OwnRule = Callable[[Tensor, float], Tensor]
Formula = str | OwnRule

SCALES = ("pow2", "fp32")
FORMULAS = ("te", "deepgemm", "vllm")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
MANTISSA = 0x7FFFFF
EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Quantized:
    """Codes (uint8, x's shape) and dequantisation scales (float32) [ceil(M/r), ceil(K/c)]; [1] if untiled."""

    codes: Tensor
    scales: Tensor
    fmt: str
    tile: Tile

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Codes times scales, multiplied in float32 and then rounded to ``dtype``."""
        values = self.codes.view(get_format(self.fmt).dtype).to(torch.float32)
        return (values * self.element_scales()).to(dtype)

    def element_scales(self) -> Tensor:
        """The scale of each element, broadcastable to the shape of the codes."""
        if self.tile is None:
            return self.scales
        rows, columns = self.codes.numel() // self.codes.shape[-1], self.codes.shape[-1]
        r, c = tile_size(self.tile, rows, columns)
        scales_MK = self.scales.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
        return scales_MK.reshape(self.codes.shape)


class Scaling(NamedTuple):
    """How each tile is scaled: q from x * multiplier, or from x / scale if ``divide``."""

    multiplier: Tensor
    scale: Tensor
    divide: bool
    finite: Tensor


def quantize(
    x: Tensor, fmt: str = "e4m3", tile: Tile = (1, 128), scale: str = "pow2", formula: Formula = "te"
) -> Quantized:
    """Quantise ``x`` (bfloat16, float32 or float16; at least 2-D, leading dimensions count as rows).

    Raises ValueError for an unknown format, scale or formula, an impossible tile, or an x that is not such a
    tensor.
    """
    check(x, fmt, tile, scale, formula)
    x_MK = x.detach().reshape(-1, x.shape[-1])
    tiles = to_tiles(x_MK, tile)
    scaling = tile_scaling(tiles, x_MK, get_format(fmt), tile, scale, formula)
    codes = encode(tiles, scaling, get_format(fmt))
    codes = codes.masked_fill_(~scaling.finite, NAN_CODE)
    scales = scaling.scale.reshape(1) if tile is None else scaling.scale[:, 0, :, 0].contiguous()
    return Quantized(from_tiles(codes, x_MK.shape).view(x.shape), scales, fmt, tile)


def check(x: Tensor, fmt: str, tile: Tile, scale: str, formula: Formula) -> None:
    """Raise ValueError, naming the way out, unless (x, fmt, tile, scale, formula) can be quantised."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        raise ValueError(f"x must be a dense torch tensor, not {type(x).__name__}: use torch.as_tensor(x)")
    get_format(fmt)
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}: choose one of {', '.join(SCALES)}")
    if not callable(formula) and formula not in FORMULAS:
        raise ValueError(f"unknown formula {formula!r}: choose one of {', '.join(FORMULAS)}, or give a function")
    pair = isinstance(tile, tuple) and len(tile) == 2 and all(type(n) is int and n > 0 for n in tile)
    if tile is not None and not pair:
        raise ValueError(f"tile {tile!r} is not a pair of positive sizes: use (1, 128), (128, 128), ..., or None")
    if x.dtype not in DTYPES:
        raise ValueError(f"cannot quantise {x.dtype}: convert to bfloat16, float32 or float16 first")
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: give a non-empty [rows, columns] tensor, e.g. x[None]")


def tile_size(tile: Tile, rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of one tile of an [rows, columns] tensor; a tile that reaches beyond it ends with it."""
    r, c = tile or (rows, columns)
    return min(r, rows), min(c, columns)


def to_tiles(x_MK: Tensor, tile: Tile) -> Tensor:
    """View [M, K] as [M/r, r, K/c, c] (zero-padded if ragged): dimensions 1 and 3 run inside a tile."""
    rows, columns = x_MK.shape
    r, c = tile_size(tile, rows, columns)
    pad_rows, pad_columns = -rows % r, -columns % c
    if pad_rows or pad_columns:
        x_MK = F.pad(x_MK, (0, pad_columns, 0, pad_rows))
    return x_MK.reshape((rows + pad_rows) // r, r, (columns + pad_columns) // c, c)


def from_tiles(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Undo :func:`to_tiles`, dropping the padding."""
    rows, columns = shape
    padded = tiles.reshape(tiles.shape[0] * tiles.shape[1], -1)
    return padded[:rows, :columns].contiguous()


class ScaleRule(NamedTuple):
    """What a formula name means for one kind of tile."""

    formula: str
    divide: bool
    overflow: float
    """What te uses for an infinite F / amax."""


def scale_rule(formula: str, tile: Tile, columns: int, dtype: torch.dtype) -> ScaleRule:
    """Resolve ``formula`` for ``tile`` on a tensor of ``dtype`` with ``columns`` columns, as said above."""
    overflow = torch.finfo(torch.float32 if tile is None else dtype).max
    if formula != "vllm":
        return ScaleRule(formula, False, overflow)
    if tile is not None and tile[0] > 1 and tile[1] > 1:
        return ScaleRule("deepgemm", False, overflow)
    divide = tile is not None and (tile[1] != columns or tile[1] == 128)
    return ScaleRule("vllm", divide, overflow)


def tile_scaling(tiles: Tensor, x_MK: Tensor, fmt: Format, tile: Tile, scale: str, formula: Formula) -> Scaling:
    """The scales of ``tiles`` (from :func:`to_tiles`), shaped [M/r, 1, K/c, 1]."""
    amax = tiles.abs().amax(dim=(1, 3), keepdim=True).to(torch.float32)
    finite = amax.isfinite()
    amax = amax.where(finite, 1.0)
    if callable(formula):
        dequantize = own_scale(amax, fmt, scale == "pow2", formula)
        return Scaling(dequantize.reciprocal(), dequantize.where(finite, 1.0), False, finite)
    rule = scale_rule(formula, tile, x_MK.shape[1], x_MK.dtype)
    if rule.formula == "te":
        multiplier, dequantize = te_scale(amax, fmt, scale == "pow2", rule.overflow)
    else:
        of_amax = deepgemm_scale if rule.formula == "deepgemm" else vllm_scale
        dequantize = of_amax(amax, fmt, scale == "pow2")
        multiplier = dequantize.reciprocal()
    return Scaling(multiplier, dequantize.where(finite, 1.0), rule.divide, finite)


def te_scale(amax: Tensor, fmt: Format, pow2: bool, overflow: float) -> tuple[Tensor, Tensor]:
    """(multiplier, dequantisation scale) as in Transformer Engine; ``overflow`` replaces an infinity."""
    multiplier = torch.full_like(amax, fmt.max) / amax
    multiplier = multiplier.where(multiplier.isfinite(), overflow)
    if pow2:
        multiplier = (multiplier.view(torch.int32) & EXPONENT).view(torch.float32)
    multiplier = multiplier.where(amax > 0, 1.0)
    return multiplier, multiplier.reciprocal()


def deepgemm_scale(amax: Tensor, fmt: Format, pow2: bool) -> Tensor:
    """DeepGEMM's dequantisation scale; DeepSeek-V3 and vLLM's block weights use the same."""
    scale = amax.clamp(min=1e-4) / torch.full_like(amax, fmt.max)
    return ceil_pow2(scale) if pow2 else scale


def vllm_scale(amax: Tensor, fmt: Format, pow2: bool) -> Tensor:
    """The dequantisation scale of vLLM's dynamic activation quantiser; the floor comes after the rounding."""
    scale = amax / torch.full_like(amax, fmt.max)
    if pow2:
        scale = ceil_pow2(scale)
    return scale.clamp(min=1.0 / (512.0 * fmt.max))


def own_scale(amax: Tensor, fmt: Format, pow2: bool, rule: OwnRule) -> Tensor:
    """The dequantisation scale of a rule of the caller's; ValueError if that isn't one for each tile."""
    scale = rule(amax.clamp(min=fmt.max * 2.0**-100), fmt.max)
    name = getattr(rule, "__name__", "the rule of scales")
    if not isinstance(scale, Tensor) or scale.shape != amax.shape:
        found = list(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise ValueError(f"{name} must return a scale for each amax, a tensor {list(amax.shape)}, got {found}")
    scale = scale.to(torch.float32)
    if not bool(((scale >= torch.finfo(torch.float32).tiny) & scale.isfinite()).all()):
        raise ValueError(f"{name} must return positive finite scales, got {scale.min():g} to {scale.max():g}")
    return ceil_pow2(scale) if pow2 else scale


def ceil_pow2(scale: Tensor) -> Tensor:
    """The smallest power of two >= scale, by carrying the mantissa into the exponent."""
    return ((scale.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)


def encode(tiles: Tensor, scaling: Scaling, fmt: Format) -> Tensor:
    """Codes (uint8) of scaled tiles. The clamp is explicit: not every torch version's cast saturates."""
    wide = tiles.to(torch.float32)
    scaled = wide / scaling.scale if scaling.divide else wide * scaling.multiplier
    return scaled.clamp_(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
