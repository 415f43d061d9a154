"""Lab: the panel. Switches, the curves beside or below them, and what looks closer.

    lab = labkit.Lab("fp8-rollout")     a new panel; runs that live under the root are in it
    lab                                 shows it
    lab = labkit.open_lab()             the newest runs, finished ones too: after a reload, a restart, a night

No cell waits for a run. A click sets what was asked and returns; one painter thread reads the run directories and
brings the widgets up to date, five times a second, and more often while an answer is awaited. One panel is open in a
kernel at a time: a new one closes the one before. Runs that the shell or another notebook starts under the same root
come in by themselves.
"""

import html
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from labkit.config import Experiment, Recipe, preset
from labkit.runs.state import RunState
from labkit.ui.arrangement import arrange
from labkit.ui.chips import Chips
from labkit.ui.controls import ExperimentControls, RecipeControls
from labkit.ui.fields import HintLine
from labkit.ui.layout import height
from labkit.ui.panels import SIX
from labkit.ui.session import MOST, Session
from labkit.ui.statusline import StatusLine, remaining, split
from labkit.ui.tabs import TABS
from labkit.ui.watched import View

if TYPE_CHECKING:
    from labkit.ui.charts import Charts

_TICK, _SOON = 0.2, 0.05  # seconds between two looks; the shorter while the answer to a click is awaited
_CHECKPOINTS = 10  # steps between checkpoints, so that there is something to fork from
_PRESET = "fp8-rollout"

_current: "Lab | None" = None


