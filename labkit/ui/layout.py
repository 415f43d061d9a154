"""The panels as a plotly layout: axes, headings, healthy bands, the marks of switches; two panels a row.

It sets no axis ranges: plotly chooses them, so that a zoom by hand outlives the next update. A logarithmic axis has no
place for zero: exact agreement is drawn at the panel's floor, in a strip whose tick says "exact (0)".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.runs.compare import EMULATED
from labkit.ui import theme
from labkit.ui.marks import Mark
from labkit.ui.panels import SIX, Floor, Panel
from labkit.ui.series import X

_X_TITLES = {"step": "step", "tokens": "generated tokens", "time": "minutes"}
MOST = 8  # panels

# pixels
_PANEL, _GAP = 140, 66  # height of a panel, and from one to the next
_MARGIN = {"l": 58, "r": 50, "t": 70, "b": 46}
_LEGEND = 40  # from the panels of the first row up to the legend


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


def height(panels: int) -> int:
    """Pixels of a figure with so many panels."""
    rows = (panels + 1) // 2
    return rows * _PANEL + (rows - 1) * _GAP + _MARGIN["t"] + _MARGIN["b"]


def layout(
    panels: Sequence[Panel],
    x: X,
    floors: Mapping[int, Floor],
    marks: Sequence[tuple[Mark, str, str]] = (),
    reach: float = 0.0,
    emulated: bool = False,
) -> dict[str, Any]:
    """`floors` has the panels whose axis is logarithmic, `marks` the switches with their label and run's colour; the x
    axis goes to `reach` at least.
    """
    rows = (len(panels) + 1) // 2
    plot = rows * _PANEL + (rows - 1) * _GAP
    result: dict[str, Any] = {
        "height": height(len(panels)),
        "margin": _MARGIN,
        "autosize": True,
        "font": {"size": theme.SIZE, "color": theme.TEXT},
        "paper_bgcolor": theme.CLEAR,
        "plot_bgcolor": theme.CLEAR,
        "hovermode": "closest",
        "uirevision": "keep",
        # The chips show and hide runs, by keyboard too; a second way that they don't know of would disagree with them.
        "legend": {"orientation": "h", "x": 0, "y": 1 + _LEGEND / plot, "yanchor": "bottom", "itemclick": False}
        | {"itemdoubleclick": False, "traceorder": "normal", "itemwidth": 40},
    }
    for index in range(len(panels), MOST):  # a page can't be told of new axes and their settings at once: all are there
        result |= {f"{letter}axis{index + 1}": {"visible": False, "domain": [0.0, 0.01]} for letter in "xy"}
    headings: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    for index, panel in enumerate(panels):
        left, top = index % 2, 1 - (index // 2) * (_PANEL + _GAP) / plot
        across = [0.0, 0.435] if left == 0 else [0.565, 1.0]
        result |= _axes(
            panel, index, across, [max(0.0, top - _PANEL / plot), top], x, floors.get(index), index >= len(panels) - 2
        )
        result[f"xaxis{axis(index)}"]["autorangeoptions"] = {"include": [reach]}
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
        "title": {"text": _X_TITLES[x] if last else "", "standoff": 4, "font": {"size": theme.SIZE}},
    }
    if index:
        xaxis["matches"] = "x"  # zoomed together
    values, texts = floor.ticks if floor else (None, None)
    yaxis = common | {
        "domain": down,
        "anchor": f"x{name}",
        "type": "log" if floor else "linear",
        "exponentformat": "SI",
        "tickmode": "array" if floor else "auto",
        "tickvals": values,
        "ticktext": texts,
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
        areas.append((low, panel.watch or high, theme.HEALTHY))
        if panel.watch:
            areas.append((panel.watch, high, theme.WATCH))
    if floor and floor.zero:
        areas.append((floor.at / 2, floor.at * 2, theme.GRID))
    return [
        {
            **{"type": "rect", "xref": f"x{axis(index)} domain", "x0": 0, "x1": 1},
            **{"yref": f"y{axis(index)}", "y0": low, "y1": high, "fillcolor": fill, "line": {"width": 0}},
            "layer": "below",
        }
        for low, high, fill in areas
    ]


def _lines(marks: Sequence[tuple[Mark, str, str]], index: int) -> list[dict[str, Any]]:
    return [
        {
            **{"type": "line", "xref": f"x{axis(index)}", "x0": mark.x, "x1": mark.x},
            **{"yref": f"y{axis(index)} domain", "y0": 0, "y1": 1},
            "line": {"color": colour, "dash": "dash", "width": 1.5},
            "label": {
                "text": text,
                **{"textposition": "end", "textangle": -90, "xanchor": "right", "yanchor": "top"},
                "font": {"size": theme.SMALL},
            },
        }
        for mark, text, colour in marks
    ]
