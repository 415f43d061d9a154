"""Compare: the settings in which the open runs differ, and what came of them. Equal settings are left out."""

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from labkit.runs.compare import compare
from labkit.ui.tabs.page import esc, note, page, table
from labkit.ui.tabs.view import OpenRun, Recorded, name_of, put, state_of


class Compare:
    title = "Compare"

    def __init__(self) -> None:
        self.body = widgets.HTML()
        self.widget = widgets.VBox([self.body])
        self._shown: object = None

    def update(self, views: Sequence[OpenRun], selected: OpenRun | None) -> None:
        shown = [view for view in views if view.visible]
        state = [state_of(view) for view in shown]
        if state != self._shown:
            self._shown = state
            put(self.body, _content(shown))


def _content(views: Sequence[OpenRun]) -> str:
    if not views:
        return page(note("No run is shown: show one with its chip."))
    comparison = compare([Recorded.of(view) for view in views])
    rows = [(esc(name), [esc(cell) for cell in cells]) for name, cells in comparison.rows()]
    differing = len(comparison.settings)
    settings = [row for row in rows[:differing] if not row[0].startswith("recipe.correction.")]
    results = rows[differing:]
    if len(settings) < differing:  # a correction says in one line what it is
        settings.append(
            ("recipe.correction", [esc(v.experiment.recipe.correction.short_str()) or "none" for v in views])
        )
    if any(view.switches or view.parent for view in views):
        settings.append(("changed on the way", [_changes(view) for view in views]))
    head = ["", *map(name_of, views)]
    parts = []
    if settings:
        parts.append(table(head, [[name, *cells] for name, cells in settings], caption="Settings that differ"))
    elif len(views) > 1:
        parts.append(note("These runs have the same settings."))
    parts.append(table(head, [[name, *cells] for name, cells in results], caption="What came of them"))
    return page(*parts)


def _changes(view: OpenRun) -> str:
    lines = [f"fork of {view.parent[0]} after step {view.parent[1]}"] if view.parent else []
    for switch in view.switches:
        changes = [f"{key} {_said(old)} → {_said(new)}" for key, (old, new) in switch.changes.items()]
        lines += [f"step {switch.step}: {changes[0]}", *changes[1:]] if changes else []
    return "<br>".join(map(esc, lines)) or "–"


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value)) or "none"
    return "–" if value is None or value == "" else str(value)
