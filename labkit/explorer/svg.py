"""Inline SVG, so that an explorer needs no second plotly figure and a slider move costs a string.

Text takes the notebook theme's own colour (grey elsewhere), backgrounds are transparent: one picture serves light, dark
and a projector. Every mark carries its label beside it; colour is never the only channel.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.ui.theme import COLOURS, GRID
from labkit.ui.theme import TEXT as GREY

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLOURS
TEXT = f"var(--jp-ui-font-color1, {GREY})"
WIDTH = 920
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FONT = 15


@dataclass(frozen=True)
class Axis:
    """Data from ``low`` to ``high`` on pixels from ``start`` to ``end``; values beyond are drawn at the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    """A share from 0 to 1."""
    colour: str = BLUE


class Picture:
    """Marks in pixels, from the upper left corner."""

    def __init__(self, height: int, label: str) -> None:
        self.height, self.label = height, label
        self._marks: list[str] = []

    def html(self) -> str:
        return (
            f'<svg role="img" aria-label="{html.escape(self.label)}" viewBox="0 0 {WIDTH} {self.height}" '
            f'style="width:100%;max-width:1100px;display:block" font-family="var(--jp-ui-font-family, sans-serif)" '
            f'font-size="{FONT}">' + "".join(self._marks) + "</svg>"
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", bold: bool = False, colour: str = TEXT
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight} style="fill:{colour}">'
            f"{html.escape(words)}</text>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = GRID, width: float = 1, dash: str = ""
    ) -> None:
        self._marks.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'style="stroke:{colour};stroke-width:{width};stroke-dasharray:{dash or "none"}"/>'
        )

    def ticks(self, places: Iterable[float], top: float, bottom: float, colour: str, width: float = 1.5) -> None:
        """Vertical lines at ``places``."""
        path = "".join(f"M{x:.1f} {top:.1f}V{bottom:.1f}" for x in places)
        self._marks.append(f'<path d="{path}" style="stroke:{colour};stroke-width:{width}"/>')

    def rect(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> None:
        self._marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
            f'style="fill:{colour};fill-opacity:{opacity}"/>'
        )

    def curve(self, points: Iterable[tuple[float, float]], colour: str, dash: str = "", width: float = 2.5) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._marks.append(
            f'<polyline points="{path}" '
            f'style="fill:none;stroke:{colour};stroke-width:{width};stroke-dasharray:{dash or "none"}"/>'
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 6) -> None:
        self._marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill:{colour}"/>')

    def pointer(self, x: float, y: float, colour: str) -> None:
        """A triangle whose tip is at (x, y), from above."""
        self._marks.append(f'<path d="M{x:.1f} {y:.1f} l-8 -14 l16 0 z" style="fill:{colour}"/>')

    def percent_bars(
        self, x: float, y: float, width: float, title: str, bars: Sequence[Bar], labels: float, low: float = 1e-4
    ) -> None:
        """Horizontal bars on a logarithmic axis from ``low`` to 100 %, labels in the first ``labels`` pixels."""
        row = 27
        self.text(x, y + 14, title, bold=True)
        axis = Axis(low, 1.0, x + labels, x + width - 76, log=True)
        top, bottom = y + 26, y + 30 + row * len(bars)
        for power in range(round(math.log10(low)), 1):
            at = axis.at(10.0**power)
            self.line(at, top, at, bottom)
            self.text(at, bottom + 17, f"{100 * 10.0**power:g} %", "middle")
        for index, bar in enumerate(bars):
            y_row = top + 4 + row * index
            self.text(axis.start - 8, y_row + 15, bar.label, "end")
            self.rect(axis.start, y_row, axis.at(bar.value) - axis.start, row - 7, bar.colour)
            self.text(axis.at(bar.value) + 7, y_row + 15, percent(bar.value), bold=True)


def power_of_two(exponent: int) -> str:
    return "2" + str(exponent).translate(_SUPERSCRIPTS)


def percent(share: float) -> str:
    """As a reader says it: 0, 0.03 %, 2.65 %, 12.6 %, 100 %."""
    if share == 0:
        return "0"
    if not math.isfinite(share):
        return "NaN" if math.isnan(share) else "infinite"
    value = 100 * share
    if value < 0.01:
        return f"{value:.1g} %" if value >= 1e-3 else "< 0.001 %"
    return f"{value:.2f} %" if value < 10 else f"{value:.1f} %" if value < 99.95 else f"{value:.0f} %"


def number(value: float) -> str:
    """Five significant digits, without an exponent where a reader can do without."""
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
