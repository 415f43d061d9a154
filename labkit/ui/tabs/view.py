"""What the tabs need of a run, and how they hand it to code that wants a Run."""

import html
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ipywidgets

from labkit.config import Experiment, Recipe
from labkit.runs.alarms import Alarm
from labkit.runs.record import StepRecord
from labkit.runs.store import Switch
from labkit.ui.traces import RunView


class OpenRun(RunView, Protocol):
    """A run of the panel: what the curves need, where it lives and what is wrong with it."""

    @property
    def path(self) -> Path: ...
    @property
    def switches(self) -> Sequence[Switch]: ...
    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        ...

    @property
    def alarms(self) -> Sequence[Alarm]: ...


@dataclass(frozen=True)
class Recorded:
    """A view as `labkit.runs.compare` and the reports take it: with the records that the panel has already read."""

    id: str
    experiment: Experiment
    rows: Sequence[StepRecord]

    @classmethod
    def of(cls, view: RunView) -> "Recorded":
        return cls(view.id, view.experiment, list(view.records))

    def records(self, since: int = 0) -> list[StepRecord]:
        return [record for record in self.rows if record.step >= since]


_ROW = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"}


def state_of(view: RunView | None) -> tuple[Any, ...]:
    """Differs when there is something new to show of the run."""
    if view is None:
        return ()
    last = (view.records[-1].step, view.records[-1].time) if view.records else None
    return view.id, view.label, view.colour, len(view.records), last, len(view.switches)


def put(widget: ipywidgets.HTML, content: str) -> None:
    """Send only what differs: an equal text would still lose a selection made by hand."""
    if widget.value != content:
        widget.value = content


class TextTab(ABC):
    """A tab that is one page of HTML, made again when what it depends on differs."""

    def __init__(self) -> None:
        self.body = ipywidgets.HTML()
        self.widget = ipywidgets.VBox([self.body])
        self._shown: object = None

    def update(self, views: Sequence[OpenRun], selected: OpenRun | None) -> None:
        state = self.state(views, selected)
        if state != self._shown:
            self._shown = state
            put(self.body, self.content(views, selected))

    @abstractmethod
    def state(self, views: Sequence[OpenRun], selected: OpenRun | None) -> object:
        """What the page depends on, to be compared."""

    @abstractmethod
    def content(self, views: Sequence[OpenRun], selected: OpenRun | None) -> str:
        """The page."""


def name_of(view: RunView) -> str:
    """The run's label, escaped, with its colour beside it."""
    return f"<b style='color:{view.colour}' aria-hidden='true'>▬</b>&nbsp;{html.escape(view.label)}"


def tools(*controls: ipywidgets.Widget) -> ipywidgets.Box:
    """The controls of a tab, in a row that wraps."""
    return ipywidgets.Box(controls, layout=ipywidgets.Layout(**_ROW))
