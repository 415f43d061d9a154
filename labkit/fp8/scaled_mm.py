"""The three GEMMs of a linear layer on FP8 tensor cores, through ``torch.nn.functional.scaled_mm`` (cuBLASLt, CUTLASS).

    C = (A * s_a) (B * s_b)          A [M, C'] FP8 row-major      B [C', N] FP8 column-major      C [M, N] BF16

    GEMM    A (rows)          B (kept as its transpose [N, C'], row-major)     contracts over
    fprop   x   [T, K]        w    [N, K]                                      K
    dgrad   dy  [T, N]        w^T  [K, N]                                      N
    wgrad   dy^T [N, T]       x^T  [K, T]                                      T

Operands are quantised by :mod:`labkit.fp8.quantization` exactly as for emulation, so codes and scales are the same
bits; only the sum over C' is the tensor core's. Scales are float32 and multiply (dequantisation):

    tile        scales of A [M, C']                  scales of B
    tensor      [1]                                  [1]
    row         [M, 1]                               [1, N]
    1 x 128     [M, ceil(C'/128)], strides (1, M)    [N, ceil(C'/128)], strides (1, N)
    128 x 128   (weights, B only)                    [L, ceil(N/128)], strides (1, L), L = ceil(C'/128) rounded up to
                                                     a multiple of 4; what is added is 1.0
    1 x 32      E8M0, tiles of 128 x 4 stored as 32 x 16 bytes (SWIZZLE_32_4_4), padded with 1.0; both alike

Tokens are padded with zeros to a multiple of 16 (32 for mx): a zero changes no amax and no sum. Everything else
that a kernel does not take is left to emulation; :func:`choose` says which and why, from plain data.

Sources: torch ``ScaledBlas.cpp`` (the checks of shape, stride and compute capability) and cuBLAS, "Narrow precision
data types usage". Needs torch 2.10 or newer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from labkit.fp8 import native
from labkit.fp8.formats import get_format
from labkit.fp8.quantization import Quantized, quantize

if TYPE_CHECKING:
    from labkit.fp8.linear import LinearFormat


_OWN_RULE = ", and no quantiser in C for a scale rule of the user's"


class Machine(NamedTuple):
    """Where a layer computes."""

    device: str  # "cpu", "cuda"
    capability: tuple[int, int] = (0, 0)  # of the GPU: (9, 0) is Hopper
    cuda: tuple[int, int] = (0, 0)  # that torch was built with


class Choice(NamedTuple):
    """How one GEMM is computed: by a kernel, or emulated for a reason. Both empty: it isn't FP8."""

    kernel: str = ""
    reason: str = ""


class Choices(NamedTuple):
    fprop: Choice
    dgrad: Choice
    wgrad: Choice


@functools.cache
def machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(device.type)
    built = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    cuda = (int(built[1]), int(built[2])) if built else (0, 0)
    return Machine("cuda", torch.cuda.get_device_capability(device), cuda)


@functools.cache
def choose(p: LinearFormat, in_features: int, out_features: int, dtype: torch.dtype, where: Machine) -> Choices:
    """How the GEMMs of a layer are computed on a machine."""
    refused = _refused(p, in_features, out_features, dtype, where)

    def choice(on: bool, a: str, b: str) -> Choice:
        if not on:
            return Choice()
        if refused:
            return Choice(reason=refused)
        if a == b == "e5m2":
            return Choice(reason="tensor cores don't multiply E5M2 by E5M2")
        if p.granularity == "row" and b == "e5m2":
            return Choice(reason="the row-wise kernel takes its second operand in E4M3 only")
        return Choice(kernel=f"scaled_mm {p.granularity}")

    return Choices(
        choice(p.fprop, p.fmt, p.fmt), choice(p.dgrad, p.grad_fmt, p.fmt), choice(p.wgrad, p.grad_fmt, p.fmt)
    )


def _refused(p: LinearFormat, in_features: int, out_features: int, dtype: torch.dtype, where: Machine) -> str:
    """Why no kernel serves the layer; "" if one does."""
    if where.device != "cuda":
        return f"no FP8 matrix kernels on a {where.device}{_OWN_RULE if callable(p.formula) else ''}"
    if dtype != torch.bfloat16:
        return f"FP8 kernels return BF16, the layer is {dtype}"
    align = alignment(p)
    if in_features % align or out_features % align:
        return f"{in_features} x {out_features} is not a multiple of {align}"
    name = f"compute capability {where.capability[0]}.{where.capability[1]}"
    served = {
        "tensor": where.capability >= (8, 9),
        "row": where.capability[0] in (9, 10),
        "block": where.capability[0] == 9,
        "mx": where.capability[0] == 10,
    }[p.granularity]
    if not served:
        return f"no {p.granularity} kernel for {name}"
    if p.granularity in ("block", "mx") and where.cuda < (12, 9):
        return f"{p.granularity} kernels need CUDA 12.9, this torch has {where.cuda[0]}.{where.cuda[1]}"
    return ""


def alignment(p: LinearFormat) -> int:
    """What all three dimensions must be multiples of."""
    return 32 if p.granularity == "mx" else 16


def described(choices: Sequence[Choice], where: Machine) -> tuple[Literal["fp8", "emulated"], str]:
    """How the FP8 GEMMs of several layers are computed, in words: "fp8" only if a kernel serves every one of them."""
    kernels = [choice.kernel for choice in choices if choice.kernel]
    reasons = "; ".join(sorted({choice.reason for choice in choices if choice.reason}))
    if not reasons:
        return "fp8", ", ".join(sorted(set(kernels)))
    if where.device == "cpu":  # the reason is known
        in_c = native.available()[0] and not reasons.endswith(_OWN_RULE)
        return "emulated", "C quantiser" if in_c else "torch quantiser"
    served = f"{kernels[0]} in {len(kernels)} of them, else " if kernels else ""
    return "emulated", f"{served}torch quantiser: {reasons}"


