"""Session: the runs that a panel shows, and the one that it drives. No widgets.

Every method may be called on any thread. A click calls one and is acknowledged at once: `state` then names what was
asked (pausing, stopping, …) until the worker's own state answers. `poll`, called by the painter, reads what is new.

    idle → starting → running ⇄ paused → stopping → done | stopped | failed

One run at a time is active. One that is started elsewhere under the same root, from the shell or another notebook, is
shown as a guest: it takes a place that is free or that another guest has left, and buttons and switches never act on it
before it is attached to. A Recipe that is changed while it is goes to the worker as a switch, one at a time: of
those that come before the answer, or during a pause, only the latest is kept, so that nothing queues up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from labkit.config import Experiment, Recipe
from labkit.config.words import said_changes
from labkit.runs.process import Run
from labkit.runs.store import RunError, list_directories, runs_root
from labkit.ui.folder import Folder
from labkit.ui.watched import View, Watched

MOST = 6  # runs that colours and dashes tell apart
_ASKED = {"pause": "pausing", "resume": "resuming", "stop": "stopping", "kill": "killing"}
_ANSWERS = {"pause": ("paused",), "resume": ("running",), "stop": ("stopping",), "kill": ()}


@dataclass(frozen=True)
class Answer:
    """What came of a switch."""

    accepted: bool
    text: str
    recipe: Recipe  # now in force


class Session:
    def __init__(self, root: str | Path | None = None) -> None:
        self.root = runs_root(root).absolute()
        self._lock = RLock()
        self._folder = Folder(self.root)
        self._open: list[Watched] = []  # oldest first
        self._active: Watched | None = None  # the run that is driven; it stays so when it has ended
        self._asked: str | None = None
        self._in_flight: Recipe | None = None
        self._wanted: Recipe | None = None

    # what is there

    def views(self) -> list[View]:
        with self._lock:
            return [watched.view for watched in self._open]

    @property
    def active(self) -> View | None:
        """The run that buttons and switches act on: the one that runs, or the one that ran last."""
        with self._lock:
            return self._active.view if self._active else None

    @property
    def busy(self) -> bool:
        """Whether a run of this session has a worker."""
        with self._lock:
            return self._active is not None and self._active.view.status.active

    @property
    def state(self) -> str:
        """A word of the state machine, or what was asked and is not answered yet."""
        with self._lock:
            if self._active is None:
                return "idle"
            return _ASKED[self._asked] if self._asked and self.busy else self._active.view.status.name

    @property
    def waiting(self) -> bool:
        """Whether the answer to a click is still to come."""
        with self._lock:
            return self._asked is not None or self.state in ("starting", "stopping")

    @property
    def pending(self) -> Recipe | None:
        """The Recipe that the run was asked to go on under, and has not answered yet."""
        with self._lock:
            return self._wanted or self._in_flight

    def show(self, run_id: str, visible: bool) -> None:
        with self._lock:
            self._find(run_id).visible = visible

    # attaching

    def attach(self, newest: int = MOST) -> list[View]:
        """Open the newest runs of the root, and every one that lives. Returns those that were not open."""
        with self._lock:
            self._folder.see()
            known = {watched.run.id for watched in self._open}
            found = [found for found in list_directories(self.root) if found.id not in known]
            chosen = [each for i, each in enumerate(found) if i < newest or each.read_state().active]
            opened = []
            for directory in reversed(chosen):
                try:
                    watched = self._add(Run(directory))
                except (ValueError, OSError):  # one that can't be read must not hide the others
                    continue
                opened.append(watched.view)
                if watched.view.status.active or not self.busy:
                    self._active = watched
            for watched in reversed(self._open):
                watched.guest = False
                if watched.view.status.active and not self.busy:
                    self._active = watched
            return opened

    def notice(self) -> list[View]:
        """Show the runs that were started elsewhere since the last look, if there is a place. Returns them."""
        with self._lock:
            shown = []
            for directory in self._folder.new():
                if not self._place_for_a_guest():
                    break  # the others wait until a run is closed
                self._folder.see(directory.id)
                try:
                    watched = self._add(Run(directory))
                except (ValueError, OSError):  # as in `attach`
                    continue
                watched.guest = True
                shown.append(watched.view)
            return shown

    def open(self, run: str | Path) -> View:
        """Show one more run, by its id or path."""
        with self._lock:
            found = Run.open(run, self.root)
            already = [watched for watched in self._open if watched.run.path == found.path]
            return (already[0] if already else self._add(found)).view

    def forget_deleted(self) -> bool:
        """Take out the runs whose directory is gone, or going. Returns whether there were any."""
        with self._lock:
            deleted = [watched for watched in self._open if watched.deleted]
            for watched in deleted:
                self._take_out(watched)
            return bool(deleted)

    def close(self, run_id: str) -> None:
        """Take a run that has ended out of the panel; its directory stays."""
        with self._lock:
            watched = self._find(run_id)
            if watched.view.status.active:
                raise RunError(f"{watched.label} is {watched.view.status}: stop it first")
            self._take_out(watched)

    # driving

    def start(self, experiment: Experiment) -> View:
        with self._lock:
            self._refuse_second("start another")
            return self._drive(Run.start(experiment, self.root))

    def fork(self, run_id: str, recipe: Recipe, step: int | None = None, steps: int | None = None) -> View:
        """Go on from a checkpoint of a run under another Recipe, beside it."""
        with self._lock:
            self._refuse_second("fork")
            parent = self._find(run_id)
            return self._drive(parent.run.fork(recipe, step, steps=steps))

    def go_on(self) -> View:
        """Continue a run that was stopped, or failed, from its last checkpoint."""
        with self._lock:
            active = self._driven()
            active.run.resume_from_checkpoint()
            self._forget()
            active.read()
            return active.view

    def pause(self) -> None:
        self._ask("pause")

    def resume(self) -> None:
        self._ask("resume")

    def stop(self) -> None:
        """Asks for a stop; pressed again before the run has ended, it kills."""
        with self._lock:
            again = self.state in ("stopping", "killing")
            self._ask("kill" if again else "stop")

    def switch(self, recipe: Recipe) -> str:
        """Ask the run to go on under this Recipe from its next step on. Returns what was asked, in words."""
        with self._lock:
            active = self._driven()
            now = self._in_flight or active.view.recipe
            if not now.diff(recipe):
                self._wanted = None
                return "nothing to change" if self._in_flight is None else f"asked: {self._said(self._in_flight)}"
            if self._in_flight is None and not self._pausing:
                self._send(recipe)
            else:
                self._wanted = recipe
            return f"asked: {self._said(recipe)}"

    # reading

    def poll(self) -> list[Answer]:
        """Read what is new of all open runs. Returns the answers to switches of the active one."""
        with self._lock:
            self.forget_deleted()
            answers = []
            for watched in self._open:
                events = watched.read()
                if watched is self._active:
                    answers += [self._answer(event) for event in events if self._is_answer(event)]
            if self._active:
                answers += self._settle(self._active.view)
            return answers

    def _settle(self, view: View) -> list[Answer]:
        """Forget what is answered; send the switch that waited for the one before."""
        if self._asked and (not view.status.active or view.status.name in _ANSWERS[self._asked]):
            self._asked = None
        if not view.status.active:
            lost = self.pending
            self._forget()
            text = f"{view.label} ended before it could switch"
            return [Answer(False, text, view.recipe)] if lost else []
        if self._in_flight is None and self._wanted is not None and not self._pausing:
            recipe, self._wanted = self._wanted, None
            if view.recipe.diff(recipe):
                self._send(recipe)
        return []

    def _is_answer(self, event: Mapping[str, Any]) -> bool:
        refused = event["event"] == "refused" and event.get("command") == "switch"
        return (refused or event["event"] == "switched") and self._in_flight is not None

    def _answer(self, event: Mapping[str, Any]) -> Answer:
        assert self._active is not None
        recipe = self._active.view.recipe
        self._in_flight = None
        if event["event"] == "refused":
            return Answer(False, f"refused: {event['reason']}", recipe)
        changes = ", ".join(said_changes(event["changes"]))
        return Answer(True, f"switched at step {event['step']}: {changes or 'nothing differs'}", recipe)

    # how

    def _add(self, run: Run) -> Watched:
        taken = {watched.slot for watched in self._open}
        if len(self._open) >= MOST:
            oldest = next(watched for watched in self._open if watched is not self._active)
            self._open.remove(oldest)
            taken.discard(oldest.slot)
        slot = next(slot for slot in range(MOST + 1) if slot not in taken)
        parent = run.parent
        name = f"{run.experiment.recipe.name} from step {parent[1]}" if parent else run.experiment.name
        watched = Watched(run, slot, self._label(name))
        self._open.append(watched)
        self._folder.see(run.id)
        return watched

    def _place_for_a_guest(self) -> bool:
        """Makes one, if need be, where a guest has ended: what this panel has started stays."""
        left = [watched for watched in self._open if watched.guest and not watched.view.status.active]
        if len(self._open) >= MOST and left:
            self._open.remove(left[0])
        return len(self._open) < MOST

    def _take_out(self, watched: Watched) -> None:
        self._open.remove(watched)
        if self._active is watched:
            own = [other for other in self._open if not other.guest]
            self._active = own[-1] if own else None
            self._forget()

    def _label(self, name: str) -> str:
        labels = {watched.label for watched in self._open}
        number = 2
        label = name
        while label in labels:
            label, number = f"{name} · {number}", number + 1
        return label

    def _drive(self, run: Run) -> View:
        self._active = None  # has ended: it may be the one that makes room
        self._forget()
        self._active = self._add(run)
        return self._active.view

    def _forget(self) -> None:
        self._asked = self._in_flight = self._wanted = None

    def _find(self, run_id: str) -> Watched:
        for watched in self._open:
            if watched.run.id == run_id:
                return watched
        raise RunError(f"{run_id} is not open here: open it first")

    def _driven(self) -> Watched:
        if self._active is None:
            raise RunError("there is no run yet: start one first")
        return self._active

    def _refuse_second(self, what: str) -> None:
        if self._active and self._active.run.alive:
            raise RunError(f"{self._active.label} is {self.state}: stop it first, then {what}")

    def _ask(self, command: str) -> None:
        with self._lock:
            getattr(self._driven().run, command)()
            self._asked = command

    def _send(self, recipe: Recipe) -> None:
        self._driven().run.switch(recipe)
        self._in_flight = recipe

    @property
    def _pausing(self) -> bool:
        return self.state in ("paused", "pausing")

    def _said(self, recipe: Recipe) -> str:
        view = self._driven().view
        changes = view.recipe.diff(recipe)
        said = ", ".join(said_changes(changes))
        when = "after the pause" if self._pausing else "from the next step on"
        return f"{said or 'back to how it is'}, {when}"
