"""One number on the FP8 line: stored = FP8(x / scale), used as stored * scale.

Between two powers of two an E4M3 line has 8 values, an E5M2 line 4, equally far apart; beyond the next power the
distance doubles. So the rounding error is relative to the value: at most 2^-4 (E4M3) or 2^-3 (E5M2), for every size
from the smallest normal value up to the largest. Below, subnormals are equally spaced and the relative error grows to
100 %; above, everything becomes the largest value. A scale moves the whole line along, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from labkit.explorer.svg import BLUE, GREY, ORANGE, VERMILION, WIDTH, Axis, Picture, number, percent, power_of_two
from labkit.explorer.widget import Control, Explorer, View, choice, log_slider, slider
from labkit.fp8.emulation import to_grid
from labkit.fp8.formats import FORMATS, NAN_CODE, Format, decode, get_format

LOW, HIGH = 2.0**-22, 2.0**20
_STYLES = {"e4m3": (BLUE, ""), "e5m2": (ORANGE, "9 5")}


@dataclass(frozen=True)
class Rounded:
    """A positive x and the FP8 value that stands for it; all in x's own units."""

    x: float
    value: float
    code: int
    below: float
    above: float
    """The values on both sides of x (both x itself where it is one; above is infinite where x is clipped)."""
    zone: str

    @property
    def error(self) -> float:
        return abs(self.value - self.x) / self.x


def round_value(x: float, fmt: str = "e4m3", scale: float = 1.0) -> Rounded:
    """x > 0 as FP8 value times scale. Raises ValueError for other x, an unknown format or an impossible scale."""
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"x is {x}: give a positive number (the line is symmetric)")
    form = get_format(fmt)
    stored = float(to_grid(torch.tensor([x]), scale, fmt))
    values = line(fmt)
    code = values.index(stored)
    scaled = x / scale
    above = next((v for v in values if v >= scaled), math.inf)
    below = max(v for v in values if v <= scaled)
    if scaled > form.max:
        zone = "clipped"
    elif stored == 0:
        zone = "lost"
    else:
        zone = "normal" if scaled >= 2.0**form.min_exponent else "subnormal"
    return Rounded(x, stored * scale, code, below * scale, above * scale, zone)


@lru_cache
def line(fmt: str) -> list[float]:
    """The finite values >= 0 in ascending order; the place of a value is its code."""
    form = get_format(fmt)
    last = NAN_CODE if fmt == "e4m3" else 0x7C  # E5M2 keeps codes from 0x7c for infinity and NaN
    return decode(torch.arange(last, dtype=torch.uint8), form).tolist()


def largest_error(x: float, form: Format, scale: float) -> float:
    """The largest relative error that rounding can make at the size of x: half a step over x, at most 1."""
    scaled = x / scale
    if scaled > form.max:
        return (scaled - form.max) / scaled
    exponent = max(math.floor(math.log2(scaled)), form.min_exponent)
    return min(2.0 ** (exponent - form.mantissa_bits - 1) / scaled, 1.0)


def bits(code: int, form: Format) -> str:
    """The byte as sign, exponent and mantissa."""
    byte, m = f"{code:08b}", form.mantissa_bits
    return f"{byte[0]} {byte[1 : 8 - m]} {byte[8 - m :]}"


def meaning(code: int, form: Format) -> str:
    """The product that a code stands for, as 2⁶ × 1.75."""
    m = form.mantissa_bits
    exponent, fraction = code >> m, (code & (2**m - 1)) / 2**m
    if exponent == 0:
        return f"{power_of_two(form.min_exponent)} × {fraction:g}"
    return f"{power_of_two(exponent + form.min_exponent - 1)} × {1 + fraction:g}"


class NumberLine(Explorer):
    """Where one number lands on the FP8 line."""

    title = "FP8 number line"

    def make_controls(self) -> dict[str, Control]:
        return {
            "x": log_slider("x", 19.3, 2.0**-20, 2.0**18, per_decade=60),
            "fmt": choice("format", [("E4M3", "e4m3"), ("E5M2", "e5m2")], "e4m3"),
            "scale_exponent": slider("scale = 2 to the", 0, -12, 12, step=1),
        }

    def show(self, x: float, fmt: str, scale_exponent: int) -> View:
        scale = 2.0**scale_exponent
        rounded = round_value(x, fmt, scale)
        reading = _reading(rounded, fmt, scale)
        picture = Picture(520, reading)
        _close_up(picture, rounded, fmt, scale)
        _whole_line(picture, rounded, fmt, scale)
        _errors(picture, rounded, fmt, scale)
        return View(picture.html(), reading, {**asdict(rounded), "error": rounded.error})


