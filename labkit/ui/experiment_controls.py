"""The rest of an Experiment by its numbers: model, task, engine, trainer, device, seed, length, GRPO.

These hold from the next start on; only the recipe changes in a running run. What has no field here (betas, task
options, faults) is kept from the Experiment that was set. A model known by name brings its own steps, learning rate
and batch along.

What is typed may be invalid for a while, such as the path of a model whose task is still missing: then the fields stay
as typed, the line below says what is wrong, and `experiment(recipe)` is None.
"""

from collections.abc import Mapping
from operator import attrgetter
from threading import RLock
from typing import Any

import ipywidgets as widgets

from labkit.config import MODEL_DEFAULTS, ConfigError, Experiment, Recipe, own
from labkit.config.experiment import MODEL_TASKS, TASK_FAMILIES
from labkit.ui.fields import HintLine, choice, heading, html_box, literals, note, number, text

_CELL = 152  # px; two fit the column of controls, five a notebook of 1024 px
_LABEL = "72px"
_NUMBERS = {
    "seed": ("seed", True),
    "steps": ("steps", True),
    "grpo.lr": ("lr", False),
    "grpo.prompts_per_step": ("prompts", True),
    "grpo.group_size": ("group", True),
    "grpo.minibatches": ("minibatch", True),
    "grpo.staleness": ("stale by", True),
    "sampling.temperature": ("temp.", False),
    "lora.rank": ("LoRA rank", True),
    "eval_every": ("eval each", True),
    "checkpoint_every": ("save each", True),
}
_MAY_BE_ZERO = ("seed", "grpo.staleness", "lora.rank", "checkpoint_every")


def model_defaults(model: str) -> dict[str, Any]:
    """What follows a model, as overrides; nothing for one that isn't known by name."""
    if model not in MODEL_DEFAULTS:
        return {}
    keys = {key for defaults in MODEL_DEFAULTS.values() for key in defaults}
    return {key: attrgetter(key)(Experiment()) for key in keys} | MODEL_DEFAULTS[model]


class ExperimentControls:
    def __init__(self, experiment: Experiment, hint: HintLine | None = None) -> None:
        self.hint = hint or HintLine()
        self._lock = RLock()
        self._showing = False
        self._base = experiment
        self._typed: dict[str, Any] = {}  # what the last valid Experiment doesn't have yet
        self._fields: dict[str, Any] = {
            "model": text("model", tuple(MODEL_TASKS), "auto", _LABEL),
            "task": text("task", (*own.options("task"), *(f"{name}:" for name in TASK_FAMILIES)), "auto", _LABEL),
            "engine": text("engine", own.options("engine"), "auto", _LABEL),
            "trainer": choice("trainer", literals(Experiment, "trainer"), "auto", _LABEL),
            "device": choice("device", literals(Experiment, "device"), "auto", _LABEL),
            "trainer_attention": choice("kernels", literals(Experiment, "trainer_attention"), "auto", _LABEL),
        } | {
            key: number(
                label, whole, "auto", "24px" if label == "lr" else _LABEL, least=0 if key in _MAY_BE_ZERO else 1
            )
            for key, (label, whole) in _NUMBERS.items()
        }
        for key, field in self._fields.items():
            self.hint.follow(key, field)
            field.observe(lambda change, key=key: self._touched(key, change["new"]), "value")
        self._problem = html_box(height="44px")
        self._problem.add_class("lk-lines").add_class("lk-problem")
        self.widget = self._lay_out([] if hint else [self.hint])
        self._show()

    def experiment(self, recipe: Recipe) -> Experiment | None:
        """The Experiment shown, with this recipe; None while what is typed can't be run, with the reason on screen."""
        with self._lock:
            return self._build({"recipe": recipe})

    @property
    def problem(self) -> str:
        """What stands in the way of an Experiment; "" if nothing does."""
        with self._lock:
            return self._problem_text

    def set(self, experiment: Experiment) -> None:
        with self._lock:
            self._base, self._typed = experiment, {}
            self._say("")
            self._show()

    def _touched(self, key: str, value: Any) -> None:
        with self._lock:
            if self._showing:
                return
            self.hint.key = key
            self._typed[key] = value
            if key == "model":
                self._typed |= model_defaults(value)
            if (experiment := self._build({})) is not None:
                self._base, self._typed = experiment, {}
                self._show()

    def _build(self, more: Mapping[str, Any]) -> Experiment | None:
        try:
            experiment = self._base.override({**self._typed, **more})
        except ConfigError as error:
            self._say(error.problems[0])
            return None
        self._say("")
        return experiment

    def _say(self, problem: str) -> None:
        self._problem_text = problem
        self._problem.value = note(problem) if problem else ""

    def _show(self) -> None:
        self._showing = True
        try:
            for key, field in self._fields.items():
                field.value = attrgetter(key)(self._base)
        finally:
            self._showing = False

    def _lay_out(self, more: list[widgets.Widget]) -> widgets.VBox:
        for key in ("model", "task"):
            self._fields[key].layout.grid_area = "auto / span 2"
        columns = f"repeat(auto-fill, minmax({_CELL}px, 1fr))"
        layout = widgets.Layout(grid_template_columns=columns, grid_auto_rows="28px", grid_gap="0 8px")
        grid = widgets.GridBox(list(self._fields.values()), layout=layout)
        title = html_box(value=heading("Experiment", "from the next start on"))
        panel = widgets.VBox([title, grid, self._problem, *more], layout=widgets.Layout(width="100%", flex="none"))
        panel.add_class("lk-panel")
        return panel
