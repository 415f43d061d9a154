"""What FP8 costs one linear layer: each operand, each of its three GEMMs, and the accumulator.

    error = || FP8 result - exact result || / || exact result ||       exact: float32 products of the same BF16 operands

    y = x w^T        "x alone", "w alone": only that operand quantised. Independent errors add as squares
    dx = dy w,  dw = dy^T x        as the ticks say, by `labkit.fp8.Float8Linear`
    accumulator      FP8 codes with exact operands, the sum as the tensor core forms it (`accumulation`)

E4M3 costs each Gaussian operand 2.65 % and the product of two therefore 3.7 %, however long the sum: the errors of the
products average out as the products do. The accumulator costs far less (0.01 to 0.05 %), until the terms have one
sign and K is long: then a chain over the whole of K falls behind. Errors are relative to the norm of the whole result,
which a large outlier in x dominates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from labkit.explorer.accumulation import ACCUMULATORS, CHAIN, running_sums
from labkit.explorer.data import noise, shaped
from labkit.explorer.svg import BLUE, GREEN, GREY, PURPLE, VERMILION, WIDTH, Axis, Bar, Picture, percent
from labkit.explorer.widget import Control, Explorer, View, choice, log_slider, slider, tick
from labkit.fp8.emulation import fake_quantize
from labkit.fp8.formats import get_format
from labkit.fp8.linear import Float8Linear, LinearFormat

TOKENS, OUT = 64, 128
CORNER = (8, 16)  # outputs for which the accumulator is emulated: a sample of [TOKENS, OUT]
LONGEST = 2048


@dataclass(frozen=True)
class Operands:
    """x [T, K], w [N, K] and dy [T, N] in bfloat16."""

    x: Tensor
    w: Tensor
    dy: Tensor


@lru_cache(maxsize=16)
def operands(in_features: int, outlier: float, place: str, mean: float) -> Operands:
    """Gaussian operands; x has an outlier of ``outlier`` sigma, and x and w have the mean ``mean`` (in sigma)."""
    x = shaped(TOKENS, in_features, outlier, place).x + mean
    w = (noise(OUT, in_features, seed=2) + mean) * in_features**-0.5
    return Operands(x.bfloat16(), w.bfloat16(), (noise(TOKENS, OUT, seed=3) * 1e-3).bfloat16())


def operand_errors(o: Operands, precision: LinearFormat) -> dict[str, float]:
    """The error of y with x alone, w alone and both quantised."""
    tiles = precision.tiles(TOKENS, o.x.shape[1], OUT)
    x, w = o.x.float(), o.w.float()
    x_q = fake_quantize(x, precision.fmt, tiles.x, precision.scale, precision.formula)
    w_q = fake_quantize(w, precision.fmt, tiles.w, precision.scale, precision.formula)
    exact = x @ w.T
    return {
        "x alone": relative(x_q @ w.T, exact),
        "w alone": relative(x @ w_q.T, exact),
        "x and w": relative(x_q @ w_q.T, exact),
    }


@torch.enable_grad()
def gemm_errors(o: Operands, precision: LinearFormat) -> dict[str, float]:
    """The errors of y, dx and dw of a BF16 layer with ``precision``."""
    layer = _layer(o.x.shape[1])
    layer.precision = precision
    layer.weight.grad = None
    with torch.no_grad():
        layer.weight.copy_(o.w)
    x = o.x.detach().requires_grad_()
    y = layer(x)
    y.backward(o.dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    x32, w32, dy32 = o.x.float(), o.w.float(), o.dy.float()
    return {
        "y = x wᵀ": relative(y, x32 @ w32.T),
        "dx = dy w": relative(x.grad, dy32 @ w32),
        "dw = dyᵀ x": relative(layer.weight.grad, dy32.T @ x32),
    }


@lru_cache(maxsize=16)
def bf16_errors(in_features: int, outlier: float, place: str, mean: float) -> dict[str, float]:
    """``gemm_errors`` with every GEMM in BF16."""
    return gemm_errors(operands(in_features, outlier, place, mean), LinearFormat.off())


@lru_cache(maxsize=4)
def _layer(in_features: int) -> Float8Linear:
    return Float8Linear(in_features, OUT)


@lru_cache(maxsize=64)
def accumulator_errors(in_features: int, mean: float, fmt: str) -> dict[str, list[float]]:
    """The error of the sum after 128, 256, ... products, for each accumulator, on FP8 codes that fill the format."""
    m, n = CORNER
    o = operands(in_features, 1.0, "one value", mean)
    top = get_format(fmt).max
    a, b = (
        fake_quantize(t.float() * (top / float(t.abs().amax())), fmt, None, "pow2")
        for t in (o.x[:m].float(), o.w[:n].float())
    )
    by_chunk = (t.double().unflatten(1, (-1, CHAIN)).transpose(0, 1) for t in (a, b))
    exact = torch.einsum("cmk,cnk->cmn", *by_chunk).cumsum(0)
    return {
        name: [relative(ours, true) for ours, true in zip(running_sums(a, b, name, fmt), exact, strict=True)]
        for name in ACCUMULATORS
    }


def relative(approximate: Tensor, exact: Tensor) -> float:
    """|| a - e || / || e ||."""
    return float((approximate.detach().to(exact.dtype) - exact).norm() / exact.norm())


class LinearExplorer(Explorer):
    """The error of one linear layer under each switch."""

    title = "One linear layer: y = x wᵀ, forward and backward"

    def make_controls(self) -> dict[str, Control]:
        return {
            "fprop": tick("fprop (y) in FP8", True),
            "dgrad": tick("dgrad (dx) in FP8", True),
            "wgrad": tick("wgrad (dw) in FP8", True),
            "fmt": choice("x and w", [("E4M3", "e4m3"), ("E5M2", "e5m2")], "e4m3"),
            "grad_fmt": choice("dy", [("E4M3", "e4m3"), ("E5M2", "e5m2")], "e4m3"),
            "granularity": choice(
                "scales",
                [
                    ("1×128 and 128×128", "block"),
                    ("per token / channel", "row"),
                    ("MX 1×32", "mx"),
                    ("per tensor", "tensor"),
                ],
                "block",
            ),
            "scale": choice("scales are", [("powers of two", "pow2"), ("FP32", "fp32")], "pow2"),
            "outlier": log_slider("outlier in x, × σ", 1.0, 1.0, 1e6),
            "place": choice("outlier is", ("one value", "one channel", "one token"), "one channel"),
            "mean": slider("mean, × σ", 0.0, 0.0, 3.0),
            "chunks": slider("K = 128 ×", 4, 1, LONGEST // CHAIN, step=1),
            "accumulator": choice(
                "accumulator",
                [("promoted each 128", "promoted"), ("fast, one chain", "fast"), ("FP32", "fp32")],
                "promoted",
            ),
        }

    def show(
        self,
        fprop: bool,
        dgrad: bool,
        wgrad: bool,
        fmt: str,
        grad_fmt: str,
        granularity: str,
        scale: str,
        outlier: float,
        place: str,
        mean: float,
        chunks: int,
        accumulator: str,
    ) -> View:
        self.enable("scale", granularity != "mx", "no choice in MX")
        scale = "pow2" if granularity == "mx" else scale
        precision = LinearFormat(fprop, dgrad, wgrad, fmt, grad_fmt, granularity, scale)
        shape = (chunks * CHAIN, outlier, place, mean)
        o = operands(*shape)
        causes = operand_errors(o, precision)
        gemms = gemm_errors(o, precision)
        bf16 = bf16_errors(*shape)
        sums = accumulator_errors(chunks * CHAIN, mean, fmt)
        causes["accumulator"] = sums[accumulator][-1]
        reading = _reading(causes, bf16["y = x wᵀ"], accumulator, granularity)
        picture = Picture(412, reading)
        colours = {"accumulator": PURPLE, "x and w": VERMILION}
        bars = [Bar(name, error, colours.get(name, BLUE)) for name, error in causes.items()]
        picture.percent_bars(10, 4, 440, f"y in {fmt.upper()}: what costs what", bars, 104)
        on = dict(zip(gemms, (fprop, dgrad, wgrad), strict=True))
        both = [bar for name in gemms for bar in _pair(name, gemms[name], bf16[name], on[name])]
        picture.percent_bars(470, 4, 440, "the three GEMMs, as ticked", both, 128)
        _accumulators(picture, sums, chunks)
        return View(picture.html(), reading, {**causes, **gemms, "bf16": bf16, "accumulators": sums})


def _pair(name: str, error: float, bf16: float, on: bool) -> list[Bar]:
    return [Bar(f"{name}, FP8", error, VERMILION)] if on else [Bar(f"{name}, BF16", bf16, GREEN)]


def _reading(causes: dict[str, float], bf16: float, accumulator: str, granularity: str) -> str:
    both, sum_error = causes["x and w"], causes["accumulator"]
    squares = math.hypot(causes["x alone"], causes["w alone"])
    together = "independent errors add as squares" if abs(both - squares) < 0.1 * both else "more than as squares"
    text = (
        f"x costs {percent(causes['x alone'])}, w {percent(causes['w alone'])}, both {percent(both)}: "
        f"{together} ({percent(squares)}). The {accumulator} accumulator adds {percent(sum_error)}"
    )
    if sum_error > both / 3:
        return (
            text
            + ": no longer small, because terms of one sign lose a little with every group of 32. Promote each 128."
        )
    if granularity == "mx":
        text += ". MX scales are powers of two by definition"
    if causes["x alone"] > 1.5 * causes["w alone"]:
        return text + ". x suffers from its outlier: try smaller blocks, and another place for the outlier."
    return text + f". A GEMM that is not ticked stays in BF16: {percent(bf16)}."


def _accumulators(picture: Picture, sums: dict[str, list[float]], chunks: int) -> None:
    """Error against K; a single chunk is a point."""
    top, bottom = 206, 366
    height = Axis(1e-6, 0.1, bottom, top, log=True)
    axis = Axis(CHAIN, LONGEST, 84, WIDTH - 190)
    picture.text(10, top - 14, "Error of the sum alone, after K products", bold=True)
    for power in range(-6, 0):
        y = height.at(10.0**power)
        picture.line(axis.start, y, axis.end, y)
        picture.text(axis.start - 8, y + 5, f"{100 * 10.0**power:g} %", "end")
    for k in (128, 512, 1024, 1536, 2048):
        picture.text(axis.at(k), bottom + 20, f"K = {k}", "middle")
    styles = {"fast": (VERMILION, "9 5"), "promoted": (PURPLE, ""), "fp32": (GREY, "2 4")}
    for name, (colour, dash) in styles.items():
        points = [(axis.at(CHAIN * (i + 1)), height.at(error)) for i, error in enumerate(sums[name])]
        picture.curve(points, colour, dash, 3)
        picture.dot(*points[-1], colour, 5)
    lowest = bottom + 8.0
    for name in sorted(styles, key=lambda name: sums[name][-1]):
        lowest = min(lowest - 18, height.at(sums[name][-1]) + 5)
        picture.text(axis.at(CHAIN * chunks) + 12, lowest, f"{name}: {percent(sums[name][-1])}", bold=True)
