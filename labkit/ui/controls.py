"""The controls of the panel: a Recipe by its switches. (The rest of an Experiment: `labkit.ui.experiment_controls`.)

What the controls show is what would run: a switch that another one rules out is disabled, with the reason beside it,
and takes the value that it then has; a number that a recipe can't have goes back, and the hint line says why. So
`RecipeControls.recipe` is always valid.

Callbacks may come on any thread. Each change is one transaction under a lock; whoever observes is told once, after it.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from threading import RLock
from typing import Any

import ipywidgets as widgets

from labkit.config import DESCRIPTIONS, RECIPES, ConfigError, Recalibration, Recipe, Router, Scaling, own
from labkit.runs.record import Active
from labkit.ui.correction_picker import CorrectionPicker
from labkit.ui.experiment_controls import ExperimentControls
from labkit.ui.fields import (
    HintLine,
    badge,
    checkbox,
    choice,
    column,
    heading,
    html_box,
    literals,
    note,
    number,
    row,
    text,
)

__all__ = ["COMPONENTS", "ExperimentControls", "RecipeControls", "reasons"]

COMPONENTS = {
    "rollout.linears": ("linears", ""),
    "rollout.kv_cache": ("KV cache", ""),
    "rollout.attention": ("attention", ""),
    "train.fprop": ("fprop", "y = x·Wᵀ"),
    "train.dgrad": ("dgrad", "dx = dy·W"),
    "train.wgrad": ("wgrad", "dW = dyᵀ·x"),
}
_LEFT, _RIGHT = "78px", "50px"  # labels of the two fields of a row
_SCALING = ("scaling.format", "scaling.grad_format", "scaling.granularity", "scaling.scale", "scaling.formula")
_CACHE_ONLY = ("scaling.kv_format", "recalibration.policy", "recalibration.every", "recalibration.margin")
_SECTIONS = {"scaling": ("Numbers and scales", _SCALING), "recalibration": ("K and V scales", _CACHE_ONLY)}


def reasons(recipe: Recipe) -> dict[str, str]:
    """Which controls have nothing to act on under the others, and why."""
    found: dict[str, str] = {}
    if not recipe.rollout.kv_cache:
        found |= dict.fromkeys((*_CACHE_ONLY, "rollout.attention"), "needs KV cache")
    elif recipe.recalibration.policy != "every-k-steps":
        found["recalibration.every"] = "every: for every-k-steps"
    if recipe.scaling.granularity == "mx":
        found["scaling.scale"] = "mx scales are pow2"
    return found


def _consequences(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, and what they rule out set to the only value it can have."""
    more: dict[str, Any] = {}
    if changes.get("rollout.kv_cache") is False:
        more = {"rollout.attention": False, "recalibration.policy": "every-step", "scaling.kv_format": "e4m3"}
    if changes.get("scaling.granularity") == "mx":
        more["scaling.scale"] = "pow2"
    return {**changes, **more}


def _named(recipe: Recipe) -> Recipe:
    """The preset that it is; otherwise it is named after the nearest one, fp8-e2e*, however one came there.

    A name of the user's own stays.
    """
    before = recipe.name.removesuffix("*")
    presets = [preset for preset in RECIPES.values() if preset.uses_fp8 == recipe.uses_fp8]
    nearest = min(
        presets, key=lambda preset: (len({_group(key) for key in preset.diff(recipe)}), preset.name != before)
    )
    if not nearest.diff(recipe):
        return nearest
    ours = before == "custom" or before in RECIPES
    return recipe.override({"name": f"{nearest.name}*"}) if ours else recipe


def _group(key: str) -> str:
    return "correction" if key.startswith("correction.") else key


