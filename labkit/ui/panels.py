"""What the panels are, as data: titles with unit and direction, healthy bands, axes, the marks of switches.

`SIX` are the panels of the first screen, two a row; `extra(metric)` makes one of any other metric. `layout` turns
panels into a plotly layout. It sets no axis ranges: plotly chooses them, so that a zoom by hand outlives the next
update. A logarithmic axis has no place for zero: exact agreement is drawn at the panel's floor, in a strip labelled
"exact (0)".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.runs.compare import EMULATED
from labkit.ui import theme
from labkit.ui.series import Mark, X, meaning

DIRECTIONS = {"higher": "↑", "lower": "↓", "one": "→ 1", "zero": "→ 0", "neither": ""}
WATCH_TMPE = 0.03  # NeMo RL's guide: up to 1.03 is usual, above 1.05 something is broken
X_TITLES = {"step": "step", "tokens": "generated tokens", "time": "minutes"}

# pixels
PANEL, GAP, BETWEEN = 140, 74, 74  # height of a panel, from one to the next down, and across
MARGIN = {"l": 58, "r": 50, "t": 84, "b": 46}
MOST = 8
_NARROW = 0.05  # marks closer than this share of the x axis share one label


@dataclass(frozen=True)
class Curve:
    """`thin` curves are the second of their panel, `right` ones have their axis on the right."""

    metric: str
    thin: bool = False
    right: bool = False
    exact: bool = False  # never smoothed: measured so seldom that an average would lag by whole evaluations


@dataclass(frozen=True)
class Panel:
    title: str
    note: str
    curves: tuple[Curve, ...]
    log: bool = False
    watch: float | None = None  # from here to the end of the healthy band, it deserves a look
    include: tuple[float, ...] = ()  # the axis always shows these values
    top: float | None = None  # and ends here at the latest
    shaded: bool = True  # the healthy band is drawn, so the axis shows it, however far the curves are from its end

    @property
    def healthy(self) -> tuple[float, float] | None:
        return meaning(self.curves[0].metric).healthy if self.shaded else None


@dataclass(frozen=True)
class Floor:
    """The decades of a logarithmic panel, around its smallest and largest positive values, and if there is a zero."""

    lowest: float = 1e-4
    highest: float = 1.0
    zero: bool = False

    @property
    def decades_a_tick(self) -> int:
        return max(1, round(math.log10(self.highest / self.lowest) / 4))

    @property
    def at(self) -> float:
        """Where zero is drawn."""
        return self.lowest / 10


def title(name: str, metric: str) -> str:
    described = meaning(metric)
    unit = "" if described.unit == "1" else f"({described.unit})"
    return " ".join(part for part in (name, DIRECTIONS[described.better], unit) if part)


THROUGHPUT = Panel(title("Throughput", "throughput"), "measured", (Curve("throughput"),), include=(0.0,))
SIX = (
    Panel(
        title("Accuracy", "heldout_accuracy"),
        "bold: held-out, thin: rollout",
        (Curve("heldout_accuracy", exact=True), Curve("accuracy", thin=True)),
        include=(0.0, 1.0),
        top=1.02,
    ),
    THROUGHPUT,
    Panel(
        title("Mismatch TMPE − 1", "tmpe"),
        "green: healthy, orange: from 0.03 to 0.05",
        (Curve("tmpe"),),
        log=True,
        watch=WATCH_TMPE,
    ),
    Panel(
        title("Generation KL", "gen_kl_error"),
        "per token; green: healthy, below 0.001",
        (Curve("gen_kl_error"),),
        log=True,
    ),
    Panel(
        title("Effective sample size", "ess"),
        "healthy above 0.3; thin: share of tokens kept",
        (Curve("ess"), Curve("kept_share", thin=True)),
        include=(0.9, 1.0),
        top=1.02,
        shaded=False,
    ),
    Panel(
        title("Entropy", "entropy"),
        "thin, right axis: answer length, tokens",
        (Curve("entropy"), Curve("response_length", thin=True, right=True)),
        include=(0.0,),
    ),
)


def extra(metric: str) -> Panel:
    """A panel of any metric. Errors in nats or probability span decades: their axis is logarithmic."""
    described = meaning(metric)
    errors = described.better == "lower" and described.unit in ("nats", "probability")
    definition = described.definition
    note = definition if len(definition) <= 44 else definition[:43].rstrip() + "…"
    return Panel(title(metric.replace("_", " "), metric), note, (Curve(metric),), log=errors)


def axis(panel: int, right: bool = False) -> str:
    """The number of a panel's axis, as plotly writes it behind an x or a y."""
    number = panel + 1 + (100 if right else 0)
    return "" if number == 1 else str(number)


def anchors() -> list[dict[str, Any]]:
    """Traces without a point, one for each axis there can be: plotly knows only axes that a trace uses."""
    axes = [(axis(index), axis(index)) for index in range(MOST)]
    axes += [(axis(index), axis(index, right=True)) for index, panel in enumerate(SIX) if panel.curves[-1].right]
    return [
        {"type": "scatter", "x": [None], "y": [None], "xaxis": f"x{x}", "yaxis": f"y{y}", "showlegend": False}
        for x, y in axes
    ]


