"""One run as the panel sees it: what is new in its directory, read where the last look ended.

`Watched` belongs to a Session, which calls it under its lock. `view` is a snapshot that any thread may keep: the same
object until something changed.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import Experiment, Recipe
from labkit.runs.alarms import Alarm, alarms_in_force
from labkit.runs.jsonl import complete_lines, load_object
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.state import RunState
from labkit.runs.store import Switch
from labkit.ui import theme

_ALARMS_EVERY = 2.0  # seconds: rules read the whole run, and nobody acts on an alarm faster


@dataclass(frozen=True, eq=False)
class View:
    """What charts, tabs and chips need of a run."""

    run: Run
    slot: int  # which colour and dash
    label: str
    visible: bool
    status: RunState
    records: tuple[StepRecord, ...]
    switches: tuple[Switch, ...]
    alarms: tuple[Alarm, ...]
    checkpoints: tuple[int, ...]
    parent: tuple[str, int] | None

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def experiment(self) -> Experiment:
        return self.run.experiment

    @property
    def recipe(self) -> Recipe:
        """The Recipe in force."""
        return self.switches[-1].recipe if self.switches else self.experiment.recipe

    @property
    def colour(self) -> str:
        return theme.style(self.slot)[0]

    @property
    def dash(self) -> str:
        return theme.style(self.slot)[1]

    @property
    def step(self) -> int:
        """The last completed step; 0 before there is one."""
        return self.records[-1].step if self.records else 0


class Watched:
    def __init__(self, run: Run, slot: int, label: str) -> None:
        self.run, self.slot, self.label = run, slot, label
        self.visible = True
        self.guest = False  # started elsewhere
        self._parent = run.parent
        self._records: list[StepRecord] = []
        self._switches: list[Switch] = []
        self._alarms: tuple[Alarm, ...] = ()
        self._checkpoints: tuple[int, ...] = ()
        self._offset = 0
        self._judged = (0.0, 0)  # when the alarms were looked at, and at how many records
        self._known: tuple[Any, ...] = ()
        self.view = self._snapshot(run.status)
        self.read()

    @property
    def deleted(self) -> bool:
        """Whether the directory is gone, or what makes it a run is: deleting takes a while."""
        return not all((self.run.path / name).is_file() for name in ("experiment.yaml", "state.json"))

    def read(self) -> list[Mapping[str, Any]]:
        """Bring `view` up to date. Returns the events that are new."""
        status = self.run.status  # first: a run that has ended writes nothing after it
        for record in self.run.tail():
            while self._records and self._records[-1].step >= record.step:  # done again from a checkpoint
                self._records.pop()
            self._records.append(record)
        events = self._events()
        self._judge(status)
        known: tuple[Any, ...] = (
            status.name,
            status.reason,
            len(self._records),
            id(self._records[-1]) if self._records else 0,
        )
        known += (len(self._switches), self._checkpoints, self._alarms, self.visible)
        if known != self._known:
            self._known = known
            self.view = self._snapshot(status)
        return events

    def _snapshot(self, status: RunState) -> View:
        return View(
            self.run,
            self.slot,
            self.label,
            self.visible,
            status,
            tuple(self._records),
            tuple(self._switches),
            self._alarms,
            self._checkpoints,
            self._parent,
        )

    def _events(self) -> list[Mapping[str, Any]]:
        path = self.run.path / "events.jsonl"
        if not path.exists() or path.stat().st_size <= self._offset:
            return []
        events: list[Mapping[str, Any]] = []
        for end, line in complete_lines(path, self._offset):
            events.append(load_object(line))
            self._offset = end
        if any(event["event"] == "switched" for event in events):
            self._switches = [switch for switch in self.run.switches() if switch.changes]
        if any(event["event"] == "checkpoint" for event in events):
            self._checkpoints = tuple(self.run.checkpoints())
        return events

    def _judge(self, status: RunState) -> None:
        when, count = self._judged
        if len(self._records) == count or (status.active and time.monotonic() - when < _ALARMS_EVERY):
            return
        self._judged = (time.monotonic(), len(self._records))
        self._alarms = tuple(alarms_in_force(self._records, self.run.experiment, self._switches))
