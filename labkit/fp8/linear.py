"""A linear layer whose three GEMMs are FP8 or BF16, each on its own switch.

    fprop   y_TN  = Q(x_TK)  Q(w_NK)^T          (+ bias)
    dgrad   dx_TK = Q(dy_TN) Q(w_NK)
    wgrad   dw_NK = Q(dy_TN)^T Q(x_TK)

T tokens (leading dimensions flattened), K input and N output features. Every Q quantises the high-precision
tensor for that one use, along the dimension its GEMM sums over, as a real FP8 GEMM needs; so x and dy have
two quantised copies (no value is quantised twice). A GEMM that is off uses the unquantised operands. Tiles by
granularity:

                    fprop x    fprop w      dgrad dy   dgrad w      wgrad dy    wgrad x
    block           1 x 128    128 x 128    1 x 128    128 x 128    128 x 1     128 x 1
    row             1 x K      1 x K        1 x N      N x 1        T x 1       T x 1
    mx              1 x 32     1 x 32       1 x 32     32 x 1       32 x 1      32 x 1
    tensor          one scale per tensor everywhere

Weights and x use ``fmt``, dy uses ``grad_fmt``. The emulated GEMM multiplies dequantised operands: in x's
dtype for pow2 scales (exact), in float32 for fp32 scales, then rounded to x's dtype. On the CPU both
accumulate in float32. On a GPU whose tensor cores can, the GEMM is a real one
(:mod:`labkit.fp8.scaled_mm`): the same codes and scales, another order of summation.

With ``block``, ``row`` and ``mx`` a token's output does not depend on its neighbours in the batch; with
``tensor`` it does, because they share a scale.

Sources: DeepSeek-V3 report (arXiv 2412.19437) section 3.3; Transformer Engine Float8BlockScaling (block),
Float8Current- Scaling (tensor) and MXFP8BlockScaling (mx); vLLM's per-token, per-channel scheme (row). Left
out: the reduced accumulation width of Hopper tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.config.own import KINDS, load
from labkit.fp8 import scaled_mm
from labkit.fp8.emulation import fake_quantize
from labkit.fp8.quantization import Formula, Quantized, Tile

if TYPE_CHECKING:
    from labkit.config.recipe import Recipe

GRANULARITIES = ("block", "tensor", "row", "mx")


class OperandTiles(NamedTuple):
    """The tile of each operand of the three GEMMs."""

    x: Tile
    w: Tile
    dgrad_dy: Tile
    dgrad_w: Tile
    wgrad_dy: Tile
    wgrad_x: Tile


@dataclass(frozen=True)
class LinearFormat:
    """Which of a linear layer's GEMMs are FP8, and how their operands are quantised."""

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False
    fmt: str = "e4m3"
    grad_fmt: str = "e4m3"
    granularity: str = "block"
    scale: str = "pow2"
    formula: Formula = "te"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"unknown granularity {self.granularity!r}: choose one of {', '.join(GRANULARITIES)}")
        if self.granularity == "mx" and self.scale != "pow2":
            raise ValueError("granularity mx has power-of-two scales by definition: set scale to pow2")

    @classmethod
    def off(cls) -> LinearFormat:
        """All three GEMMs in high precision."""
        return cls()

    @classmethod
    def from_recipe(cls, recipe: Recipe, side: str) -> LinearFormat:
        """The format on one side of the pipeline: "rollout" (inference, fprop only) or "train"."""
        if side not in ("rollout", "train"):
            raise ValueError(f'unknown side {side!r}: choose "rollout" or "train"')
        scaling, train = recipe.scaling, recipe.train
        rollout = side == "rollout"
        return cls(
            fprop=recipe.rollout.linears if rollout else train.fprop,
            dgrad=False if rollout else train.dgrad,
            wgrad=False if rollout else train.wgrad,
            fmt=scaling.format,
            grad_fmt=scaling.grad_format,
            granularity=scaling.granularity,
            scale=scaling.scale,
            formula=load("scaling", scaling.formula) if KINDS["scaling"].owns(scaling.formula) else scaling.formula,
        )

    @property
    def inactive(self) -> bool:
        """True when no GEMM is FP8."""
        return not (self.fprop or self.dgrad or self.wgrad)

    def weight_operand(self, weight: Tensor) -> Tensor:
        """A weight [out_features, in_features] quantised and dequantised: what an emulated fprop multiplies with."""
        out_features, in_features = weight.shape
        tile = self.tiles(1, in_features, out_features).w
        return fake_quantize(weight.detach(), self.fmt, tile, self.scale, self.formula)

    def tiles(self, tokens: int, in_features: int, out_features: int) -> OperandTiles:
        """The tiles for x [tokens, in_features] and w [out_features, in_features]; the table above."""
        if self.granularity == "tensor":
            return OperandTiles(None, None, None, None, None, None)
        if self.granularity == "block":
            return OperandTiles((1, 128), (128, 128), (1, 128), (128, 128), (128, 1), (128, 1))
        if self.granularity == "mx":
            return OperandTiles((1, 32), (1, 32), (1, 32), (32, 1), (32, 1), (32, 1))
        k, n, t = in_features, out_features, tokens
        return OperandTiles((1, k), (1, k), (1, n), (n, 1), (t, 1), (t, 1))


