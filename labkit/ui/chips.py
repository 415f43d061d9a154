"""The runs of the panel: a chip for each (colour, dash, shown or not), and what can be done with the chosen one.

The six chips are made once and filled by `show`, so nothing is created or moved while a run goes on.
"""

from collections.abc import Callable, Sequence
from threading import RLock

import ipywidgets as widgets

from labkit.ui import theme
from labkit.ui.session import MOST
from labkit.ui.watched import View

_LATEST = -1  # of the checkpoint picker
_DASHES = {
    "dash": "9 5",
    "dot": "2 4",
    "dashdot": "9 4 2 4",
    "longdash": "14 5",
    "longdashdot": "14 4 2 4",
}


class Chips:
    """`on_show(run_id, visible)`, `on_fork(run_id, step or None)`, `on_continue()`, `on_close(run_id)` are called."""

    def __init__(
        self,
        on_show: Callable[[str, bool], None],
        on_fork: Callable[[str, int | None], None],
        on_continue: Callable[[], None],
        on_close: Callable[[str], None],
    ) -> None:
        self._lock = RLock()
        self._showing = False
        self._on_show = on_show
        self._ids: list[str] = []
        self._swatches = [widgets.HTML(layout={"width": "34px", "flex": "none"}) for _ in range(MOST)]
        self._checks = [widgets.Checkbox(indent=False, layout={"width": "auto"}) for _ in range(MOST)]
        for index, check in enumerate(self._checks):
            check.observe(lambda change, index=index: self._toggled(index, change["new"]), "value")
        self._chips = [
            widgets.HBox(pair, layout={"display": "none", "align_items": "center", "grid_gap": "0 4px"})
            for pair in zip(self._swatches, self._checks, strict=True)
        ]
        self.chosen = widgets.Dropdown(
            description="Run",
            layout={"width": "226px"},
            style={"description_width": "34px"},
            options=[("none yet", "")],
        )
        self.baseline = _button("Baseline", "thumb-tack", "Draw the chosen run wider and never hide it; again to undo")
        self.step = widgets.Dropdown(
            description="from step",
            layout={"width": "184px"},
            style={"description_width": "74px"},
            options=[("no checkpoint", _LATEST)],
        )
        self.fork = _button("Fork", "code-fork", "Go on from this checkpoint with the recipe that the switches show")
        self.go_on = _button("Continue", "forward", "Continue the run that was stopped, from its last checkpoint")
        self.close = _button("Remove", "times", "Take the chosen run out of the plot; its folder stays")
        self.pinned: str | None = None
        self._wanted = ""  # the run to be chosen at the next `show`
        self.baseline.on_click(lambda _: self._pin())
        self.fork.on_click(lambda _: on_fork(self.chosen.value, None if self.step.value < 0 else self.step.value))
        self.go_on.on_click(lambda _: on_continue())
        self.close.on_click(lambda _: on_close(self.chosen.value))
        wrap = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0 12px")
        tools = [self.chosen, self.baseline, self.step, self.fork, self.go_on, self.close]
        self.widget = widgets.VBox(
            [
                widgets.HBox(self._chips, layout=wrap),
                widgets.HBox(
                    tools, layout=widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0 6px")
                ),
            ]
        )

    def choose(self, run_id: str) -> None:
        """From the next `show` on, the tabs and buttons are about this run."""
        with self._lock:
            self._wanted = run_id

    def show(self, views: Sequence[View], active: View | None) -> View | None:
        """Fill in what changed. Returns the chosen run."""
        with self._lock:
            self._showing = True
            try:
                self._show_chips(views)
                chosen = self._show_choice(views)
                self._show_tools(chosen, active)
            finally:
                self._showing = False
            return chosen

    def _show_chips(self, views: Sequence[View]) -> None:
        self._ids = [view.id for view in views]
        for index, chip in enumerate(self._chips):
            chip.layout.display = "" if index < len(views) else "none"
        for view, swatch, check in zip(views, self._swatches, self._checks, strict=False):
            swatch.value = _swatch(view)
            check.description = f"{view.label} · {_standing(view)}"
            check.value = view.visible

    def _show_choice(self, views: Sequence[View]) -> View | None:
        options = [(view.label, view.id) for view in views] or [("none yet", "")]
        before = self.chosen.value
        if tuple(options) != tuple(self.chosen.options):
            self.chosen.options = options
        ids = [run_id for _, run_id in options]
        wanted = next(run_id for run_id in (self._wanted, before, ids[-1]) if run_id in ids)
        if self._wanted == wanted:
            self._wanted = ""
        if self.chosen.value != wanted:
            self.chosen.value = wanted
        return next((view for view in views if view.id == self.chosen.value), None)

    def _show_tools(self, chosen: View | None, active: View | None) -> None:
        steps = [(str(step), step) for step in reversed(chosen.checkpoints)] if chosen else []
        options = steps or [("no checkpoint", _LATEST)]
        if tuple(options) != tuple(self.step.options):
            before, newest = self.step.value, self.step.options[0][1]
            self.step.options = options
            if before != newest and before in [step for _, step in options]:  # one that was chosen stays
                self.step.value = before
        ended = chosen is not None and not chosen.status.active
        can_go_on = chosen is not None and chosen is active and chosen.status.name in ("stopped", "failed")
        for button, can in {
            self.baseline: chosen is not None,
            self.step: bool(steps),
            self.fork: bool(steps),
            self.go_on: can_go_on,
            self.close: ended,
        }.items():
            if button.disabled == can:
                button.disabled = not can
        self.baseline.button_style = "info" if chosen and chosen.id == self.pinned else ""
        self.baseline.description = "Baseline ✓" if chosen and chosen.id == self.pinned else "Baseline"

    def _pin(self) -> None:
        with self._lock:
            self.pinned = None if self.pinned == self.chosen.value else self.chosen.value

    def _toggled(self, index: int, visible: bool) -> None:
        with self._lock:
            if self._showing or index >= len(self._ids):
                return
            run_id = self._ids[index]
        self._on_show(run_id, visible)


def _button(label: str, icon: str, tooltip: str) -> widgets.Button:
    return widgets.Button(description=label, icon=icon, tooltip=tooltip, disabled=True, layout={"width": "auto"})


def _standing(view: View) -> str:
    of = f"{view.step} of {view.experiment.steps}"
    worry = f" · {len(view.alarms)} alarm{'s' if len(view.alarms) > 1 else ''}" if view.alarms else ""
    return f"{view.status.name}, {of}{worry}"


def _swatch(view: View) -> str:
    pattern = f" stroke-dasharray='{_DASHES.get(view.dash, '')}'" if _DASHES.get(view.dash) else ""
    return (
        f"<svg width='34' height='24' aria-hidden='true' style='color:{theme.TEXT}'>"
        f"<line x1='1' x2='33' y1='12' y2='12' stroke='{view.colour}' stroke-width='4'{pattern}/></svg>"
    )
