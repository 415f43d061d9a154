"""From runs to the lines of the panels: smoothed, with the raw curve behind; seeds on their own or as mean and spread.

`Curves.lines` gives every line that is to be drawn, by key. A run that got no new step and looks as before gives the
same `Line` objects again, so that whoever paints can tell what changed by identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from labkit.config import Experiment
from labkit.ui import modelled, theme
from labkit.ui.layout import axis
from labkit.ui.marks import Marked
from labkit.ui.panels import Curve, Floor, Panel
from labkit.ui.series import Array, History, Points, X, band, decimate, smooth

Key = tuple[str, int, int, str]  # run id (of a group: its first), panel, curve, what of it

# A trace that was drawn as something else before is this again, where its new style doesn't say otherwise.
_PLAIN = {"visible": True, "mode": "lines", "opacity": 1.0, "zorder": 0, "fill": "none", "fillcolor": None} | {
    "showlegend": False,
    "hoverinfo": "all",
    "hovertemplate": None,
    "marker": {"opacity": 1.0},
}


class RunView(Marked, Protocol):
    """What a chart needs of a run."""

    @property
    def label(self) -> str: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def colour(self) -> str: ...
    @property
    def dash(self) -> str: ...
    @property
    def visible(self) -> bool: ...


@dataclass(frozen=True)
class Settings:
    x: X = "step"
    log: bool = True
    smoothing: float = 0.6
    seeds: bool = False  # runs that differ in the seed alone become one mean with its spread
    pinned: str | None = None
    device: str = ""  # of the modelled throughput; none: the panel has the measured one


@dataclass(frozen=True, eq=False)
class Line:
    panel: int
    right: bool
    name: str
    x: Array
    y: Array
    style: Mapping[str, Any]

    def trace(self, floor: float | None) -> dict[str, Any]:
        """The plotly trace. On a logarithmic axis, zero and what is below the floor is drawn at it."""
        y = self.y if floor is None else np.maximum(self.y, floor)
        return {
            "type": "scatter",
            "x": self.x.astype(np.float32),  # half the bytes to the browser, and more digits than pixels
            "y": y.astype(np.float32),
            "xaxis": f"x{axis(self.panel)}",
            "yaxis": f"y{axis(self.panel, self.right)}",
            "name": self.name,
            **_PLAIN,
            **self.style,
        }


class Curves:
    """Computes lines, and remembers those of runs that did not change. `limit` None keeps every point."""

    def __init__(self, limit: int | None = 300) -> None:  # about the pixels of a panel
        self._limit = limit
        self._known: dict[str, tuple[Any, dict[Key, Line]]] = {}
        self._history: dict[str, History] = {}

    def lines(self, views: Sequence[RunView], panels: Sequence[Panel], settings: Settings) -> dict[Key, Line]:
        groups = _groups(views) if settings.seeds else [[view] for view in views]
        shown = {view.id for view in views}
        known: dict[str, tuple[Any, dict[Key, Line]]] = {}
        result: dict[Key, Line] = {}
        for rank, group in enumerate(groups):
            first = group[0].id
            state = (tuple(_fingerprint(view, shown) for view in group), tuple(panels), settings, rank)
            before, lines = self._known.get(first, (None, {}))
            if before != state:
                lines = self._compute(group, panels, settings, shown, rank)
            known[first] = (state, lines)
            result |= lines
        self._known = known
        return result

    def _compute(
        self, group: Sequence[RunView], panels: Sequence[Panel], settings: Settings, shown: set[str], rank: int
    ) -> dict[Key, Line]:
        first = group[0]
        name = first.label if len(group) == 1 else f"{first.experiment.recipe.name} · {len(group)} seeds"
        name += " (baseline)" if first.id == settings.pinned else ""
        empty = np.array([np.nan])  # only there for its entry in the legend
        legend = {"mode": "lines", "line": _pen(first, 3), "showlegend": True, "hoverinfo": "skip"}
        legend |= {"legendrank": rank, "marker": {"opacity": 0.0}}
        lines = {(first.id, -1, 0, "legend"): Line(0, False, name, empty, empty, legend)}
        for p, panel in enumerate(panels):
            for c, curve in enumerate(panel.curves):
                drawn = [self._own_part(view, curve, settings, shown) for view in group]
                for what, (x, y), style in self._strokes(drawn, first, curve, settings):
                    style = style | {
                        "hovertemplate": f"{name}<br>{curve.metric} %{{y:.4g}} at %{{x:,.4~g}}<extra></extra>"
                    }
                    lines[(first.id, p, c, what)] = Line(p, curve.right, name, x, y, style)
        return lines

    def _strokes(
        self, drawn: Sequence[tuple[Points, Points]], view: RunView, curve: Curve, settings: Settings
    ) -> list[tuple[str, Points, dict[str, Any]]]:
        wide = 2 if view.id == settings.pinned else 0
        width, opacity = (1.3, 0.75) if curve.thin else (2.5 + wide, 1.0)
        main = {"line": _pen(view, width), "opacity": opacity, "zorder": 1 if curve.thin else 2}
        if len(drawn) > 1:
            x, mean, std = band([smoothed for _, smoothed in drawn])
            (x_low, low), (x_high, high) = self._thin_out(x, mean - std), self._thin_out(x, mean + std)
            area = np.concatenate([x_low, x_high[::-1]]), np.concatenate([low, high[::-1]])
            fill = {"mode": "lines", "line": {"width": 0}, "fill": "toself", "zorder": 0}
            strokes = [("mean", self._thin_out(x, mean), main)]
            if not curve.thin:
                strokes.append(("spread", area, fill | {"fillcolor": theme.translucent(view.colour, 0.2)}))
        else:
            raw, smoothed = drawn[0]
            strokes = [("line", self._thin_out(*smoothed), main)]
            if settings.smoothing and not curve.thin and not curve.exact:
                pen = {"color": view.colour, "dash": "solid", "width": 1}
                strokes.append(
                    ("raw", self._thin_out(*raw), {"line": pen, "opacity": 0.35, "zorder": 0, "mode": "lines"})
                )
        return [
            (what, xy, {"mode": "lines+markers" if len(xy[0]) < 12 else "lines"} | style) for what, xy, style in strokes
        ]

    def _own_part(self, view: RunView, curve: Curve, settings: Settings, shown: set[str]) -> tuple[Points, Points]:
        """(raw, smoothed) of a run. The average begins anew at a switch: it must not blur what the switch did.

        A fork beside its parent begins where it left it, with one shared point, so that they touch.
        """
        history = self._history.setdefault(view.id, History())
        source = "throughput" if curve.metric == modelled.METRIC else curve.metric
        x, y = history.points(view.records, source, settings.x)
        steps, _ = history.points(view.records, source)
        if curve.metric == modelled.METRIC:
            y = modelled.rates(view, steps, settings.device)
        anew = [switch.step for switch in view.switches] + ([view.parent[1] + 1] if view.parent else [])
        parts = np.split(y, np.searchsorted(steps, sorted(anew)))
        weight = 0.0 if curve.exact else settings.smoothing
        smoothed = np.concatenate([smooth(part, weight) for part in parts])
        if view.parent and view.parent[0] in shown:
            start = max(0, int(np.searchsorted(steps, view.parent[1], side="right")) - 1)
            x, y, smoothed = x[start:], y[start:], smoothed[start:]
        return (x, y), (x, smoothed)

    def _thin_out(self, x: Array, y: Array) -> Points:
        return decimate(x, y, self._limit) if self._limit else (x, y)


def floors(panels: Sequence[Panel], lines: Mapping[Key, Line]) -> dict[int, Floor]:
    """Where the logarithmic panels end. Averages don't count where the raw values are there too."""
    result = {}
    for index in (index for index, panel in enumerate(panels) if panel.log):
        drawn = [(what, line.y) for (_, p, _, what), line in lines.items() if p == index]
        raw = [y for what, y in drawn if what == "raw"] or [y for _, y in drawn]
        values = np.concatenate([*raw, [np.nan]])
        positive = values[values > 0]
        zero = bool(np.any(values <= 0))
        if len(positive):
            decades = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
            result[index] = Floor(10.0 ** float(decades[0]), 10.0 ** float(decades[1]), zero)
        else:
            result[index] = Floor(zero=zero)
    return result


def _pen(view: RunView, width: float) -> dict[str, Any]:
    return {"color": view.colour, "dash": view.dash, "width": width}


def _fingerprint(view: RunView, shown: set[str]) -> tuple[Any, ...]:
    last = (view.records[-1].step, view.records[-1].time) if view.records else None
    beside_parent = view.parent and view.parent[0] in shown
    return view.id, len(view.records), last, len(view.switches), view.label, view.colour, view.dash, beside_parent


def _groups(views: Sequence[RunView]) -> list[list[RunView]]:
    """Runs that differ in nothing but the seed, together."""
    groups: dict[Any, list[RunView]] = {}
    for view in views:
        settings = view.experiment.override({"seed": 0, "name": "any"}).to_yaml()
        switches = tuple((switch.step, str(switch.changes)) for switch in view.switches)
        groups.setdefault((settings, switches, view.parent), []).append(view)
    return list(groups.values())