class Float8Linear(nn.Module):
    """``nn.Linear`` with FP8 fprop, dgrad and wgrad by ``precision``; with all off exactly ``F.linear``.

    The quantised weight is computed once and kept until the weight changes, which is noticed by the tensor's
    version counter, so optimizer steps and ``copy_`` need no further call. Only a write through
    ``weight.data`` escapes torch's counter: call ``requantize`` after one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        precision: LinearFormat | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.precision = precision or LinearFormat.off()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)
        self._operands: WeightOperands | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled weight counts its versions anew: the cache stays behind.
        return {**self.__dict__, "_operands": None}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.precision}"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], both of the weight's dtype."""
        if self.precision.inactive:
            return F.linear(x, self.weight, self.bias)
        operands = self._current_operands()
        if not torch.is_grad_enabled():
            return _fprop(x, operands.fprop, self.bias, self.precision)
        return _Float8Matmul.apply(x, self.weight, self.bias, operands, self.precision)

    def requantize(self) -> None:
        """Recompute the quantised weight from ``weight``."""
        self._operands = None
        if not self.precision.inactive:
            self._current_operands()

    def operand(self) -> Tensor:
        """What fprop multiplies with: the weight, or its dequantised FP8 values."""
        if self.precision.inactive:
            return self.weight.detach()
        held = self._current_operands().fprop
        if isinstance(held, Quantized):
            return held.dequantize(self.weight.dtype if self.precision.scale == "pow2" else torch.float32)
        return held

    def kernels(self) -> scaled_mm.Choices:
        """How each of the three GEMMs is computed here, and why not on FP8 tensor cores."""
        where = scaled_mm.machine(self.weight.device)
        return scaled_mm.choose(self.precision, self.in_features, self.out_features, self.weight.dtype, where)

    def _current_operands(self) -> WeightOperands:
        kept = self._operands
        if kept is None or kept.precision is not self.precision or not kept.state.matches(self.weight):
            kept = self._operands = self._quantize_weight()
        return kept

    def _quantize_weight(self) -> WeightOperands:
        p, kernels, weight = self.precision, self.kernels(), self.weight.detach()
        tiles = p.tiles(1, self.in_features, self.out_features)
        fprop: Tensor | Quantized = weight
        dgrad: Tensor | Quantized = weight
        if kernels.fprop.kernel:
            fprop = scaled_mm.weight_operand(weight, p, "fprop")
        elif p.fprop:
            fprop = p.weight_operand(weight)
        if kernels.dgrad.kernel:
            dgrad = scaled_mm.weight_operand(weight, p, "dgrad")
        elif p.dgrad and isinstance(fprop, Tensor) and p.fprop and tiles.w == tiles.dgrad_w:
            dgrad = fprop
        elif p.dgrad:
            dgrad = fake_quantize(weight, p.fmt, tiles.dgrad_w, p.scale, p.formula)
        return WeightOperands(fprop, dgrad, bool(kernels.wgrad.kernel), p, WeightState.of(self.weight))


