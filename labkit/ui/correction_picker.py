"""Picks one of the named corrections: the project first, then its own names, then the bounds.

Choosing a project only lists its corrections; nothing changes until a name is chosen, so that looking around while
a run is going on switches nothing. A correction composed by hand is shown as it is and stays until a name is chosen.
"yours" takes a weight of the user's (labkit.config.own): one that a package has installed, or one that is typed.
"""

from collections.abc import Callable
from typing import Any

from labkit.config import CORRECTIONS, Correction, own
from labkit.config.correction import CUSTOM
from labkit.ui.fields import HintLine, choice, html_box, note, number, row, text

METHODS, YOURS = "methods", "yours"
PROJECTS = {
    "nemo-rl": "NeMo RL", "verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF", "skyrl": "SkyRL",
    "prime-rl": "prime-rl", "areal": "AReaL", "slime": "slime",
}  # fmt: skip
BOUNDS = ("floor", "cap", "low", "high")
_UNDECIDED = ""


def project_of(name: str) -> str:
    project, slash, _ = name.partition("/")
    return project if slash else METHODS


class CorrectionPicker:
    def __init__(self, hint: HintLine, change: Callable[[dict[str, Any]], None]) -> None:
        """`change` is told what the user changed, as overrides of a Recipe."""
        self._hint, self._change = hint, change
        self._correction = Correction()
        self._showing = False
        projects = [(METHODS, METHODS), *((PROJECTS[p], p) for p in PROJECTS), (YOURS, YOURS)]
        self._project = choice("project", projects, "100%")
        self._name = choice("name", [_UNDECIDED], "100%")
        self._weight = text("weight", own.installed("correction"), "100%")
        self._weight.placeholder = "path/to/mine.py:my_weight"
        self._text = html_box(height="44px")
        self._text.add_class("lk-lines")
        self.bounds = {bound: number(bound, label_width="38px", width="98px") for bound in BOUNDS}
        for key, widget in {
            "project": self._project,
            "name": self._name,
            "weight": self._weight,
            **self.bounds,
        }.items():
            hint.follow(f"correction.{key}", widget)
        self._project.observe(lambda change: self._list(), "value")
        self._name.observe(lambda change: self._choose(change["new"]), "value")
        self._weight.observe(lambda change: self._type(change["new"]), "value")
        for bound, field in self.bounds.items():
            field.observe(lambda change, key=bound: self._bound(key, change["new"]), "value")
        self._bounds_row = row()
        self._name_row = row(self._name)
        self.rows = [row(self._project), self._name_row, self._bounds_row, self._text]

    def show(self, correction: Correction) -> None:
        self._correction = correction
        self._showing = True
        owned = own.KINDS["correction"].owns(correction.weight)
        self._project.value = YOURS if owned else project_of(correction.name)
        self._showing = False
        self._list()

    def _list(self) -> None:
        """The names of the project shown, and what is in force."""
        if self._showing:
            return
        self._showing = True
        now, project = self._correction, self._project.value
        self._weight.value = now.weight if own.KINDS["correction"].owns(now.weight) else ""
        asked = (self._weight if project == YOURS else self._name,)
        if asked != self._name_row.children:
            self._name_row.children = asked
        names = [name for name in CORRECTIONS if project_of(name) == project]
        if now.name not in names:
            names = [_UNDECIDED, *names]
        options = [(name.rpartition("/")[2] if name else f"choose …  (now {_in_force(now)})", name) for name in names]
        if tuple(options) != tuple(self._name.options):
            self._name.options = options
        self._name.value = now.name if now.name in names else _UNDECIDED
        for bound, value in now.bounds.items():
            self.bounds[bound].value = value
        shown = tuple(self.bounds[bound] for bound in now.bounds)
        if shown != self._bounds_row.children:
            self._bounds_row.children = shown
        text = CORRECTIONS[now.name].text if now.name != CUSTOM else f"composed by hand: {now.short_str()}"
        self._text.value = note(text)
        self._showing = False

    def _choose(self, name: str) -> None:
        if not self._showing and name != _UNDECIDED:
            known = CORRECTIONS[name]
            self._hint.say("correction.name", f"{known.text}{f' ({known.source})' if known.source else ''}. "
                           "Watch ESS, effective batch and held-out accuracy.")  # fmt: skip
            self._hint.key = "correction.name"
            self._change({"correction.name": name})

    def _type(self, reference: str) -> None:
        if not self._showing and reference.strip():
            self._hint.key = "correction.weight"
            self._change({"correction": reference.strip()})

    def _bound(self, bound: str, value: float) -> None:
        if not self._showing:
            self._hint.key = f"correction.{bound}"
            self._change({f"correction.{bound}": value})


def _in_force(correction: Correction) -> str:
    return correction.short_str() or correction.name
