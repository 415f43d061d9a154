"""Charts: the live curves of several runs. One FigureWidget with six panels; below it its controls and what it says.

`update(views)` is called by the one painter thread. It reads the controls, computes the lines of runs that changed, and
sends only what differs from what the page has: numpy arrays in one batch. Controls have no callbacks, so a click does
nothing on the thread it arrives on. A later update never undoes a zoom by hand.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go

from labkit.runs.compare import is_emulated
from labkit.runs.metrics import METRICS
from labkit.ui import modelled
from labkit.ui.latest import below
from labkit.ui.layout import anchors, layout
from labkit.ui.marks import NEAR, labelled, marks_of
from labkit.ui.panels import SIX, THROUGHPUT, Floor, Panel, extra
from labkit.ui.traces import Curves, Key, Line, RunView, Settings, floors

__all__ = ["Charts", "LiveFigure", "RunView"]

_NONE = ""  # of the pickers
_IN_SIX = {curve.metric for panel in SIX for curve in panel.curves}


class LiveFigure(go.FigureWidget):
    """A FigureWidget that a refreshed page gets back with all its points.

    plotly reports the figure as it was made; later changes go out as messages, which a page that loads anew has missed.
    `changing()` keeps the state from being read while it is half changed.

    It is made known to the page when it is complete. plotly does so before there are data, which follow as a message; a
    busy page draws the empty figure first, and a drawn one takes no notice of data.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._change_lock = threading.RLock()
        self._complete = False
        super().__init__(*args, **kwargs)
        self._config = {"displaylogo": False, "responsive": True, "toImageButtonOptions": {"format": "svg"}}
        self._complete = True
        self.open()

    def open(self) -> None:
        if self._complete:
            super().open()

    def changing(self) -> AbstractContextManager[Any]:
        return self._change_lock

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        with self._change_lock:
            if key is None and hasattr(self, "_data"):
                self._trait_values["_widget_data"] = deepcopy(self._data)
                self._trait_values["_widget_layout"] = deepcopy(self._layout_obj._props)
            return super().get_state(key, drop_defaults)