def _reading(r: Rounded, fmt: str, scale: float) -> str:
    form = get_format(fmt)
    times = "" if scale == 1 else f" × scale {number(scale)}"
    stored = f"{number(r.x)} becomes {number(r.value)}, code {bits(r.code, form)} = {meaning(r.code, form)}{times}: "
    end = {
        "clipped": f"{number(r.x)} is beyond the largest value {number(form.max * scale)}, so it is clipped to it: "
        f"{percent(r.error)} off. A larger scale would hold it.",
        "lost": f"{number(r.x)} is below half of the smallest value {number(line(fmt)[1] * scale)}, so it becomes 0. "
        "A smaller scale would keep it.",
        "subnormal": stored
        + f"{percent(r.error)} off. Here the steps no longer shrink with the value, so the relative error "
        "grows. A smaller scale would help.",
        "normal": stored + f"{percent(r.error)} off, of at most {percent(2.0 ** -(form.mantissa_bits + 1))} "
        "at any size between the smallest normal and the largest value.",
    }
    return end[r.zone]


def _close_up(picture: Picture, r: Rounded, fmt: str, scale: float) -> None:
    values = [v * scale for v in line(fmt)]
    place = min(r.code, len(values) - 4)
    first = max(place - 4, 0)
    near = values[first : first + 8]
    step = near[-1] - near[-2]
    axis = Axis(near[0] - step / 4, near[-1] + step / 4, 20, WIDTH - 20)
    y = 92
    picture.text(20, 16, "Close up: values that exist (long), halfway points (short)", bold=True)
    picture.line(axis.start, y, axis.end, y, GREY, 2)
    for low, high in pairwise(near):
        picture.line(axis.at((low + high) / 2), y - 8, axis.at((low + high) / 2), y + 8, GREY, 1.5, "3 3")
    free = -math.inf
    for value in near:
        at = axis.at(value)
        picture.line(at, y - 15, at, y + 15, BLUE if value == r.value else GREY, 3)
        if at - free > 64 or value == r.value:
            picture.text(at, y + 33, number(value), "middle", bold=value == r.value)
            free = at
    inside = near[0] <= r.x <= near[-1] + step / 4
    at = axis.at(r.x)
    anchor = "start" if at < 120 else "end" if at > WIDTH - 120 else "middle"
    picture.pointer(at, y - 20, VERMILION)
    picture.text(at, y - 40, f"x = {number(r.x)}" + ("" if inside else " →"), anchor, bold=True, colour=VERMILION)
    picture.dot(axis.at(r.value), y, BLUE, 7)


def _log_axis() -> Axis:
    return Axis(LOW, HIGH, 64, WIDTH - 20, log=True)


def _whole_line(picture: Picture, r: Rounded, fmt: str, scale: float) -> None:
    axis, top = _log_axis(), 150
    picture.text(20, top + 16, "Every positive value of both formats, on a logarithmic axis", bold=True)
    for row, name in enumerate(FORMATS):
        y = top + 30 + 30 * row
        colour = _STYLES[name][0] if name == fmt else GREY
        picture.text(axis.start - 8, y + 16, name.upper(), "end", bold=name == fmt)
        values = (value * scale for value in line(name)[1:])
        picture.ticks([axis.at(value) for value in values if LOW <= value <= HIGH], y, y + 20, colour)
    picture.line(axis.at(r.x), top + 24, axis.at(r.x), 478, VERMILION, 2, "6 4")


def _errors(picture: Picture, r: Rounded, fmt: str, scale: float) -> None:
    axis = _log_axis()
    height = Axis(1e-3, 1.0, 478, 278, log=True)
    picture.text(20, 262, "Largest rounding error at each size (● this x)", bold=True)
    for share in (1e-3, 1e-2, 1e-1, 1.0):
        picture.line(axis.start, height.at(share), axis.end, height.at(share))
        picture.text(axis.start - 8, height.at(share) + 5, f"{100 * share:g} %", "end")
    for power in range(-20, 21, 4):
        at = axis.at(2.0**power)
        picture.line(at, 478, at, 484, GREY)
        picture.text(at, 502, number(2.0**power) if -4 <= power <= 16 else power_of_two(power), "middle")
    sizes = [LOW * 2.0 ** (n / 16) for n in range(16 * 42 + 1)]
    for name, form in FORMATS.items():
        colour, dash = _STYLES[name]
        errors = [largest_error(x, form, scale) for x in sizes]
        # the larger of neighbours: else a sample just beyond the largest value, hardly clipped, draws a spike
        points = [(axis.at(x), height.at(max(pair))) for x, pair in zip(sizes, pairwise(errors), strict=False)]
        picture.curve(points, colour, dash, 3 if name == fmt else 1.5)
    step = 448 / 127 * scale
    limits = [(x, min(step / 2 / x, 1.0)) for x in sizes if x <= 448 * scale]
    picture.curve([(axis.at(x), height.at(error)) for x, error in limits], GREY, "2 4")
    _legend(picture, 520, 262)
    picture.dot(axis.at(r.x), height.at(r.error), VERMILION)


def _legend(picture: Picture, x: float, y: float) -> None:
    for name, colour, dash in (("E4M3", BLUE, ""), ("E5M2", ORANGE, "9 5"), ("INT8, same top", GREY, "2 4")):
        picture.line(x, y - 5, x + 34, y - 5, colour, 3, dash)
        picture.text(x + 40, y, name)
        x += 98
