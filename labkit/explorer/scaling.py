"""One tensor of chosen shape under every granularity of scales: what rounding costs, and what is lost to zero.

    error = sqrt( mean over ordinary values of ((x' - x) / sigma)^2 )    sigma: the size of values where it stands
    lost  = share of ordinary values != 0 that become 0

so that small tokens and channels count as much as large ones. An outlier is left out of both: the question is what it
does to its neighbours. For Gaussian data E4M3 costs 2.65 % and E5M2 5.3 %, however the scale is chosen, since the step
of a floating-point number is relative to the number. That is why an outlier of 100 sigma shows nothing in FP8, and
everything in INT8, which is drawn for contrast. FP8 feels an outlier only where it pushes the ordinary values among
the subnormals: from about 30,000 sigma in E4M3.

"calibrated" is a scale measured before the data grew by ``growth``, with NeMo RL's margin of 1.05: what a KV cache
has between two calibrations. Values beyond it are clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.explorer.data import PLACES, SPREADS, Data, shaped
from labkit.explorer.svg import BLUE, GREY, ORANGE, PURPLE, SKY, WIDTH, Axis, Bar, Picture, percent, power_of_two
from labkit.explorer.widget import Control, Explorer, View, choice, log_slider, slider
from labkit.fp8.emulation import fake_quantize, to_grid
from labkit.fp8.formats import Format, get_format
from labkit.fp8.quantization import Tile, quantize

TOKENS, CHANNELS = 128, 512
MARGIN = 1.05
TILES: dict[str, Tile] = {
    "one per tensor": None,
    "one per token (1 × 512)": (1, CHANNELS),
    "blocks of 128 × 128": (128, 128),
    "blocks of 1 × 128": (1, 128),
    "MX, blocks of 1 × 32": (1, 32),
}
CALIBRATED, INT8 = "per tensor, calibrated", "INT8, one per tensor"


@dataclass(frozen=True)
class Cost:
    error: float
    lost: float


def costs(data: Data, fmt: str, scale: str, growth: float) -> dict[str, Cost]:
    """The cost of each way to scale ``data``; MX has power-of-two scales whatever ``scale`` says."""
    x = data.x.float()
    stale = MARGIN * float(x.abs().amax()) / growth / get_format(fmt).max
    quantized = {CALIBRATED: to_grid(x, stale, fmt) * stale}
    for name, tile in TILES.items():
        quantized[name] = fake_quantize(x, fmt, tile, "pow2" if tile == (1, 32) else scale)
    quantized[INT8] = int8(x)
    ordinary = data.ordinary.float()
    weight, count = ordinary / data.sigma, float(ordinary.sum())
    ordinary *= x != 0
    return {
        name: Cost(
            math.sqrt(float(((q - x) * weight).square_().sum()) / count),
            float(ordinary[q == 0].sum()) / count,
        )
        for name, q in quantized.items()
    }


def int8(x: Tensor) -> Tensor:
    """x in 255 equal steps up to its largest value."""
    step = x.abs().amax() / 127
    return (x / step).round() * step


def scaled_sizes(data: Data, name: str, fmt: str, scale: str, growth: float) -> Tensor:
    """log2 |x / scale| of every value but zeros: where the data lie on the format's line."""
    x = data.x.float()
    if name == CALIBRATED:
        scales = torch.tensor(MARGIN * float(x.abs().amax()) / growth / get_format(fmt).max)
    else:
        scales = quantize(x, fmt, TILES[name], "pow2" if TILES[name] == (1, 32) else scale).element_scales()
    return (x / scales).abs()[x != 0].log2()


