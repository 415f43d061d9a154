"""Small SVG plots for the tabs: a second plotly figure would cost five megabytes in every page that is loaded.

A Plot has its axes, ticks and title; marks are added in data coordinates. Marks of one kind are one path, so that a few
thousand points stay light. Values that no axis can show (NaN, or not above 0 on a logarithmic one) are left out; those
beyond the ends are drawn at them. `svg` puts plots side by side in one picture with a text for a screen reader.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from labkit.ui import theme
from labkit.ui.marks import labelled, marks
from labkit.ui.tabs.view import OpenRun

TEXT = f"var(--jp-ui-font-color1, {theme.TEXT})"
SOFT = f"var(--jp-ui-font-color2, {theme.TEXT})"
DASHES = {"solid": "none", "dash": "7 4", "dot": "2 4", "dashdot": "7 3 2 3", "longdash": "12 4"} | {
    "longdashdot": "12 3 2 3"
}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
WIDTH = 840  # of the room below the curves on a 1024 px screen: text keeps its size there
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 30, 44  # pixels around the area of a plot


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    title: str
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], title: str, log: bool = False, least: Sequence[float] = ()) -> "Axis":
        """An axis that shows all the values, and `least` in any case."""
        known = [value for value in [*values, *least] if math.isfinite(value) and (value > 0 or not log)]
        low, high = min(known, default=0.1 if log else 0.0), max(known, default=1.0)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
            return cls(low, high if high > low else low * 10, title, log)
        if low == high:
            return cls(low - (0.5 * abs(low) or 1.0), high + (0.5 * abs(high) or 1.0), title)
        margin = 0.04 * (high - low)
        return cls(low if low in least else low - margin, high if high in least else high + margin, title)

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def shows(self, value: float) -> bool:
        return not math.isnan(value) and (value > 0 or not self.log)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        if self.log:
            low, high = round(math.log10(self.low)), round(math.log10(self.high))
            every = max(1, math.ceil((high - low) / most))
            return [(10.0**n, _power(n)) for n in range(low, high + 1, every)]
        size = (self.high - self.low) / most
        step = 10.0 ** math.floor(math.log10(size))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= size * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(n * step, f"{n * step:.4g}".replace("-", "−")) for n in range(first, last + 1)]


@dataclass
class Plot:
    title: str
    x: Axis
    y: Axis
    width: int = WIDTH // 2
    height: int = 260
    _marks: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, down = self.width - LEFT - RIGHT, self.height - TOP - BOTTOM
        return LEFT + self.x.share(x) * across, TOP + (1 - self.y.share(y)) * down

    def dots(self, points: Iterable[tuple[float, float]], colour: str, size: float = 5, opacity: float = 0.6) -> None:
        path = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in self._shown(points))
        pen = f"stroke:{colour};stroke-width:{size};stroke-linecap:round;stroke-opacity:{opacity}"
        self._marks.append(f'<path d="{path}" style="fill:none;{pen}"/>')

    def crosses(self, points: Iterable[tuple[float, float]], colour: str, size: float = 3.5) -> None:
        path = "".join(
            f"M{x - size:.1f} {y - size:.1f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
            for x, y in self._shown(points)
        )
        self._marks.append(f'<path d="{path}" style="fill:none;stroke:{colour};stroke-width:2"/>')

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, dash: str = "solid", width: float = 2.5,
        opacity: float = 1.0,
    ) -> None:  # fmt: skip
        """A gap where a value can't be shown; a single point is a dot."""
        path, inside = "", False
        for x, y in points:
            if not (self.x.shows(x) and self.y.shows(y)):
                inside = False
                continue
            across, down = self.at(x, y)
            path += f"{'L' if inside else 'M'}{across:.1f} {down:.1f}" + ("" if inside else "h.01")
            inside = True
        pen = f"stroke:{colour};stroke-width:{width};stroke-dasharray:{DASHES[dash]};stroke-opacity:{opacity}"
        self._marks.append(f'<path d="{path}" style="fill:none;stroke-linejoin:round;stroke-linecap:round;{pen}"/>')

    def across(self, y: float, words: str) -> None:
        """A horizontal line with words above its right end."""
        self._rule((self.x.low, y), (self.x.high, y))
        right, down = self.at(self.x.high, y)
        self._words(right, down - 5, words, "end")

    def mark(self, x: float, words: str) -> None:
        """A vertical dashed line with words along it: where the recipe was switched."""
        self._rule((x, self.y.low), (x, self.y.high))
        at, top = self.at(x, self.y.high)
        self._words(at - 5, top, words, "end", turned=True)

    def words(self, x: float, y: float, words: str, colour: str = TEXT, anchor: str = "start") -> None:
        across, down = self.at(x, y)
        self._words(across, down, words, anchor, colour)

    def svg(self, left: float = 0) -> str:
        """The group of the plot, moved to the right by `left` pixels."""
        return f'<g transform="translate({left:g} 0)">{self._frame()}{self.marks}</g>'

    @property
    def marks(self) -> str:
        """What was drawn, without the axes."""
        return "".join(self._marks)

    def _frame(self) -> str:
        drawn = [f'<text x="{LEFT}" y="16" font-weight="bold" style="fill:{TEXT}">{html.escape(self.title)}</text>']
        start, bottom = self.at(self.x.low, self.y.low)
        end, top = self.at(self.x.high, self.y.high)
        for value, label in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            drawn.append(
                f'<path d="M{x:.1f} {top}V{bottom}" style="stroke:{theme.GRID}"/>{_label(x, bottom + 17, label)}'
            )
        for value, label in self.y.ticks(4):
            _, y = self.at(self.x.low, value) if not self.y.log or value > 0 else (0, bottom)
            drawn.append(f'<path d="M{start} {y:.1f}H{end}" style="stroke:{theme.GRID}"/>')
            drawn.append(_label(start - 7, y + 4, label, "end"))
        drawn.append(_label((start + end) / 2, self.height - 7, self.x.title))
        middle = (top + bottom) / 2
        turned = f'<g transform="translate(13 {middle}) rotate(-90)">{_label(0, 0, self.y.title)}</g>'
        return "".join([*drawn, turned])

    def _shown(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [self.at(x, y) for x, y in points if self.x.shows(x) and self.y.shows(y)]

    def _rule(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x1, y1), (x2, y2) = self.at(*start), self.at(*end)
        pen = f"stroke:{SOFT};stroke-width:1.3;stroke-dasharray:5 4"
        self._marks.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" style="{pen}"/>')

    def _words(
        self, x: float, y: float, words: str, anchor: str, colour: str = SOFT, turned: bool = False
    ) -> None:  # fmt: skip
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn} font-size="{theme.SMALL}" '
            f'style="fill:{colour}">{html.escape(words)}</text>'
        )


