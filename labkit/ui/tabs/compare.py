"""Compare: the settings in which the open runs differ, and what came of them. Equal settings are left out."""

from collections.abc import Sequence

from labkit.config.words import said_changes
from labkit.runs.compare import compare
from labkit.ui.tabs.page import esc, note, page, table
from labkit.ui.tabs.view import OpenRun, Recorded, TextTab, name_of, state_of


class Compare(TextTab):
    title = "Compare"

    def state(self, views: Sequence[OpenRun], selected: OpenRun | None) -> object:
        return [state_of(view) for view in views if view.visible]

    def content(self, views: Sequence[OpenRun], selected: OpenRun | None) -> str:
        return _content([view for view in views if view.visible])


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
        changes = said_changes(switch.changes)
        lines += [f"step {switch.step}: {changes[0]}", *changes[1:]] if changes else []
    return "<br>".join(map(esc, lines)) or "–"
