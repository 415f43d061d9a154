"""SweepGrid: a sweep in a notebook, arms by seeds, as it goes on.

    sweep = labkit.sweep(...)
    sweep.start()               # in a process of its own
    labkit.SweepGrid(sweep)

The cell returns at once. One thread looks into the run directories once a second and sends the table when something
changed; it only ever writes to two HTML widgets. Shown again after a reload or a restart of the kernel, a grid
continues with what is there.
"""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from labkit.runs.record import StepRecord
from labkit.sweeps.drive import Standing, standing_of
from labkit.sweeps.plan import Cell
from labkit.sweeps.sweep import Sweep, open_sweep
from labkit.ui import theme
from labkit.ui.tabs.page import esc, note, number, page, table
from labkit.ui.watched import View, Watched

_TICK = 1.0  # seconds between two looks
_MARKS: dict[Standing, str] = {"missing": "○", "running": "▶", "unfinished": "‖", "done": "✓", "failed": "✗"}
_WIDTH, _HEIGHT = 72, 20  # pixels of a sparkline

_current: "SweepGrid | None" = None


class SweepGrid:
    """`sweep`: a Sweep, or its name or folder. The grid before in this kernel is closed."""

    def __init__(self, sweep: Sweep | str | Path) -> None:
        global _current
        self.sweep = sweep if isinstance(sweep, Sweep) else open_sweep(sweep)
        self._watched: dict[str, Watched] = {}
        self._standings: dict[str, Standing] = {}
        self._closed = threading.Event()
        self._drawing = threading.Lock()
        self.status, self.body = widgets.HTML(), widgets.HTML()
        self.widget = widgets.VBox([self.status, self.body], layout={"width": "100%"})
        self.widget.add_class("lk-panel")
        before, _current = _current, self
        if before is not None:
            before.close()
        self.update()
        threading.Thread(target=self._paint, daemon=True, name="labkit-sweep-grid").start()

    def close(self) -> None:
        """End the thread and the widgets. The sweep goes on."""
        self._closed.set()
        with self._drawing:
            self.body.close()
            self.status.value = page(note("This grid is closed; the newest cell with one goes on."))

    def update(self) -> None:
        """Look now, as the thread does."""
        with self._drawing:
            if self._closed.is_set():
                return
            views = {cell.id: self._look(cell) for cell in self.sweep.cells}
            for part, content in ((self.status, self._status()), (self.body, self._table(views))):
                if part.value != content:
                    part.value = content

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)

    def _paint(self) -> None:
        while not self._closed.wait(_TICK):
            try:
                self.update()
            except Exception as error:  # a folder may be mended, or removed; the thread must go on
                self.status.value = page(note(esc(f"could not be read: {type(error).__name__}: {error}")))

    def _look(self, cell: Cell) -> View | None:
        """What is known of a cell; one that had ended is read again only when its state changed."""
        watched = self._watched.get(cell.id)
        if watched is None:
            run = self.sweep.run_of(cell)
            self._standings[cell.id] = standing_of(run)
            if run is None:
                return None
            watched = self._watched[cell.id] = Watched(run, 0, cell.id)
            return watched.view
        if watched.deleted:
            del self._watched[cell.id]
            self._standings[cell.id] = "missing"
            return None
        self._standings[cell.id] = standing_of(watched.run)
        if self._standings[cell.id] == "running" or watched.view.status.active:
            watched.read()
        return watched.view

    def _status(self) -> str:
        standings = list(self._standings.values())
        said = [f"{standings.count('done')} of {len(standings)} cells done"]
        said += [f"{count} {name}" for name in ("running", "unfinished", "failed") if (count := standings.count(name))]
        driver = self.sweep.driver
        said.append(f"driven by process {driver}" if driver else "nobody drives it: sweep.start() goes on")
        if standings.count("done") == len(standings):
            said[-1] = "results: sweep.results().table()"
        question = f"<b>{esc(self.sweep.plan.question or self.sweep.plan.name)}</b><br>"
        return page(f"<div role='status' aria-live='polite'>{question}{esc(' · '.join(said))}</div>")

    def _table(self, views: dict[str, View | None]) -> str:
        plan = self.sweep.plan
        arms: dict[str, list[str]] = {}
        ends: dict[str, list[float]] = {}
        for cell in self.sweep.cells:
            view, standing = views[cell.id], self._standings[cell.id]
            shown = arms.setdefault(cell.arm, [])
            shown.append(_cell(view, standing, cell.experiment.steps, list(arms).index(cell.arm)))
            if view and standing == "done":
                ends.setdefault(cell.arm, []).append(_last(view.records))
        rows = []
        for arm, cells in arms.items():
            name = esc(arm) + (" <span class='lk-soft'>(baseline)</span>" if arm == plan.baseline else "")
            done = [value for value in ends.get(arm, []) if math.isfinite(value)]
            rows.append([name, *cells, f"{number(sum(done) / len(done), '.3f')} (n = {len(done)})" if done else "–"])
        head = ["arm", *(f"seed {seed}" for seed in plan.seeds), "held-out, mean"]
        legend = "held-out accuracy, last and over the steps · " + " · ".join(f"{m} {s}" for s, m in _MARKS.items())
        return page(table(head, rows), note(esc(legend)))


def _cell(view: View | None, standing: Standing, steps: int, arm: int) -> str:
    mark = f"<span title='{standing}' aria-label='{standing}'>{_MARKS[standing]}</span>"
    if view is None:
        return mark
    value = number(_last(view.records), ".3f")
    if standing == "failed":
        return f"{mark} <span class='lk-soft'>{esc(view.status.reason[:60])}</span>"
    where = "" if standing == "done" else f"<br><span class='lk-soft'>step {view.step} of {steps}</span>"
    alarms = f" <span title='alarms'>⚠{len(view.alarms)}</span>" if view.alarms else ""
    return f"{mark} {value}{alarms}<br>{_sparkline(view.records, steps, arm)}{where}"


def _points(records: Sequence[StepRecord]) -> list[tuple[int, float]]:
    found = [
        (record.step, value) for record in records if (value := record.metrics.get("heldout_accuracy")) is not None
    ]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _last(records: Sequence[StepRecord]) -> float:
    points = _points(records)
    return points[-1][1] if points else math.nan


def _sparkline(records: Sequence[StepRecord], steps: int, arm: int) -> str:
    """Held-out accuracy from 0 to 1 over all the steps that the cell will have."""
    across = [
        f"{2 + step / steps * (_WIDTH - 4):.1f} {2 + (1 - value) * (_HEIGHT - 4):.1f}"
        for step, value in _points(records)
    ]
    colour, _ = theme.style(arm)
    path = f"M{' L'.join(across)}h.01" if across else ""
    pen = f"fill:none;stroke:{colour};stroke-width:2;stroke-linecap:round"
    return f"<svg width='{_WIDTH}' height='{_HEIGHT}' aria-hidden='true'><path d='{path}' style='{pen}'/></svg>"