class Lab:
    """`experiment`: a preset's name, or an Experiment; `root`: where the runs are, by default ./runs or LABKIT_RUNS."""

    session: Session

    def __init__(self, experiment: Experiment | str | None = None, root: str | Path | None = None) -> None:
        self._build(experiment, root, newest=0)

    def _build(self, experiment: Experiment | str | None, root: str | Path | None, newest: int) -> None:
        global _current
        start = _experiment(experiment)
        before, _current = _current, self
        session = Session(root)
        if before is not None:
            before.close()
            if before.session.root == session.root:  # a cell that is run again: names and colours stay with their runs
                session = before.session
                session.forget_deleted()
        self.session = session
        attached = session.attach(newest)
        self._lock = threading.RLock()  # of what a click may write as well
        self._drawing = threading.RLock()  # of what only the painter writes, which may take its time
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._charts: Charts | None = None
        self._painted = 0.0
        self._news = ""
        self._complained: str | None = None  # the state in which `_news` was a complaint
        live = session.active if session.busy else None
        self._make_widgets(live.experiment if live else start, live.recipe if live else start.recipe)
        if live:
            self._news = f"attached to {live.label}, which was there"
        elif attached:
            self._news = f"the newest {len(attached)} run{'s' if len(attached) > 1 else ''} opened"
        self._tick()
        for work in (self._make_charts, self._paint):
            threading.Thread(target=work, daemon=True, name=f"labkit-{work.__name__}").start()

    # what a cell may call

    @property
    def runs(self) -> list[View]:
        """The runs shown, the oldest first: `.records`, `.recipe`, `.alarms`, `.status` of each."""
        return self.session.views()

    @property
    def recipe(self) -> Recipe:
        """The Recipe that the switches show."""
        return self.controls.recipe

    @property
    def experiment(self) -> Experiment | None:
        """What Run would start; None while what is typed can't be run."""
        return self.settings.experiment(self.controls.recipe)

    def run(self) -> None:
        self._act(self._start, at_once="starting")

    def pause(self) -> None:
        self._act(self.session.pause)

    def resume(self) -> None:
        self._act(self.session.resume)

    def stop(self) -> None:
        """A second stop, before the run has ended, kills."""
        self._act(self.session.stop)

    def reset(self) -> None:
        """Set switches and settings as this panel began. A running run goes on, under that Recipe."""
        self.settings.set(self._began_with)
        self.switch(self._began_with.recipe)

    def switch(self, recipe: Recipe) -> None:
        """As if the switches had been set to this Recipe by hand."""
        self.controls.set(recipe)
        self._changed(recipe)

    def wait(self, timeout: float | None = None) -> RunState:
        """Block until the run has ended: for scripts and tests. In a notebook it would keep buttons from working."""
        active = self.session.active
        if active is None:
            raise ValueError("there is no run to wait for: call run() first")
        state = active.run.wait(timeout)
        self._tick()
        return state

    def close(self) -> None:
        """Close the widgets and end the painter. Runs go on."""
        self._closed.set()
        self._wake.set()
        with self._lock, self._drawing:
            closed = widgets.HTML("<i>This panel is closed; the newest cell with a panel has its runs.</i>")
            children, self.widget.children = self.widget.children, (closed,)
            for child in children:
                _close(child)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)

    # widgets

    def _make_widgets(self, experiment: Experiment, recipe: Recipe) -> None:
        self._began_with = experiment.override({"recipe": recipe})
        self.hint = HintLine()
        self.controls = RecipeControls(recipe, self.hint)
        self.settings = ExperimentControls(experiment, self.hint)
        self.controls.observe(self._changed)
        self.status = StatusLine()
        self.split = widgets.HTML(layout={"height": "26px", "width": "100%"})
        self.trouble = widgets.HTML(layout={"display": "none"})
        self.b_run = _button("Run", "play", "success", "Start a run with what is shown", self.run)
        self.b_pause = _button("Pause", "pause", "", "Wait at the next micro-step", self._pause_or_resume)
        self.b_stop = _button("Stop", "stop", "danger", "End with a checkpoint; a second press kills", self.stop)
        self.b_fold = _button("Settings", "caret-right", "", "Model, task, seed, learning rate, length", self._fold)
        self.b_reset = _button("Reset", "undo", "", "Switches and settings as this panel began", self.reset)
        self.chips = Chips(self._show_run, self._fork, self._continue, self._remove)
        self.tabs = [tab() for tab in TABS]
        self._tab = widgets.Tab([tab.widget for tab in self.tabs], titles=[tab.title for tab in self.tabs])
        room = {"min_height": f"{height(len(SIX))}px"}  # so that what is below stays where it is
        self.figure = widgets.VBox([widgets.HTML("The curves are being made …")], layout=room)
        self._below = widgets.VBox()
        self.settings.widget.layout.display = "none"
        buttons = widgets.HBox(
            [self.b_run, self.b_pause, self.b_stop, self.b_fold, self.b_reset], layout={"flex": "none"}
        )
        wrap = widgets.Layout(flex_flow="row wrap", align_items="flex-start", grid_gap="0 12px", width="100%")
        top = [widgets.HBox([buttons, self.status], layout=wrap), self.trouble, self.settings.widget, self.hint]
        curves = [self.figure, self.chips.widget, self.split, self._below]
        self.widget = arrange(top, self.controls.widget, curves, self._tab)

    def _make_charts(self) -> None:
        """Seconds of imports, which a panel that can be used at once must not wait for."""
        from labkit.ui.charts import Charts

        charts = Charts()
        with self._drawing:
            if self._closed.is_set():
                _close(charts.figure)
                _close(charts.below)
                return
            charts.update(self.session.views())
            self.figure.children, self._below.children = [charts.figure], [charts.below]
            self._charts = charts

    # clicks

    def _act(self, action: Callable[[], Any], at_once: str = "") -> None:
        """Carry out what was clicked, say so, and have the painter look soon. What can't be done is said, too.

        `at_once`: the state to show before an action that takes longer than a glance.
        """
        try:
            self._news, self._complained = "", None
            self.status.state = at_once or self.status.state
            action()
        except (ValueError, OSError) as error:
            self._news = str(error)
            self._complained = self.session.state
        self._show_state()
        self._wake.set()

    def _start(self) -> None:
        experiment = self.experiment
        if experiment is None:
            raise ValueError(self.settings.problem)
        self.chips.choose(self.session.start(experiment).id)

    def _pause_or_resume(self) -> None:
        self._act(self.session.resume if self.session.state in ("paused", "pausing") else self.session.pause)

    def _changed(self, recipe: Recipe) -> None:
        """A switch was set: a running run is asked to go on so; otherwise it counts from the next start on."""
        if self.session.busy:
            self._act(lambda: self._say(self.session.switch(recipe)))

    def _fork(self, run_id: str, step: int | None) -> None:
        def fork() -> None:
            shown = self.experiment
            steps = shown.steps if shown and step is not None and shown.steps > step else None
            forked = self.session.fork(run_id, self.controls.recipe, step, steps)
            self.chips.choose(forked.id)
            self._say(f"fork {forked.label}")

        self._act(fork, at_once="starting")

    def _continue(self) -> None:
        def go_on() -> None:
            view = self.session.go_on()
            self.controls.set(view.recipe)  # what was set since it ended is for another start

        self._act(go_on, at_once="starting")

    def _show_run(self, run_id: str, visible: bool) -> None:
        self._act(lambda: self.session.show(run_id, visible))

    def _remove(self, run_id: str) -> None:
        self._act(lambda: self.session.close(run_id))

    def _fold(self) -> None:
        folded = self.settings.widget.layout.display == "none"
        self.settings.widget.layout.display = "" if folded else "none"
        self.b_fold.icon = "caret-down" if folded else "caret-right"

    def _say(self, news: str) -> None:
        self._news = news

    # painting

    def _paint(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(_SOON if self.session.waiting or self.session.pending else _TICK)
            self._wake.clear()
            try:
                self._tick()
            except Exception as error:  # the painter must go on: a run directory may be mended
                if self.session.forget_deleted():  # between two of its files that were being read
                    continue
                self._say(f"the panel could not be brought up to date: {type(error).__name__}: {error}")
                self._closed.wait(1.0)

    def _tick(self) -> None:
        for answer in self.session.poll():
            self._say(answer.text)
            if not answer.accepted and self.session.busy and self.session.pending is None:
                self.controls.set(answer.recipe)
        if guests := self.session.notice():
            names = ", ".join(view.label for view in guests)
            self._say(f"started elsewhere: {names} (to drive it: lk.open_lab())")
        self._show_state()
        if time.monotonic() - self._painted >= _TICK * 0.9:
            self._painted = time.monotonic()
            self._show_runs()

    def _show_state(self) -> None:
        """The one place that writes state and buttons, so that an older look never overwrites a newer click."""
        with self._lock:
            if self._closed.is_set():
                return
            state, active, busy = self.session.state, self.session.active, self.session.busy
            if self._complained not in (None, state):
                self._news, self._complained = "", None
            status = self.status
            with status.hold_sync():
                status.state = f"{state} ({active.status.reason})" if active and active.status.reason else state
                status.news = self._news
                if active:
                    steps = active.experiment.steps
                    left = remaining(active.records, steps) if state == "running" else ""
                    status.step, status.steps = active.step, steps
                    status.detail = f"step {active.step} of {steps}" + (f" · {left}" if left else "")
            _enable(self.b_run, not busy)
            _enable(self.b_pause, state in ("running", "paused", "pausing", "resuming", "starting"))
            _enable(self.b_stop, busy)
            self.b_pause.description = "Resume" if state in ("paused", "pausing") else "Pause"
            self.b_pause.icon = "play" if state in ("paused", "pausing") else "pause"
            self.b_stop.description = "Kill" if state in ("stopping", "killing") else "Stop"

    def _show_runs(self) -> None:
        with self._drawing:
            if self._closed.is_set():
                return
            views, active = self.session.views(), self.session.active
            chosen = self.chips.show(views, active)
            self.controls.badges(active.records[-1].active if active and active.records else {})
            self.split.value = split(active.records) if active else ""
            self._show_trouble(active)
            if self._charts:
                self._charts.pin(self.chips.pinned)
                self._charts.update(views)
            if self._tab.selected_index is not None:
                self.tabs[self._tab.selected_index].update(views, chosen)

    def _show_trouble(self, active: View | None) -> None:
        """The end of the log of a run that failed."""
        failed = active is not None and active.status.name == "failed"
        if failed == (self.trouble.layout.display == "none"):
            log = html.escape(active.run.log(40)) if active and failed else ""
            self.trouble.value = f"<details><summary>the end of its log</summary><pre>{log}</pre></details>"
            self.trouble.layout.display = "" if failed else "none"


def open_lab(root: str | Path | None = None) -> Lab:
    """A panel of what is there under the root: the newest runs, and the one that lives, its switches as they are."""
    lab = Lab.__new__(Lab)
    lab._build(None, root, newest=MOST)
    return lab


def _experiment(given: Experiment | str | None) -> Experiment:
    experiment = given if isinstance(given, Experiment) else preset(given or _PRESET)
    return experiment if experiment.checkpoint_every else experiment.override({"checkpoint_every": _CHECKPOINTS})


def _button(label: str, icon: str, style: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
    look = {"description": label, "icon": icon, "button_style": style, "tooltip": tooltip}
    button = widgets.Button(**look, layout={"width": "104px"})
    button.on_click(lambda _: action())
    return button


def _enable(button: widgets.Button, can: bool) -> None:
    if button.disabled == can:
        button.disabled = not can


def _close(widget: widgets.Widget) -> None:
    """The widget and all inside it, with their layouts: a page that loads anew would get them again."""
    children: Sequence[widgets.Widget] = getattr(widget, "children", ())
    for child in children:
        _close(child)
    for part in ("layout", "style"):
        owned = getattr(widget, part, None)
        if isinstance(owned, widgets.Widget):
            owned.close()
    widget.close()