class ScalingExplorer(Explorer):
    """What a scale per tensor, token or block does for data of a chosen shape."""

    title = "Scales: per tensor, per token, per block"

    def make_controls(self) -> dict[str, Control]:
        return {
            "outlier": log_slider("outlier, × σ", 1.0, 1.0, 1e6),
            "place": choice("outlier is", PLACES, "one value"),
            "spread": slider("spread, decades", 0.0, 0.0, 7.0),
            "across": choice("spread over", SPREADS, "tokens"),
            "growth": slider("growth since cal.", 1.0, 1.0, 8.0, 0.05),
            "fmt": choice("format", [("E4M3", "e4m3"), ("E5M2", "e5m2")], "e4m3"),
            "scale": choice("scales are", [("powers of two", "pow2"), ("FP32", "fp32")], "fp32"),
            "look_at": choice("histogram of", [CALIBRATED, *TILES], "one per tensor"),
        }

    def show(
        self,
        outlier: float,
        place: str,
        spread: float,
        across: str,
        growth: float,
        fmt: str,
        scale: str,
        look_at: str,
    ) -> View:
        data = shaped(TOKENS, CHANNELS, outlier, place, spread, across)
        found = costs(data, fmt, scale, growth)
        reading = _reading(found, fmt, outlier, growth, spread)
        picture = Picture(530, reading)
        colours = {CALIBRATED: PURPLE, INT8: ORANGE}
        errors = [Bar(name, cost.error, colours.get(name, BLUE)) for name, cost in found.items()]
        lost = [Bar("", cost.lost, colours.get(name, BLUE)) for name, cost in found.items()]
        picture.percent_bars(10, 4, 590, "Error of ordinary values, relative to their size σ", errors, 200, low=1e-3)
        picture.percent_bars(610, 4, WIDTH - 610, "… and how many become zero", lost, 10)
        sizes = scaled_sizes(data, look_at, fmt, scale, growth)
        _histogram(picture, sizes, get_format(fmt), f"Where the data lie on the {fmt.upper()} line, scale {look_at}")
        return View(picture.html(), reading, found)


def _reading(found: dict[str, Cost], fmt: str, outlier: float, growth: float, spread: float) -> str:
    tensor, block, mx = (found[name] for name in ("one per tensor", "blocks of 1 × 128", "MX, blocks of 1 × 32"))
    stale, int8_cost = found[CALIBRATED], found[INT8]
    floor = 0.03 if fmt == "e4m3" else 0.06
    name = fmt.upper()
    if growth > 1 and stale.error > 1.25 * tensor.error:
        return (
            f"The data grew by {growth:.2f} since their scale was measured: the calibrated scale clips them, "
            f"{percent(stale.error)} against {percent(tensor.error)} with a fresh one. Below about 1.25 little shows: "
            "most values are far from the largest."
        )
    if tensor.error > floor:
        return (
            f"One scale per tensor no longer reaches the small values: {percent(tensor.error)} off, "
            f"{percent(tensor.lost)} become zero. Blocks of 1 × 128 cost {percent(block.error)}, "
            f"MX {percent(mx.error)}; blocks help where large and small values lie in different blocks."
        )
    if outlier > 5 or spread > 0:
        return (
            f"{name} with one scale per tensor costs {percent(tensor.error)}, with blocks {percent(block.error)}: "
            f"no gain yet. Its step is relative to each value, so a large neighbour takes nothing away; INT8's step is "
            f"set by the largest value, which costs {percent(int8_cost.error)}."
        )
    return (
        f"Without outliers every granularity costs about the same in {name}, {percent(tensor.error)}: rounding is "
        f"relative to the value. INT8 has equal steps and costs {percent(int8_cost.error)}, less. Now add an outlier."
    )


def _histogram(picture: Picture, log2_sizes: Tensor, form: Format, title: str) -> None:
    """Shares of values by size on the format's own line, with its zones."""
    top, bottom = 300, 480
    smallest = form.min_exponent - form.mantissa_bits
    low, high = smallest - 8, math.ceil(math.log2(form.max)) + 4
    axis = Axis(low, high, 20, WIDTH - 20)
    edge = math.log2(form.max)
    zones = (
        (low, smallest - 1, "becomes 0", GREY),
        (smallest - 1, form.min_exponent, "subnormal", SKY),
        (form.min_exponent, edge, "normal: full precision", BLUE),
        (edge, high, "clipped", ORANGE),
    )
    picture.text(20, top - 32, title, bold=True)
    counts = torch.histc(log2_sizes.clamp(low, high - 1e-3), bins=2 * (high - low), min=low, max=high)
    heights = counts / counts.amax().clamp(min=1)
    for start, end, name, colour in zones:
        picture.rect(axis.at(start), top, axis.at(end) - axis.at(start), bottom - top, colour, 0.14)
        picture.text((axis.at(start) + axis.at(end)) / 2, top - 8, name, "middle")
    width = axis.at(low + 0.5) - axis.at(low)
    for index, height in enumerate(heights.tolist()):
        tall = max(height * (bottom - top - 6), 3.0 if counts[index] else 0.0)
        picture.rect(axis.at(low + index / 2) + 1, bottom - tall, width - 2, tall, BLUE)
    picture.line(axis.start, bottom, axis.end, bottom, GREY, 2)
    for power in range(low - low % 4 + 4, high, 4):
        picture.text(axis.at(power), bottom + 20, power_of_two(power), "middle")
    picture.text(axis.end, bottom + 42, "size of a value divided by its scale", "end")
