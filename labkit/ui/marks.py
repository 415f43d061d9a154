"""Marks: where a run's recipe changed, and where it left its parent, as dashed lines across the curves.

marks     those of one run              marks_of   those of the runs that are drawn
labels    what is written beside each: one that stands too near to the labelled one before is counted there
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from labkit.config.words import said, said_changes
from labkit.runs.record import StepRecord
from labkit.ui.series import History, SwitchMark, X

NEAR = 0.08  # of the x axis: a line of text beside a mark, where a panel is narrowest
_LONGEST = 20  # characters that fit down a panel


@dataclass(frozen=True)
class Mark:
    x: float
    label: str  # short, for the line in the figure
    more: int  # settings that changed with the one of the label
    text: str  # all of them, in full


class Marked(Protocol):
    """What is needed of a run. `parent` is (id, step) of the run that this one was forked from."""

    @property
    def id(self) -> str: ...
    @property
    def records(self) -> Sequence[StepRecord]: ...
    @property
    def switches(self) -> Sequence[SwitchMark]: ...
    @property
    def parent(self) -> tuple[str, int] | None: ...


Run = TypeVar("Run", bound=Marked)


def marks(
    records: Sequence[StepRecord],
    switches: Sequence[SwitchMark],
    x: X = "step",
    parent: tuple[str, int] | None = None,
) -> list[Mark]:
    """A mark for each switch, and one where the run left its parent."""
    wanted = [(s.step, _label(s.changes), max(0, len(s.changes) - 1), _text(s.changes)) for s in switches]
    if parent:
        wanted.append((parent[1], "fork", 0, f"fork of {parent[0]}"))
    if not wanted or not records:
        return []
    history = History()
    steps, xs = history.positions(records, "step"), history.positions(records, x)
    # The step of a switch may be still to come: the mark then stands at the last step there is.
    return [
        Mark(float(xs[min(int(np.searchsorted(steps, step)), len(xs) - 1)]), label, more, f"step {step}: {text}")
        for step, label, more, text in sorted(wanted)
    ]


def marks_of(runs: Sequence[Run], x: X) -> list[tuple[Run, Mark]]:
    """The marks of the lines that are drawn: a fork beside its parent has only its own."""
    shown = {run.id for run in runs}
    found = []
    for run in runs:
        start = run.parent[1] if run.parent and run.parent[0] in shown else -1
        own = [switch for switch in run.switches if switch.step > start]
        found += [(run, mark) for mark in marks(run.records, own, x, run.parent)]
    return found


def labelled(found: Sequence[tuple[Run, Mark]], extent: float) -> list[tuple[Run, Mark, str]]:
    """The marks in order of x, on an axis from 0 to `extent`, each with what is written beside it.

    Nothing is where it would lie on the label before; that one then says how many settings more it stands for.
    """
    ordered = sorted(found, key=lambda pair: pair[1].x)
    texts = [""] * len(ordered)
    first, more = 0, 0  # of the marks that share a label: the index, and what they changed beside its label
    for index, (_, mark) in enumerate(ordered):
        if index and mark.x <= ordered[first][1].x + NEAR * extent:
            more += 1 + mark.more
        else:
            first, more = index, mark.more
        texts[first] = _shortened(ordered[first][1].label, f" +{more}" if more else "")
    return [(run, mark, text) for (run, mark), text in zip(ordered, texts, strict=True)]


def _shortened(label: str, end: str) -> str:
    room = _LONGEST - len(end)
    return (label if len(label) <= room else label[: room - 1] + "…") + end


def _label(changes: Mapping[str, Sequence[Any]]) -> str:
    return next((f"{path.split('.')[-1]} {said(after)}" for path, (_, after) in changes.items()), "recipe")


def _text(changes: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(said_changes(changes))