def layout(
    panels: Sequence[Panel],
    x: X,
    floors: Mapping[int, Floor],
    marks: Sequence[tuple[Mark, str]] = (),
    emulated: bool = False,
) -> dict[str, Any]:
    """`floors` has the panels whose axis is logarithmic, `marks` the switches with their run's colour."""
    rows = (len(panels) + 1) // 2
    plot = rows * PANEL + (rows - 1) * GAP
    result: dict[str, Any] = {
        "height": plot + MARGIN["t"] + MARGIN["b"],
        "margin": MARGIN,
        "autosize": True,
        "font": {"size": theme.SIZE, "color": theme.TEXT},
        "paper_bgcolor": theme.CLEAR,
        "plot_bgcolor": theme.CLEAR,
        "hovermode": "closest",
        "uirevision": "keep",
        # The chips show and hide runs, by keyboard too; a second way that they don't know of would disagree with them.
        "legend": {"orientation": "h", "x": 0, "y": 1 + 46 / plot, "yanchor": "bottom", "itemclick": False}
        | {"itemdoubleclick": False, "traceorder": "normal", "itemwidth": 40},
    }
    for index in range(len(panels), MOST):  # a page can't be told of new axes and their settings at once: all are there
        result |= {f"{letter}axis{index + 1}": {"visible": False, "domain": [0.0, 0.01]} for letter in "xy"}
    headings: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    for index, panel in enumerate(panels):
        left, top = index % 2, 1 - (index // 2) * (PANEL + GAP) / plot
        across = [0.0, 0.435] if left == 0 else [0.565, 1.0]
        result |= _axes(
            panel, index, across, [max(0.0, top - PANEL / plot), top], x, floors.get(index), index >= len(panels) - 2
        )
        note = f"{panel.note}; {EMULATED}" if emulated and panel.curves[0].metric == "throughput" else panel.note
        headings.append(_heading(panel.title, note, across[0], top))
        shapes += _bands(panel, index, floors.get(index))
        shapes += _lines(marks, index)
    return result | {"annotations": headings, "shapes": shapes}


def _axes(
    panel: Panel, index: int, across: list[float], down: list[float], x: X, floor: Floor | None, last: bool
) -> dict[str, Any]:
    common = {"visible": True, "gridcolor": theme.GRID, "zeroline": False, "tickfont": {"size": theme.SMALL}}
    name = axis(index)
    xaxis: dict[str, Any] = common | {
        "domain": across,
        "anchor": f"y{name}",
        "rangemode": "tozero",
        "nticks": 6,
        "title": {"text": X_TITLES[x] if last else "", "standoff": 4, "font": {"size": theme.SIZE}},
    }
    if index:
        xaxis["matches"] = "x"  # zoomed together
    yaxis = common | {
        "domain": down,
        "anchor": f"x{name}",
        "type": "log" if floor else "linear",
        "exponentformat": "power" if floor else "SI",
        # plotly writes powers a quarter larger than other ticks.
        "tickfont": {"size": theme.SMALL * 0.8 if floor else theme.SMALL},
        "tickmode": "linear" if floor else "auto",
        "dtick": floor.decades_a_tick if floor else None,
        "nticks": 5,
        "autorangeoptions": {"include": list(panel.include), "clipmax": panel.top},
    }
    axes = {f"xaxis{name}": xaxis, f"yaxis{name}": yaxis}
    if any(curve.right for curve in panel.curves):
        axes[f"yaxis{axis(index, right=True)}"] = common | {
            "anchor": f"x{name}",
            "overlaying": f"y{name}",
            "side": "right",
            "showgrid": False,
            "tickmode": "auto",
            "nticks": 5,
            "autorangeoptions": {"include": [0.0]},
        }
    return axes


def _heading(title: str, note: str, x: float, top: float) -> dict[str, Any]:
    return {
        "text": f"<b>{title}</b><br><span style='font-size:{theme.SMALL}px'>{note}</span>",
        **{"x": x, "xref": "paper", "xanchor": "left", "y": top, "yref": "paper", "yanchor": "bottom", "yshift": 2},
        **{"align": "left", "showarrow": False, "font": {"size": theme.SIZE}},
    }


def _bands(panel: Panel, index: int, floor: Floor | None) -> list[dict[str, Any]]:
    areas = []
    if panel.healthy:
        low, high = panel.healthy
        if floor:  # zero is off a logarithmic axis
            low = floor.at / 3 if floor.zero else floor.lowest
        areas.append((low, panel.watch or high, theme.HEALTHY, ""))
        if panel.watch:
            areas.append((panel.watch, high, theme.WATCH, ""))
    if floor and floor.zero:
        areas.append((floor.at / 2, floor.at * 2, theme.GRID, "exact (0)"))
    return [
        {
            **{"type": "rect", "xref": f"x{axis(index)} domain", "x0": 0, "x1": 1},
            **{"yref": f"y{axis(index)}", "y0": low, "y1": high, "fillcolor": fill, "line": {"width": 0}},
            "layer": "below",
            "label": {"text": text, "textposition": "top left", "yanchor": "bottom", "font": {"size": theme.SMALL}},
        }
        for low, high, fill, text in areas
    ]


def _lines(marks: Sequence[tuple[Mark, str]], index: int) -> list[dict[str, Any]]:
    """A dashed line a mark; the label only where it doesn't write over the one before."""
    span = max((mark.x for mark, _ in marks), default=0.0)
    shapes: list[dict[str, Any]] = []
    labelled = 0.0
    for mark, colour in sorted(marks, key=lambda pair: pair[0].x):
        free = mark.x - labelled > _NARROW * span or not shapes
        labelled = mark.x if free else labelled
        shapes.append(
            {
                **{"type": "line", "xref": f"x{axis(index)}", "x0": mark.x, "x1": mark.x},
                **{"yref": f"y{axis(index)} domain", "y0": 0, "y1": 1},
                "line": {"color": colour, "dash": "dash", "width": 1.5},
                "label": {
                    "text": mark.label if free else "",
                    **{"textposition": "end", "textangle": -90, "xanchor": "right", "yanchor": "top"},
                    "font": {"size": theme.SMALL},
                },
            }
        )
    return shapes
