"""Export: settings as YAML, a command or another framework's configuration, and results as files.

Files go to `exports` in the notebook's folder, where JupyterLab's file browser shows them. Nothing is sampled or
smoothed on the way. A press is acknowledged at once; the file is written by the painter at the next update. A file is
named after what it holds, and a file that is there is never written over: the next one gets a number.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from labkit.config import Experiment
from labkit.config.export import nemo_rl, trl, verl
from labkit.runs.csv import write_csv
from labkit.runs.report import write_html
from labkit.ui.tabs.command import command
from labkit.ui.tabs.copy import CopyButton
from labkit.ui.tabs.page import esc, note, page
from labkit.ui.tabs.svg_file import write_svg
from labkit.ui.tabs.view import OpenRun, Recorded, put, state_of, tools

STARTED, IN_FORCE = "as started", "in force now"
_LONGEST = 100  # characters of a name that lists runs; beyond it they are counted


def _yaml(experiment: Experiment) -> tuple[str, Sequence[str]]:
    what = "`labkit run FILE` carries it out from step 0: switches, and what a fork began with, are not in it."
    return experiment.to_yaml(), (what,)


def _command(experiment: Experiment) -> tuple[str, Sequence[str]]:
    words = command(experiment)
    if words is None:
        return "labkit run experiment.yaml", ("No preset with changes says this: save the YAML under that name.",)
    return words, ()


FORMS: dict[str, tuple[str, Callable[[Experiment], tuple[str, Sequence[str]]]]] = {
    "labkit YAML": ("yaml", _yaml),
    "command": ("sh", _command),
    "NeMo RL": ("nemo-rl.yaml", nemo_rl),
    "verl": ("verl.yaml", verl),
    "TRL": ("trl.py", trl),
}


class Export:
    title = "Export"

    def __init__(self, folder: str | Path = "exports") -> None:
        self.folder = Path(folder)
        style = {"description_width": "auto"}
        self.form = widgets.Dropdown(
            options=list(FORMS), description="Settings as", layout={"width": "250px"}, style=style
        )
        self.recipe = widgets.Dropdown(
            options=[STARTED, IN_FORCE], description="Recipe", layout={"width": "210px"}, style=style
        )
        self.copy = CopyButton()
        self.text = widgets.Textarea(layout={"width": "98%", "height": "230px"})
        self.notes, self.said = widgets.HTML(), widgets.HTML()
        self.buttons = {
            "save": _button("Save these settings", "a file of the text above"),
            "csv": _button("CSV, every step", "all metrics of the runs shown, one row a step"),
            "html": _button("HTML page", "curves and comparison of the runs shown; opens without a network"),
            "svg": _button("SVG of the curves", "six panels of the runs shown, for a paper or a slide"),
        }
        for name, button in self.buttons.items():
            button.on_click(lambda _, name=name: self._ask(name))
        self.widget = widgets.VBox(
            [
                tools(self.form, self.recipe, self.copy),
                self.text,
                self.notes,
                tools(*self.buttons.values()),
                self.said,
            ]
        )
        self._asked: list[str] = []
        self._shown: object = None
        self._say("")

    def update(self, views: Sequence[OpenRun], selected: OpenRun | None) -> None:
        self.recipe.disabled = not (selected and selected.switches)
        state = state_of(selected), self.form.value, self.recipe.value
        if state != self._shown:
            self._shown = state
            self._settings(selected)
        asked, self._asked = self._asked, []
        for name in asked:
            self._say(self._write(name, [view for view in views if view.visible], selected))

    def _ask(self, name: str) -> None:
        self._asked.append(name)
        self._say("Writing …")

    def _settings(self, selected: OpenRun | None) -> None:
        if selected is None:
            self.text.value = self.copy.text = ""
            put(self.notes, page(note("No run is selected.")))
            return
        text, notes = self._content(selected)
        self.text.value = self.copy.text = text
        changed = selected.switches and self.recipe.value == STARTED
        lines = [*notes, *(["The recipe was switched on the way: this is how the run was started."] if changed else [])]
        put(self.notes, page("".join(f"<div class='lk-soft'>{esc(line)}</div>" for line in lines)))

    def _content(self, view: OpenRun) -> tuple[str, Sequence[str]]:
        experiment = view.experiment
        if self._in_force(view):
            experiment = experiment.override({"recipe": view.recipe})
        return FORMS[self.form.value][1](experiment)

    def _in_force(self, view: OpenRun) -> bool:
        return bool(view.switches) and self.recipe.value == IN_FORCE

    def _write(self, name: str, shown: Sequence[OpenRun], selected: OpenRun | None) -> str:
        """Write one file; what to say about it."""
        runs = [selected] if selected and name == "save" else list(shown)
        if not runs:
            return "Nothing to write: select a run." if name == "save" else "Nothing to write: show a run."
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if selected and name == "save":
                switched = f"-switched-at-{selected.switches[-1].step}" if self._in_force(selected) else ""
                path = _unused(self.folder, selected.id + switched, FORMS[self.form.value][0])
                path.write_text(self._content(selected)[0] + "\n", encoding="utf-8")
            else:
                path = self._results(name, _unused(self.folder, _stem(runs), name), runs)
        except (OSError, ValueError) as error:
            return f"⚠ Not written: {error}"
        return f"Written: {path} ({path.stat().st_size / 1000:,.0f} kB)"

    def _results(self, name: str, path: Path, runs: Sequence[OpenRun]) -> Path:
        if name == "svg":
            return write_svg(path, runs)
        recorded: Any = [Recorded.of(view) for view in runs]
        return write_csv(path, recorded) if name == "csv" else write_html(path, recorded)

    def _say(self, text: str) -> None:
        put(self.said, page(f"<div role='status' aria-live='polite' style='min-height: 22px'>{esc(text)}</div>"))


def _stem(runs: Sequence[OpenRun]) -> str:
    """One run is named by its id, several by what their chips say."""
    if len(runs) == 1:
        return runs[0].id
    stem = ""
    for count, run in enumerate(runs):
        name = re.sub(r"[^A-Za-z0-9._]+", "-", run.label).strip("-.")
        longer = f"{stem}+{name}" if stem else name[:_LONGEST]
        if len(longer) > _LONGEST:
            return f"{stem}+{len(runs) - count}-more"
        stem = longer
    return stem


def _unused(folder: Path, stem: str, ending: str) -> Path:
    path, number = folder / f"{stem}.{ending}", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.{ending}", number + 1
    return path


def _button(label: str, tooltip: str) -> widgets.Button:
    return widgets.Button(description=label, tooltip=tooltip, layout={"width": "180px"})
