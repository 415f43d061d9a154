"""Alarms: what in the records of the runs says that something is broken, why, and what to do. The worst come first."""

from collections.abc import Sequence

from labkit.runs.alarms import RULES, Alarm
from labkit.ui import theme
from labkit.ui.tabs.page import esc, note, page
from labkit.ui.tabs.view import OpenRun, TextTab, name_of, state_of

_LOOK = {
    "critical": ("✖", f"6px solid {theme.COLOURS[1]}"),
    "warning": ("⚠", f"4px dashed {theme.COLOURS[4]}"),
}


class Alarms(TextTab):
    title = "Alarms"

    def state(self, views: Sequence[OpenRun], selected: OpenRun | None) -> object:
        return [(state_of(view), tuple(view.alarms)) for view in views], state_of(selected)

    def content(self, views: Sequence[OpenRun], selected: OpenRun | None) -> str:
        first = selected.id if selected else ""
        ordered = sorted(views, key=lambda view: view.id != first)
        return page(*map(_run, ordered)) if views else page(note("No run is open."))


def _run(view: OpenRun) -> str:
    steps = max((record.step for record in view.records), default=0)
    if view.alarms:
        return f"<h4>{name_of(view)}: {_count(view.alarms)}</h4>{''.join(map(_card, view.alarms))}"
    what = f"no alarm; {len(RULES)} rules looked at {steps} steps" if steps else "nothing to look at yet"
    return f"<h4>{name_of(view)}: <span class='lk-soft'>{what}</span></h4>"


def _count(alarms: Sequence[Alarm]) -> str:
    kinds = [alarm.severity for alarm in alarms]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _card(alarm: Alarm) -> str:
    sign, border = _LOOK[alarm.severity]
    steps = f"step {alarm.step}" if alarm.step == alarm.last_step else f"steps {alarm.step} to {alarm.last_step}"
    lines = "".join(f"<div><b>{name}:</b> {esc(text)}</div>" for name, text in _parts(alarm))
    return (
        f"<div style='border-left: {border}; padding: 1px 0 2px 10px; margin: 4px 0 9px; max-width: 100ch'>"
        f"<div><b>{sign} {alarm.severity}: {esc(alarm.name)}</b> <span class='lk-soft'>{steps}</span></div>"
        f"{lines}</div>"
    )


def _parts(alarm: Alarm) -> list[tuple[str, str]]:
    return [("seen", alarm.what), ("cause", alarm.cause), ("cure", alarm.cure)]
