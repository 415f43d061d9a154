"""The six curves as one SVG file, for a paper or a slide: every step, drawn without a browser and without a network."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.runs.compare import EMULATED, is_emulated
from labkit.ui import theme
from labkit.ui.marks import labelled, marks_of
from labkit.ui.panels import SIX, Curve, Panel
from labkit.ui.series import points
from labkit.ui.tabs.plot import Axis, Plot
from labkit.ui.traces import RunView

_WIDTH, _HEIGHT, _LEGEND = 560, 270, 26
Points = list[tuple[float, float]]


def write_svg(path: str | Path, views: Sequence[RunView]) -> Path:
    """Raises ValueError if there are no runs."""
    if not views:
        raise ValueError("nothing to draw: give at least one run")
    plots = [_plot(panel, views) for panel in SIX]
    top = _LEGEND * len(views) + 10
    width, height = 2 * _WIDTH, top + 3 * _HEIGHT
    groups = [
        f'<g transform="translate(0 {top + row * _HEIGHT})">{plots[2 * row].svg()}{plots[2 * row + 1].svg(_WIDTH)}</g>'
        for row in range(3)
    ]
    path = Path(path)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="{theme.SIZE}">{_legend(views)}{"".join(groups)}</svg>\n',
        encoding="utf-8",
    )
    return path


def _plot(panel: Panel, views: Sequence[RunView]) -> Plot:
    """Curves with an axis of their own are left out: what is left shares one scale."""
    curves = [curve for curve in panel.curves if not curve.right]
    drawn = {(view.id, curve.metric): _curve(view, curve) for view in views for curve in curves}
    every = [value for found in drawn.values() for _, value in found]
    positive = [value for value in every if value > 0]
    foot = 10.0 ** math.floor(math.log10(min(positive))) / 10 if panel.log and positive else 1e-6
    zero = panel.log and any(value <= 0 for value in every)
    y = Axis.around([*positive, *([foot] if zero else [])] if panel.log else every, "", panel.log, panel.include)
    last = max((float(view.records[-1].step) for view in views if view.records), default=1.0)
    title = panel.title
    if curves[0].metric == "throughput" and any(is_emulated(view.records[-1:]) for view in views):
        title += f"; FP8 {EMULATED}"
    plot = Plot(title, Axis(0.0, max(last, 1.0), "step"), y, width=_WIDTH, height=_HEIGHT)
    if zero:
        plot.words(0.0, foot * 1.3, "exact (0)")
    if any(curve.thin for curve in curves):
        plot.words(plot.x.low, plot.y.high, panel.note)
    for view in views:
        for curve in curves:
            found = [(x, max(value, foot) if panel.log else value) for x, value in drawn[view.id, curve.metric]]
            plot.line(found, view.colour, view.dash, 1.3 if curve.thin else 2.5)
    for _, mark, text in labelled(marks_of(views, "step"), last):
        plot.mark(mark.x, text)
    return plot


def _curve(view: RunView, curve: Curve) -> Points:
    x, y = points(view.records, curve.metric)
    known = np.isfinite(y)
    return [(float(a), float(b)) for a, b in zip(x[known], y[known], strict=True)]


def _legend(views: Sequence[RunView]) -> str:
    lines = []
    for index, view in enumerate(views):
        plot = Plot("", Axis(0, 1, ""), Axis(0, 1, ""), width=136, height=100)
        plot.line([(0.0, 0.5), (1.0, 0.5)], view.colour, view.dash)
        words = f'<text x="140" y="48" style="fill:{theme.TEXT}">{html.escape(view.label)}</text>'
        lines.append(f'<g transform="translate(0 {_LEGEND * index - 35})">{plot.marks}{words}</g>')
    return "".join(lines)