class Charts:
    """`figure` and `below` are what to display, the curves where the eye is."""

    def __init__(self) -> None:
        style = {"description_width": "auto"}
        self.x = ipywidgets.Dropdown(
            options=[("steps", "step"), ("generated tokens", "tokens"), ("time", "time")],
            description="Over",
            layout={"width": "185px"},
            style=style,
        )
        self.log = ipywidgets.Checkbox(value=True, description="log mismatch", indent=False, layout={"width": "125px"})
        self.smoothing = ipywidgets.FloatSlider(
            value=0.6, max=0.98, step=0.02, description="Smoothing", layout={"width": "250px"}, style=style
        )
        self.seeds = ipywidgets.Checkbox(
            value=False, description="mean ± std over seeds", indent=False, layout={"width": "190px"}
        )
        self.speed = ipywidgets.Dropdown(
            options=[("measured here", _NONE), *modelled.choices()],
            description="Throughput",
            layout={"width": "330px"},
            style=style,
        )
        self.more = tuple(
            ipywidgets.Dropdown(options=_choices([]), description=name, layout={"width": "250px"}, style=style)
            for name in ("More metrics", "and")
        )
        self.figure = LiveFigure(data=anchors(), layout=layout(SIX, "step", floors(SIX, {})))
        self.latest = ipywidgets.HTML()
        controls = ipywidgets.Box(
            [self.x, self.log, self.smoothing, self.seeds, self.speed, *self.more],
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="center"),
        )
        self.below = ipywidgets.VBox([controls, self.latest])
        self._curves = Curves()
        self._shown: dict[str, bool] = {}
        self._pinned: str | None = None
        self._sent: dict[Key, tuple[Line, float | None]] = {}
        self._traces: dict[Key, Any] = {}
        self._spare: list[Any] = []
        self._layout: dict[str, Any] = {}
        self._axes: tuple[str, bool] = ("step", True)

    def set_visible(self, run_id: str, visible: bool) -> None:
        """Show or hide a run from the next update on, whatever its view says."""
        self._shown[run_id] = visible

    def pin(self, run_id: str | None) -> None:
        """The baseline: drawn wider, and never hidden. None: no baseline."""
        self._pinned = run_id

    def update(self, views: Sequence[RunView]) -> None:
        """Bring the page up to date with these runs and with the controls."""
        self._offer_found_metrics(views)
        settings, panels = self._settings(), self._panels()
        visible = self._visible(views)
        lines = self._curves.lines(visible, panels, settings)
        ends = floors(panels, lines) if settings.log else {}
        with self.figure.changing():
            with self.figure.batch_update():
                self._set_layout(_layout(visible, panels, settings, ends, lines), settings)
                self._set_lines(lines, ends)
            self._add({key: line for key, line in lines.items() if key not in self._traces}, ends)
        text = below(visible, settings)
        if text != self.latest.value:
            self.latest.value = text

    def to_html(self, path: str | Path, views: Sequence[RunView]) -> Path:
        """A page of the figure as it is set now, with every point. plotly.js is in it: it opens without a network."""
        settings, panels, visible = self._settings(), self._panels(), self._visible(views)
        lines = Curves(limit=None).lines(visible, panels, settings)
        ends = floors(panels, lines) if settings.log else {}
        figure = go.Figure(
            data=[line.trace(_state(line, ends)[1]) for line in lines.values()],
            layout=_layout(visible, panels, settings, ends, lines),
        )
        plot = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True, "displaylogo": False})
        path = Path(path)
        path.write_text(_PAGE.format(plot=plot, below=below(visible, settings)), encoding="utf-8")
        return path

    def _settings(self) -> Settings:
        smoothing = round(self.smoothing.value, 2)
        return Settings(
            self.x.value, self.log.value, smoothing, self.seeds.value, self._pinned, device=self.speed.value
        )

    def _panels(self) -> list[Panel]:
        device = self.speed.value
        six = [modelled.panel(device) if device and panel is THROUGHPUT else panel for panel in SIX]
        return [*six, *(extra(picker.value) for picker in self.more if picker.value != _NONE)]

    def _visible(self, views: Sequence[RunView]) -> list[RunView]:
        return [view for view in views if view.id == self._pinned or self._shown.get(view.id, view.visible)]

    def _offer_found_metrics(self, views: Sequence[RunView]) -> None:
        """Names that carry a filter's key are known only once a record has them."""
        found = {name for view in views if view.records for name in view.records[-1].metrics} - METRICS.keys()
        offered = {name for _, name in self.more[0].options}
        if not found <= offered:
            for picker in self.more:
                chosen = picker.value
                picker.options = _choices(sorted(found | (offered - METRICS.keys() - {_NONE})))
                picker.value = chosen

    def _set_layout(self, wanted: dict[str, Any], settings: Settings) -> None:
        for name, value in wanted.items():
            if self._layout.get(name) == value:
                continue
            if isinstance(value, dict):
                self.figure.update_layout({name: value})
            else:
                self.figure.layout[name] = value
        if self._axes != (settings.x, settings.log):  # a range in the old unit says nothing in the new one
            self._axes = (settings.x, settings.log)
            for name in (name for name in wanted if name[1:].startswith("axis")):
                self.figure.layout[name].autorange = True
        self._layout = wanted

    def _set_lines(self, lines: dict[Key, Line], ends: dict[int, Floor]) -> None:
        """Traces are never deleted, which pages get wrong: one that is no longer needed waits for another line."""
        self._sent = {key: state for key, state in self._sent.items() if key in lines}
        freed = [self._traces.pop(key) for key in self._traces.keys() - lines.keys()]
        free = self._spare + freed
        for key, line in lines.items():
            state = _state(line, ends)
            if key not in self._traces and free:
                self._traces[key] = free.pop()
                self._traces[key].update(line.trace(state[1]))
            elif key in self._traces and self._sent[key] != state:
                _change(self._traces[key], self._sent[key][0], line, state[1])
            self._sent[key] = state
        for trace in free[len(self._spare) :]:
            trace.update(visible=False, showlegend=False, x=(), y=())
        self._spare = free

    def _add(self, lines: dict[Key, Line], ends: dict[int, Floor]) -> None:
        if lines:
            self.figure.add_traces([line.trace(self._sent[key][1]) for key, line in lines.items()])
            self._traces |= zip(lines, self.figure.data[-len(lines) :], strict=True)


def _state(line: Line, ends: dict[int, Floor]) -> tuple[Line, float | None]:
    """The line and where its zeros are drawn, if it is on a logarithmic axis and has any."""
    floor = ends.get(line.panel)
    return line, floor.at if floor and bool(np.any(line.y < floor.at)) else None


def _change(trace: Any, before: Line, line: Line, floor: float | None) -> None:
    wanted = line.trace(floor)
    if (line.name, line.style) != (before.name, before.style):
        trace.update(wanted)
    else:  # the common case, without a walk through all that stayed
        trace.x, trace.y = wanted["x"], wanted["y"]


def _choices(found: Sequence[str]) -> list[tuple[str, str]]:
    names = [name for name in [*METRICS, *found] if name not in _IN_SIX]
    return [("none", _NONE), *((name.replace("_", " "), name) for name in names)]


def _layout(
    views: Sequence[RunView],
    panels: Sequence[Panel],
    settings: Settings,
    ends: dict[int, Floor],
    lines: dict[Key, Line],
) -> dict[str, Any]:
    extent = float(np.nanmax(np.concatenate([*(line.x for line in lines.values()), [0.0]])))
    marks = [(mark, text, view.colour) for view, mark, text in labelled(marks_of(views, settings.x), extent)]
    reach = max((mark.x + NEAR * extent for mark, _, _ in marks), default=0.0)  # the newest label has room as well
    emulated = any(is_emulated(view.records[-1:]) for view in views)
    return layout(panels, settings.x, ends, marks, reach if reach > extent else 0.0, emulated)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>labkit curves</title></head>
<body style="font-family: system-ui, sans-serif; max-width: 1400px; margin: 1.5rem auto; padding: 0 1rem">
{plot}
{below}
</body></html>
"""