def svg(plots: Sequence[Plot], description: str) -> str:
    """The plots side by side, as wide as there is room."""
    width, height = sum(plot.width for plot in plots), max(plot.height for plot in plots)
    lefts = [sum(plot.width for plot in plots[:index]) for index in range(len(plots))]
    inside = "".join(plot.svg(left) for plot, left in zip(plots, lefts, strict=True))
    return (
        f'<svg role="img" aria-label="{html.escape(description)}" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{round(1.25 * width)}px;display:block" font-size="{theme.SIZE}" '
        f'font-family="var(--jp-ui-font-family, sans-serif)">{inside}</svg>'
    )


def swatch(colour: str, dash: str) -> str:
    """A short piece of a line, for a table that serves as a legend."""
    pen = f"stroke:{colour};stroke-width:2.5;stroke-dasharray:{DASHES[dash]}"
    return f'<svg width="34" height="10" aria-hidden="true"><path d="M0 5H34" style="{pen}"/></svg>'


def _label(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{SOFT}">{html.escape(words)}</text>'


def _power(n: int) -> str:
    return {0: "1", 1: "10", -1: "0.1", -2: "0.01", -3: "0.001"}.get(n, f"10{str(n).translate(_SUPERSCRIPTS)}")


def mark_switches(plot: Plot, view: OpenRun) -> None:
    """Where the run was switched to another Recipe, or left its parent."""
    found = marks(view.records, view.switches, "step", view.parent)
    inside = [(view, mark) for mark in found if plot.x.low < mark.x <= plot.x.high]
    for _, mark, text in labelled(inside, plot.x.high - plot.x.low):
        plot.mark(mark.x, text)