class RecipeControls:
    """`unavailable` names controls that this machine can't offer, with the reason: {"rollout.linears": "needs SM 8.9"}.

    Without a hint line of the caller's, the panel ends with its own.
    """

    def __init__(
        self, recipe: Recipe, hint: HintLine | None = None, unavailable: Mapping[str, str] | None = None
    ) -> None:
        self.hint = hint or HintLine()
        self._unavailable = dict(unavailable or {})
        self._lock = RLock()
        self._showing = False
        self._observers: list[Callable[[Recipe], None]] = []
        self._recipe = recipe
        self._fields: dict[str, Any] = {key: checkbox(label, "auto") for key, (label, _) in COMPONENTS.items()} | {
            "keep_bf16.lm_head": checkbox("lm_head"),
            "keep_bf16.first_layers": number("first", whole=True, label_width="36px"),
            "keep_bf16.last_layers": number("last", whole=True, label_width="36px"),
            "scaling.format": choice("format", literals(Scaling, "format"), label_width=_LEFT),
            "scaling.grad_format": choice("grads", literals(Scaling, "grad_format"), label_width=_RIGHT),
            "scaling.granularity": choice("granularity", literals(Scaling, "granularity"), label_width=_LEFT),
            "scaling.scale": choice("scale", literals(Scaling, "scale"), label_width=_RIGHT),
            "scaling.formula": text("formula", own.options("scaling"), "100%", label_width=_LEFT),
            "scaling.kv_format": choice("format", literals(Scaling, "kv_format"), label_width=_RIGHT),
            "recalibration.policy": choice("renew", literals(Recalibration, "policy"), "180px", label_width="54px"),
            "recalibration.every": number("every", whole=True, label_width="54px", width="180px", least=1),
            "recalibration.margin": number("margin", label_width=_RIGHT),
            "router.dtype": choice("router", literals(Router, "dtype"), label_width=_LEFT),
            "router.replay": choice("replay", literals(Router, "replay"), label_width=_RIGHT),
        }
        self._preset = choice("preset", list(RECIPES), "100%")
        self._notes = {key: html_box("auto") for key in COMPONENTS}
        self._badges = {key: html_box("auto") for key in COMPONENTS}
        self._headings = {key: html_box() for key in _SECTIONS}
        self._correction = CorrectionPicker(self.hint, self._change)
        self._connect()
        parts = [column(*rows, width="100%") for rows in (self._switches(), self._details())]
        for part, name in zip(parts, ("lk-switches", "lk-details"), strict=True):
            part.add_class(name)
        self.widget = column(*parts, *([] if hint else [self.hint]))
        self.widget.add_class("lk-controls")
        self._show()

    @property
    def recipe(self) -> Recipe:
        with self._lock:
            return self._recipe

    def set(self, recipe: Recipe) -> None:
        """Show another recipe. Observers are told of the user's changes only, not of this."""
        with self._lock:
            self._recipe = recipe
            self.hint.problem = ""
            self._show()

    def observe(self, callback: Callable[[Recipe], None]) -> None:
        self._observers.append(callback)

    def badges(self, active: Mapping[str, Active]) -> None:
        """What each component of a run really is, from its record; {} clears them."""
        for key, box in self._badges.items():
            box.value = badge(active.get(key))

    def _connect(self) -> None:
        self.hint.follow("preset", self._preset)
        self._preset.observe(lambda change: self._choose_preset(change["new"]), "value")
        for key, field in self._fields.items():
            self.hint.follow(key, field)
            field.observe(lambda change, key=key: self._touched(key, change["new"]), "value")

    def _switches(self) -> list[widgets.Widget]:
        lines = {key: row(self._fields[key], self._notes[key], self._badges[key]) for key in COMPONENTS}
        for line in lines.values():
            line.add_class("lk-switch")
        return [
            row(self._preset),
            html_box(value=heading("Rollout", "in FP8")),
            *(line for key, line in lines.items() if key.startswith("rollout.")),
            html_box(value=heading("Training", "in FP8")),
            *(line for key, line in lines.items() if key.startswith("train.")),
        ]

    def _details(self) -> list[widgets.Widget]:
        field = self._fields
        return [
            html_box(value=heading("Stays BF16", "layers at the ends")),
            row(field["keep_bf16.lm_head"], field["keep_bf16.first_layers"], field["keep_bf16.last_layers"]),
            self._headings["scaling"],
            row(field["scaling.format"], field["scaling.grad_format"]),
            row(field["scaling.granularity"], field["scaling.scale"]),
            row(field["scaling.formula"]),
            self._headings["recalibration"],
            row(field["recalibration.policy"], field["scaling.kv_format"]),
            row(field["recalibration.every"], field["recalibration.margin"]),
            html_box(value=heading("Experts", "if the model has some")),
            row(field["router.dtype"], field["router.replay"]),
            html_box(value=heading("Correction")),
            *self._correction.rows,
        ]

    def _choose_preset(self, name: str) -> None:
        with self._lock:
            if self._showing or name not in RECIPES:
                return
            self.hint.key = "preset"
            self._accept(RECIPES[name])
        self._tell()

    def _touched(self, key: str, value: Any) -> None:
        with self._lock:
            if self._showing:
                return
            self.hint.key = key
        self._change({key: value})

    def _change(self, changes: Mapping[str, Any]) -> None:
        with self._lock:
            if self._showing:
                return
            try:
                self._accept(_named(self._recipe.override(_consequences(changes))))
            except ConfigError as error:
                self.hint.problem = error.problems[0]
                self._show()
                return
        self._tell()

    def _accept(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.hint.problem = ""
        self._show()

    def _tell(self) -> None:
        for callback in self._observers:
            callback(self.recipe)

    def _show(self) -> None:
        self._showing = True
        try:
            recipe = self._recipe
            why = {**reasons(recipe), **self._unavailable}
            for key, field in self._fields.items():
                field.value = attrgetter(key)(recipe)
                field.disabled = key in why
            for key, (_, meaning) in COMPONENTS.items():
                self._notes[key].value = note(why.get(key, meaning))
                (self._notes[key].add_class if key in why else self._notes[key].remove_class)("lk-why")
            for group, (title, keys) in _SECTIONS.items():
                inside = dict.fromkeys(why[key] for key in keys if key in why)
                self._headings[group].value = heading(title, "; ".join(inside))
            self._show_preset()
            self._correction.show(recipe.correction)
        finally:
            self._showing = False

    def _show_preset(self) -> None:
        recipe = self._recipe
        is_preset = recipe.name in RECIPES and not RECIPES[recipe.name].diff(recipe)
        options = [(name, name) for name in RECIPES]
        if not is_preset:
            options.insert(0, (f"{recipe.name} (changed)" if recipe.name.endswith("*") else recipe.name, ""))
        if tuple(options) != tuple(self._preset.options):
            self._preset.options = options
        self._preset.value = recipe.name if is_preset else ""
        what = DESCRIPTIONS[recipe.name] if is_preset else recipe.short_str()
        self.hint.say("preset", f"{what}. Keep a bf16 run in the plot.")