@dataclass(frozen=True)
class WeightState:
    """Identifies a weight's contents. The alias keeps its memory from being reused at the same address."""

    alias: Tensor
    version: int

    @classmethod
    def of(cls, weight: Tensor) -> WeightState:
        return cls(weight.detach(), weight._version)

    def matches(self, weight: Tensor) -> bool:
        return self.version == weight._version and self.alias.data_ptr() == weight.data_ptr()


@dataclass(frozen=True)
class WeightOperands:
    """The weight as fprop and dgrad use it: FP8 codes for a kernel, dequantised for emulation, else itself."""

    fprop: Tensor | Quantized
    dgrad: Tensor | Quantized
    wgrad_kernel: bool  # whether wgrad, which needs no weight, runs on FP8 tensor cores
    precision: LinearFormat
    state: WeightState


class _Float8Matmul(torch.autograd.Function):
    """The three equations of the module docstring, with the weight's prepared operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: WeightOperands, precision: LinearFormat
    ) -> Tensor:
        # a plain weight is saved the careful way, in which torch notices when it changes before backward
        dgrad = operands.dgrad
        ctx.save_for_backward(x, None if isinstance(dgrad, Quantized) else dgrad)
        ctx.operands, ctx.precision, ctx.has_bias = operands, precision, bias is not None
        return _fprop(x, operands.fprop, bias, precision)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, w_dgrad = ctx.saved_tensors
        dy_TN, x_TK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            w = ctx.operands.dgrad if w_dgrad is None else w_dgrad
            dx = _dgrad(dy_TN, w, ctx.precision).view(x.shape)
        if ctx.needs_input_grad[1]:
            wgrad = scaled_mm.wgrad if ctx.operands.wgrad_kernel else _wgrad
            dw = wgrad(dy_TN, x_TK, ctx.precision)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = dy_TN.sum(0)
        return dx, dw, db, None, None


def _fprop(x: Tensor, w_NK: Tensor | Quantized, bias: Tensor | None, p: LinearFormat) -> Tensor:
    """y = Q(x) w^T + bias, for x [..., K]; ``w_NK`` is the prepared operand."""
    if isinstance(w_NK, Quantized):
        return scaled_mm.fprop(x, w_NK, bias, p)
    if not p.fprop:
        return F.linear(x, w_NK, bias)
    tile = p.tiles(1, w_NK.shape[1], w_NK.shape[0]).x
    x_q = fake_quantize(x, p.fmt, tile, p.scale, p.formula)
    return F.linear(x_q, w_NK, None if bias is None else bias.to(x_q.dtype)).to(x.dtype)


def _dgrad(dy_TN: Tensor, w: Tensor | Quantized, p: LinearFormat) -> Tensor:
    """dx_TK = Q(dy) w; ``w`` is the prepared operand, [N, K], or [K, N] for a kernel."""
    if isinstance(w, Quantized):
        return scaled_mm.dgrad(dy_TN, w, p)
    if not p.dgrad:
        return dy_TN @ w
    tile = p.tiles(len(dy_TN), w.shape[1], w.shape[0]).dgrad_dy
    return (fake_quantize(dy_TN, p.grad_fmt, tile, p.scale, p.formula) @ w).to(dy_TN.dtype)


def _wgrad(dy_TN: Tensor, x_TK: Tensor, p: LinearFormat) -> Tensor:
    """dw_NK = Q(dy)^T Q(x), quantised along the tokens."""
    if not p.wgrad:
        return dy_TN.T @ x_TK
    tiles = p.tiles(len(x_TK), x_TK.shape[1], dy_TN.shape[1])
    dy_q = fake_quantize(dy_TN, p.grad_fmt, tiles.wgrad_dy, p.scale, p.formula)
    x_q = fake_quantize(x_TK, p.fmt, tiles.wgrad_x, p.scale, p.formula)
    return (dy_q.T @ x_q).to(x_TK.dtype)