# ---- the GEMMs

_RECIPES = {
    "tensor": (ScalingType.TensorWise, ScalingType.TensorWise),
    "row": (ScalingType.RowWise, ScalingType.RowWise),
    "block": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    "mx": (ScalingType.BlockWise1x32, ScalingType.BlockWise1x32),
}


def fprop(x: Tensor, w_NK: Quantized, bias: Tensor | None, p: LinearFormat) -> Tensor:
    """y = Q(x) w^T + bias for x [..., K]; the result has x's leading dimensions and dtype."""
    x_TK = _pad_tokens(x.reshape(-1, x.shape[-1]), p)
    out_features = len(w_NK.codes)
    tile = p.tiles(len(x_TK), x_TK.shape[1], out_features).x
    y_TN = matmul(quantize(x_TK, p.fmt, tile, p.scale, p.formula), w_NK, p.granularity, x.dtype, bias)
    return y_TN[: x.numel() // x.shape[-1]].view(*x.shape[:-1], out_features)


def dgrad(dy_TN: Tensor, w_KN: Quantized, p: LinearFormat) -> Tensor:
    """dx_TK = Q(dy) w; the weight comes transposed, as :func:`weight_operand` makes it."""
    padded = _pad_tokens(dy_TN, p)
    tile = p.tiles(len(padded), len(w_KN.codes), dy_TN.shape[1]).dgrad_dy
    dy = quantize(padded, p.grad_fmt, tile, p.scale, p.formula)
    return matmul(dy, w_KN, p.granularity, dy_TN.dtype)[: len(dy_TN)]


def wgrad(dy_TN: Tensor, x_TK: Tensor, p: LinearFormat) -> Tensor:
    """dw_NK = Q(dy)^T Q(x), quantised along the tokens."""
    dy, x = _pad_tokens(dy_TN, p), _pad_tokens(x_TK, p)
    tiles = p.tiles(len(x), x.shape[1], dy.shape[1])
    a = transposed(quantize(dy, p.grad_fmt, tiles.wgrad_dy, p.scale, p.formula))
    b = transposed(quantize(x, p.fmt, tiles.wgrad_x, p.scale, p.formula))
    return matmul(a, b, p.granularity, x_TK.dtype)


def weight_operand(w_NK: Tensor, p: LinearFormat, gemm: str) -> Quantized:
    """The weight for "fprop" [N, K], or transposed for "dgrad" [K, N]."""
    tiles = p.tiles(1, w_NK.shape[1], w_NK.shape[0])
    if gemm == "fprop":
        return quantize(w_NK, p.fmt, tiles.w, p.scale, p.formula)
    return transposed(quantize(w_NK, p.fmt, tiles.dgrad_w, p.scale, p.formula))


def matmul(a: Quantized, b: Quantized, granularity: str, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [M, C'] times the transpose of b [N, C']; each row of both is quantised along C'."""
    recipe_a, recipe_b = _RECIPES[granularity]
    swizzle = SwizzleType.SWIZZLE_32_4_4 if granularity == "mx" else SwizzleType.NO_SWIZZLE
    if granularity == "block" and b.tile != (128, 128):
        recipe_b = ScalingType.BlockWise1x128  # wgrad has no weight
    return F.scaled_mm(
        a.codes.view(get_format(a.fmt).dtype), b.codes.view(get_format(b.fmt).dtype).t(),
        scale_operand(a, recipe_a), recipe_a, scale_operand(b, recipe_b, right=True), recipe_b,
        swizzle_a=swizzle, swizzle_b=swizzle, bias=bias, output_dtype=dtype,
    )  # fmt: skip


# ---- layouts


def transposed(q: Quantized) -> Quantized:
    """The same numbers as [K, M], row-major."""
    tile = None if q.tile is None else (q.tile[1], q.tile[0])
    scales = q.scales if q.tile is None else q.scales.T.contiguous()
    return Quantized(q.codes.T.contiguous(), scales, q.fmt, tile)


def scale_operand(q: Quantized, recipe: ScalingType, right: bool = False) -> Tensor:
    """The scales of a matrix [rows, C'] as the table above wants them."""
    if recipe == ScalingType.TensorWise:
        return q.scales
    if recipe == ScalingType.RowWise:
        return q.scales.flatten()[None] if right else q.scales.flatten()[:, None]
    if recipe == ScalingType.BlockWise1x32:
        return swizzled(q.scales)
    if recipe == ScalingType.BlockWise128x128:
        return F.pad(q.scales, (0, -q.scales.shape[1] % 4), value=1.0).T
    # a clone, because contiguous() keeps the odd strides of a single column
    return q.scales.T.clone(memory_format=torch.contiguous_format).T


def swizzled(scales: Tensor) -> Tensor:
    """[R, C] -> E8M0, flat: tile by tile of 128 rows and 4 columns, in each (r, c) at 16 (r % 32) + 4 (r // 32) + c."""
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128), value=1.0).to(torch.float8_e8m0fnu).view(torch.uint8)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(torch.float8_e8m0fnu)


def _pad_tokens(x_TK: Tensor, p: LinearFormat) -> Tensor:
    missing = -len(x_TK) % alignment(p)
    return F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK
